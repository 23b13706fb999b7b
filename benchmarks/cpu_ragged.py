"""Ragged inference on a CPU against static and masked, interleaved in one run: uv run python benchmarks/cpu_ragged.py

A halting profile is replayed: before every block each patch that is still live stays with the chance that gives the
profile's mean live share, so counts differ from image to image; the class token stays. Seeded random weights: speed
does not depend on them. Prints a table and appends rows to benchmarks/cpu_ragged.csv.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import adaptivit
from adaptivit.commands import append_csv
from adaptivit.decision import Drop, Step, Trace
from adaptivit.model import AdaptiveViT

PROFILES = {
    "none": [1.0] * 12,
    "90": [1, 1, 0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.86, 0.82, 0.78, 0.76],
    "65": [1, 1, 0.95, 0.85, 0.8, 0.7, 0.65, 0.55, 0.45, 0.35, 0.28, 0.22],
    "50": [1, 0.9, 0.75, 0.6, 0.55, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15],
}


def drawn_trace(profile: list[float], batch: int, tokens: int, seed: int) -> Trace:
    """A trace in which each patch leaves after block l with the chance that the profile says."""
    luck = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed))
    luck[:, 0] = -1.0
    steps, live = [], torch.ones(batch, tokens, dtype=torch.bool)
    attended = [live]
    for layer, share in enumerate(profile[1:]):
        stays = live & (luck < share)
        steps.append(Step(layer, "after", Drop(live & ~stays)))
        live = stays
        attended.append(live)
    grid = torch.stack(attended)
    return Trace(grid, grid, 1, tuple(steps))


def interleaved(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 2):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    return times


@torch.inference_mode()
def measure(backbone: str, profile: str, batch: int, repeats: int) -> None:
    torch.manual_seed(0)
    static = adaptivit.create(backbone, "static")
    images: Tensor = torch.randn(batch, 3, 224, 224)
    trace = drawn_trace(PROFILES[profile], batch, static.shape.tokens, seed=1)
    ragged = AdaptiveViT(static.vit, "replay", {"trace": trace}).eval()
    packed, masked = ragged(images, layout="packed"), ragged(images, layout="masked")
    error = float((packed.logits - masked.logits).abs().max())
    share = float(packed.macs.mean()) / packed.costs.static
    times = interleaved(
        {
            "timm": lambda: static.vit(images),
            "static, packed": lambda: static(images, layout="packed"),
            "ragged, masked": lambda: ragged(images, layout="masked"),
            "ragged, packed": lambda: ragged(images, layout="packed"),
        },
        repeats,
    )
    best = min(times["timm"])
    for name, values in times.items():
        row = {
            "date": datetime.date.today().isoformat(),
            "backbone": backbone,
            "profile": profile,
            "batch": batch,
            "mean_live_share": round(float(trace.attended.double().mean()), 4),
            "mac_share": round(share if name.startswith("ragged") else 1.0, 4),
            "contender": name,
            "min_ms": round(1e3 * min(values), 3),
            "median_ms": round(1e3 * statistics.median(values), 3),
            "max_ms": round(1e3 * max(values), 3),
            "min_over_timm_min": round(min(values) / best, 4),
            "max_logit_error": f"{error:.2e}",
            "repeats": repeats,
            "threads": torch.get_num_threads(),
            "device": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "adaptivit": adaptivit.__version__,
        }
        append_csv("benchmarks/cpu_ragged.csv", row)
        print(
            f"{backbone:24} b{batch:<3} live {row['mean_live_share']:.2f}  MACs {row['mac_share']:.3f}  {name:16}"
            f"{row['min_ms']:9.1f} ms  {row['min_over_timm_min']:.3f} of timm's time"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", nargs="+", default=["deit_tiny_patch16_224"])
    parser.add_argument("--profile", nargs="+", default=["none", "90", "65"], choices=PROFILES)
    parser.add_argument("--batch", nargs="+", type=int, default=[16])
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    for name in options.backbone:
        for kind in options.profile:
            for size in options.batch:
                measure(name, kind, size, options.repeats)
