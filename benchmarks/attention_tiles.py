"""Which tiles of the ragged attention are fastest: python3 benchmarks/attention_tiles.py --batch-sizes 32 256 --out OUT

The table behind tile_for in adaptivit/kernels/ragged_attention.py: images of 197 tokens (and as many as --tokens says),
of which each stays with a chance of --live. Tiles take turns; those that are off by more than 2 % of float32's are left
out.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from adaptivit.kernels import ragged_attention
from adaptivit.utils import environment

TILES = [
    *((m, n, warps, 1) for m in (16, 32) for n in (64, 128) for warps in (4, 8)),  # for one image: more programs
    *((64, 32, 4, s) for s in (2, 3)),
    *((64, 64, 4, s) for s in (1, 2, 3)),
    *((64, 128, 4, s) for s in (1, 2)),
    *((128, 64, 8, s) for s in (2, 3)),
    *((128, 128, 8, s) for s in (1, 2)),
]
PASSES = 50


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / PASSES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=197)
    parser.add_argument("--live", nargs="+", type=float, default=[1.0, 0.85, 0.6, 0.3])
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument(
        "--share", default="0/1", help="I/N: every N-th tile from the I-th; N side by side compile them"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    first, step = (int(part) for part in given.share.split("/"))
    about = environment.describe(torch.device("cuda"))
    facts = {name: about[name] for name in ("date", "device", "commit")}
    facts |= {name: about["versions"].get(name, "") for name in ("torch", "triton")}
    rows = []
    for batch in given.batch_sizes:
        for live in given.live:
            stays = torch.rand(batch, given.tokens, device="cuda") < live
            stays[:, 0] = True
            offsets = torch.nn.functional.pad(stays.sum(1).cumsum(0), (1, 0)).int()
            count = int(offsets[-1])
            qkv = torch.randn(batch * given.tokens, 3, given.heads, given.width, device="cuda").to(torch.bfloat16)
            q, k, v = qkv.unbind(1)
            there = torch.rand(len(qkv), device="cuda") < 0.9
            for weight in (None, there) if live < 1 else (None,):
                kind = "bool" if weight is not None else ""
                want = ragged_attention.reference(*(t[:count].float() for t in (q, k, v)), offsets, weight)
                graphs = {}
                for tile in TILES[first::step]:
                    try:
                        out = ragged_attention.attend(
                            q, k, v, offsets, given.tokens, weight, tile=ragged_attention.Tile(*tile)
                        )
                        error = float((out[:count].float() - want[:count]).norm() / want[:count].norm())
                        assert error < 2e-2, f"off by {error:.2g}"
                        torch.cuda.synchronize()
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph):
                            for _ in range(PASSES):
                                ragged_attention.attend(
                                    q, k, v, offsets, given.tokens, weight, tile=ragged_attention.Tile(*tile)
                                )
                    except Exception as failure:  # a tile that does not fit
                        print(f"{tile}: {type(failure).__name__}: {str(failure)[:200]}", file=sys.stderr)
                        continue
                    graphs[tile] = (graph, error)
                times: dict[tuple[int, ...], list[float]] = {tile: [] for tile in graphs}
                for _ in range(given.turns + 1):
                    for tile, (graph, _) in graphs.items():
                        times[tile].append(microseconds(graph))
                rest = (batch, count // batch, weight is not None)
                now = ragged_attention.tile_for(given.tokens, given.width, torch.bfloat16, *rest)
                found = sorted((statistics.median(t[1:] or t), tile) for tile, t in times.items())
                words = [f"{took:.1f} {'x'.join(map(str, tile))}{' (now)' * (tile == now)}" for took, tile in found]
                print(f"batch {batch}, live {live}{kind and ', ' + kind}: {'; '.join(words)}", flush=True)
                rows += [
                    {"batch": batch, "tokens": given.tokens, "live": live, "weight": kind, "heads": given.heads}
                    | {"width": given.width, "tile": "x".join(map(str, tile)), "used": tile == now}
                    | {"us": f"{took:.5g}", "error": f"{graphs[tile][1]:.2g}", "turns": given.turns, **facts}
                    for took, tile in found
                ]
    if given.out is not None and rows:
        given.out.mkdir(parents=True, exist_ok=True)
        with (given.out / "attention_tiles.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
