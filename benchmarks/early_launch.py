"""Captured passes whose kernels are launched early (kernels.early), beside the same ones launched one after the other.

python3 benchmarks/early_launch.py --policies static aht:gamma=10,beta=-4.8 fold:budget=0.67 --batch-sizes 1 32

Both take turns. The logits must be equal to the last bit: the kernels are the same, and a kernel that did not wait for
the one before it would read what is not there yet. Exit code 1 where they are not.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import adaptivit
from adaptivit import environment, settings
from adaptivit.capture import Captured
from adaptivit.model import AdaptiveViT
from adaptivit.ops import kernels


def captured(model: AdaptiveViT, images: torch.Tensor, early: bool, compiled: bool) -> Captured:
    """Without a profile, so that both move rows at the same places: measured times differ from capture to capture."""
    kernels.launch_early = early
    return model.capture(len(images), compile=compiled)


def milliseconds(fast: Captured, passes: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(passes):
        fast._graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["static"])
    parser.add_argument("--backbone", default="deit_small_patch16_224")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--checks", type=int, default=50, help="calls whose logits are compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    vit = adaptivit.create(given.backbone, "static").vit
    about = environment.describe(torch.device("cuda"))
    facts = {name: about[name] for name in ("date", "device", "commit")}
    facts |= {name: about["versions"].get(name, "") for name in ("torch", "triton", "timm")}
    rows, wrong = [], 0
    for spec in given.policies:
        policy, values = settings.parse(spec)
        model = adaptivit.create(vit, policy, **values).cuda().to(torch.bfloat16).eval()
        for batch in given.batch_sizes:
            images = torch.randn(batch, 3, *vit.patch_embed.img_size, device="cuda", dtype=torch.bfloat16)
            late, early = (captured(model, images, early, given.compile) for early in (False, True))
            off = 0
            for _ in range(given.checks):
                images.normal_()
                off += not torch.equal(late(images).logits, early(images).logits)
            wrong += off > 0
            times = [(milliseconds(late, 20), milliseconds(early, 20)) for _ in range(given.turns + 1)][1:]
            before, after = (statistics.median(side) for side in zip(*times, strict=True))
            ratio = statistics.median(a / b for a, b in times)
            print(f"{spec}, batch {batch}: {before:.4f} ms, early {after:.4f}, {ratio:.3f}x; unequal {off}", flush=True)
            rows.append(
                {"backbone": given.backbone, "policy": spec, "batch": batch, "compiled": given.compile}
                | {"ms": f"{before:.6g}", "ms_early": f"{after:.6g}", "ratio": f"{ratio:.5g}", "unequal": off}
                | {"turns": given.turns, "seed": given.seed, **facts}
            )
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        with (given.out / "early_launch.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
