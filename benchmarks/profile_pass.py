"""Where the time of a captured pass goes: python3 benchmarks/profile_pass.py --policies fold:budget=0.67 tome:r=13

One CUDA graph of every policy, as it is and compiled; microseconds a pass, and how often each kernel runs in it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import adaptivit
from adaptivit.evaluation.halting_profiles import PROFILES, trace_of
from adaptivit.policies import spec as settings

PASSES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["static", "fold:budget=0.67"], help="or a profile: halting")
    parser.add_argument("--backbone", default="deit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--compile", nargs="+", choices=("no", "yes"), default=["no", "yes"])
    parser.add_argument("--kernels", type=int, default=25, help="of the slowest kernels, so many")
    given = parser.parse_args()
    torch.manual_seed(0)
    vit = adaptivit.create(given.backbone, "static").vit
    images = torch.randn(given.batch, 3, *vit.patch_embed.img_size, device="cuda", dtype=torch.bfloat16)
    for spec in given.policies:
        profile: Any = images
        if spec in PROFILES:
            sizes = {"tokens": vit.pos_embed.shape[1], "prefix": vit.num_prefix_tokens, "layers": len(vit.blocks)}
            profile = trace_of(spec, batch=given.batch, seed=0, **sizes)
            policy, values = "replay", {"trace": profile}
        else:
            policy, values = settings.parse(spec)
        model = adaptivit.create(vit, policy, **values).cuda().to(torch.bfloat16).eval()
        for kind in given.compile:
            began = time.perf_counter()
            fast = model.capture(given.batch, profile=profile, compile=kind == "yes")
            made = time.perf_counter() - began
            name = f"{spec}, batch {given.batch}, {'compiled' if kind == 'yes' else 'as it is'}"
            print(f"\n{fast.explain()}")
            report(name, fast, images, made, given.kernels)


def report(
    name: str, fast: adaptivit.execution.cuda_graph.Captured, images: torch.Tensor, made: float, most: int
) -> None:
    for _ in range(3):
        fast(images)
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(50)] for _ in range(2))
    for start, end in zip(starts, ends, strict=True):
        start.record()
        fast._graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PASSES):
            fast._graph.replay()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name].append(event.device_time)
    total, number = sum(map(sum, spent.values())) / PASSES, sum(map(len, spent.values())) // PASSES
    print(f"\n{name}: {1e3 * times[len(times) // 2]:.0f} us a pass, {number} kernels of {total:.0f} us; {made:.0f} s")
    for kernel, each in sorted(spent.items(), key=lambda item: -sum(item[1]))[:most]:
        print(f"{sum(each) / PASSES:8.1f} us {len(each) / PASSES:5.0f} x {sum(each) / len(each):6.1f}  {kernel[:90]}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
