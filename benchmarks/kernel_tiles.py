"""Which tiles are fastest, kernel by kernel: python3 benchmarks/kernel_tiles.py [--only linear] [--rows 6304]

The tables behind tile_for in adaptivit/kernels/. Triton compiles every tile first, which takes long: run it with
--compile I/N in N processes side by side (nothing is timed then), and then once without. Prints the fastest tiles of
every case, with the error against float32, beside the tile that tile_for chooses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from adaptivit.kernels import linear, norm, norm_linear
from adaptivit.kernels.launch import KernelRows

LINEAR = [
    linear.Tile(m, n, k, warps, stages, residents, parts)
    for m, n, warps in ((64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8))
    for k in (64, 128)
    for stages in (3, 4, 5)
    for residents in (0, 1, 2)
    for parts in (1, 2)
    if stages * (m + n) * k * 2 + m * n * 2 // parts < 225_000 // max(residents, 1)
]
MANY = [  # three and four programs a multiprocessor: one wave where two would need a second for a few tiles
    linear.Tile(m, n, k, 4, stages, residents, n // 64)
    for m, n in ((64, 64), (64, 128), (128, 64))
    for k in (32, 64)
    for stages in (2, 3, 4, 6)
    for residents in (3, 4)
    if stages * (m + n) * k * 2 + m * 64 * 2 < 225_000 // residents
]
SMALL = [  # for a row an image: the last MLP, and the rows of one image
    linear.Tile(m, n, k, 4, stages, 0)
    for m, n in ((16, 16), (16, 32), (16, 64), (32, 32), (64, 16), (64, 32))
    for k in (128, 256)
    for stages in (3, 4)
    if stages * (m + n) * k * 2 < 200_000
]
PRODUCTS = ("qkv", "proj", "fc1", "fc2")
KINDS = {"linear": LINEAR, "many": MANY, "small": SMALL}
NORM_LINEAR = [
    norm_linear.Tile(m, n, warps)
    for m, n, warps in ((16, 16, 4), (16, 32, 4), (16, 64, 4), (32, 32, 4), (32, 64, 4), (32, 64, 8), (32, 128, 8))
]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def cases(rows: int, width: int, only: list[str]) -> Iterator[tuple[str, list[Any], Callable[[Any], Tensor], Tensor]]:
    """What is timed: name, tiles, how to run one (None: as the library does), what should come out."""
    count = torch.tensor([rows], device="cuda", dtype=torch.int32)
    x, hidden = noise(rows, width), noise(rows, 4 * width)
    gain, offset = noise(width), noise(width)
    shapes = {
        "qkv": (x, 3 * width, False),
        "proj": (x, width, True),
        "fc1": (x, 4 * width, False),
        "fc2": (hidden, width, True),
    }
    for name, (given, out, adds) in shapes.items():
        weight, bias = noise(out, given.shape[1]) * given.shape[1] ** -0.5, noise(out)
        gelu, residual = name == "fc1", x if adds else None
        if kinds := [kind for kind in KINDS if kind in only]:

            def product(
                tile: Any, given: Any = given, w: Any = weight, b: Any = bias, r: Any = residual, g: Any = gelu
            ) -> Tensor:
                if tile is None:
                    return linear.linear(given, w, b, r, None, count, g, rows)
                return linear.linear(given, w, b, r, None, count, g, tile=tile)

            f32 = [None if t is None else t.float() for t in (given, weight, bias, residual)]
            tiles = [tile for kind in kinds for tile in KINDS[kind]]
            yield f"linear {name}", tiles, product, linear.reference(*f32, None, count, gelu)  # type: ignore[arg-type]
        if "norm_linear" in only and not adds:

            def both(tile: Any, w: Any = weight, b: Any = bias, g: Any = gelu) -> Tensor:
                if tile is None:  # two kernels
                    y, _, _ = norm.norm(KernelRows(x, count=count), gain, offset, 1e-6)
                    return linear.linear(y, w, b, None, None, count, g, rows)
                return norm_linear.norm_linear(KernelRows(x, count=count), gain, offset, 1e-6, w, b, gelu=g, tile=tile)[
                    0
                ]

            f32 = [t.float() for t in (x, gain, offset)]
            want = norm_linear.reference(*f32, 1e-6, weight.float(), bias.float(), None, count, -1, gelu)[0]  # type: ignore[misc]
            yield f"norm_linear {name}", NORM_LINEAR, both, want


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["linear", "norm_linear"], choices=[*KINDS, "norm_linear"])
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS), choices=PRODUCTS)
    parser.add_argument("--rows", nargs="+", type=int, default=[197, 1576, 6304, 50432])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--compile", metavar="I/N", help="only compile every N-th tile, from the I-th on")
    parser.add_argument("--best", type=int, default=4)
    options = parser.parse_args()
    from triton.testing import do_bench_cudagraph

    for rows in options.rows:  # Triton compiles anew for 1, and for multiples of 16
        for name, tiles, run, reference in cases(rows, options.width, options.only):
            if name.split()[-1] not in options.products:
                continue
            if options.compile:
                first, every = map(int, options.compile.split("/"))
                tiles = tiles[first::every]
            found = []
            for tile in [None, *tiles]:
                try:
                    out = run(tile).float()
                    error = float((out - reference).norm() / reference.norm())
                    took = 0.0 if options.compile else 1e3 * do_bench_cudagraph(partial(run, tile), rep=8)
                except Exception as failure:  # a tile that does not fit is no news
                    print(f"{rows} rows, {name}, {tile}: {type(failure).__name__}", file=sys.stderr)
                    continue
                found.append((took, error, tile))
            if not options.compile:
                print(f"{rows} rows, {name}")
                chosen = [f for f in found if f[2] is None]
                for took, error, tile in sorted((f for f in found if f[2] is not None), key=lambda f: f[0])[
                    : options.best
                ]:
                    print(f"  {took:8.1f} us  {tile}  error {error:.0e}")
                for took, _, _ in chosen:
                    print(f"  {took:8.1f} us  as the library runs it", flush=True)


if __name__ == "__main__":
    main()
