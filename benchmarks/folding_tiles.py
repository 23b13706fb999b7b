"""Which tiles of folding are fastest: python3 benchmarks/folding_tiles.py [--batch-sizes 1 32 256]

What a block of `fold` does, with DeiT-S's 197 tokens of 384, of which 16 leave: meet.py ranks them and finds whom they
join, merge.py adds the rows up. With --compile I/N only every N-th tile is compiled, so that N processes share that.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from adaptivit.kernels import constants, merge, merge_assign
from adaptivit.kernels.merge_score import MergeScore

SLOTS, WIDTH, HEAD, LEAVING = 197, 384, 64, 16
ASSIGN = [
    merge_assign.Tile(m, n, part, warps)
    for m, n, part, warps in itertools.product((16, 32), (64, 128), (16, 32), (4, 8))
]
MERGE = [
    (piece, merge.Tile(m, 16, warps, packs))
    for piece, m, warps, packs in itertools.product((64, 128), (16, 32, 64), (2, 4), (False, True))
]


def cases(batch: int) -> Any:
    """Name, tiles, what takes a tile, what is timed."""
    from adaptivit.kernels.scores_and_keys import unit_keys_reference

    k = torch.randn(batch * SLOTS, 6, HEAD, device="cuda")
    offsets, cells = constants.steps(k, batch * SLOTS + 1, SLOTS), constants.steps(k, batch * SLOTS, 1)
    units = unit_keys_reference(k, cells, offsets, SLOTS)
    here = torch.ones(batch, SLOTS, dtype=torch.bool, device="cuda")
    patches = here & (torch.arange(SLOTS, device="cuda") > 0)
    size = torch.ones(batch, SLOTS, device="cuda")
    score = MergeScore(torch.rand(batch, SLOTS, device="cuda"), torch.rand(batch, SLOTS, device="cuda"), 0.5, 0.5)
    count = SLOTS - 1 - LEAVING
    assigns = partial(merge_assign.merge_assign, units, patches, here, size, None, None, score, count)
    assigned = assigns()
    rows = torch.randn(batch * SLOTS, WIDTH, device="cuda").to(torch.bfloat16)
    merges = partial(merge.merge, rows, here, assigned.target, assigned.source_weight, cells, count + 1, assigned.size)

    def of_assign(tile: merge_assign.Tile) -> None:
        merge_assign.tile_for = lambda *_: tile

    def of_merge(tile: tuple[int, merge.Tile]) -> None:
        merge.PIECE, merge.tile_for = tile[0], lambda *_: tile[1]

    yield "assign", ASSIGN, of_assign, assigns
    yield "merge", MERGE, of_merge, merges


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--compile", metavar="I/N", help="only compile every N-th tile, from the I-th on")
    given = parser.parse_args()
    from triton.testing import do_bench_cudagraph

    tiles_for = (merge_assign.tile_for, merge.tile_for)
    torch.manual_seed(0)
    with torch.inference_mode():
        for batch in given.batch_sizes:
            chosen = (tiles_for[0](256, batch, HEAD), (64, tiles_for[1](batch)))
            for (name, tiles, take, run), now in zip(cases(batch), chosen, strict=True):
                if given.compile:
                    first, every = map(int, given.compile.split("/"))
                    tiles = tiles[first::every]
                found = []
                for tile in tiles:
                    take(tile)
                    try:
                        run()
                        found.append((0.0 if given.compile else 1e3 * do_bench_cudagraph(run, rep=8), tile))
                    except Exception as failure:  # a tile that does not fit is no news
                        print(f"{name}, {tile}: {type(failure).__name__}", file=sys.stderr)
                take(now)
                if not given.compile:
                    best = sorted(found, key=lambda f: f[0])
                    print(f"batch {batch}, {name}")
                    for took, tile in best:
                        print(f"  {took:8.1f} us  {tile}{'  as it is' if tile == now else ''}", flush=True)


if __name__ == "__main__":
    main()
