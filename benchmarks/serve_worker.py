"""Throughput of the service's worker, decoded images in and answers out: adaptive models against static, in turns.

    python benchmarks/serve_worker.py IMAGES WEIGHTS OUT.csv --policies evit fold aht --budget=-33%

Every contender has a Batcher of its own with the same settings: full queue (so many images at once), and one request
at a time. Half of the images calibrates, the other half is served. DeiT-T's ImageNet weights; policies have not been
trained, so the figures say nothing of accuracy. Rows are appended.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from typing import Any

import torch
from torchvision.transforms import v2

import adaptivit
from adaptivit.data import dataset
from adaptivit.data.dataset import Images
from adaptivit.policies import spec as settings
from adaptivit.serve import Batcher, Job
from adaptivit.utils.csv import append_csv
from adaptivit.utils.hardware import device_name

BACKBONE = "deit_tiny_patch16_224"


def tensors(folder: str, count: int) -> torch.Tensor:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    steps = [v2.CenterCrop(224), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    images = Images(dataset.for_evaluation(folder, "auto").spread(count), v2.Compose(steps))
    return torch.cat([batch.images for batch in dataset.batches(images, dataset.in_order(len(images), 64))])


def full(batcher: Batcher, images: torch.Tensor) -> tuple[float, Any]:
    """Images a second with all of them waiting, and the answers."""
    begun = time.perf_counter()
    answers = [f.result() for f in batcher.submit([Job(image) for image in images])]
    return len(images) / (time.perf_counter() - begun), answers


def single(batcher: Batcher, images: torch.Tensor) -> float:
    """Images a second, the next sent when the one before is answered."""
    begun = time.perf_counter()
    for image in images:
        batcher.submit([Job(image)])[0].result()
    return len(images) / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("images", "weights", "out"):
        parser.add_argument(name)
    parser.add_argument("--policies", nargs="+", default=["evit", "fold", "aht"])
    parser.add_argument("--budget", default="-33%")
    parser.add_argument("--count", type=int, default=96, help="images a turn")
    parser.add_argument("--singles", type=int, default=8, help="images a turn, one at a time")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = tensors(given.images, 2 * given.count)
    seen, served = images[::2], images[1::2]
    batchers: dict[str, Batcher] = {}
    for spec in ("static", *given.policies):
        torch.manual_seed(given.seed)  # predictors and routers start at random
        name, values = settings.parse(spec)
        model = adaptivit.create(BACKBONE, name, weights=given.weights, **values).to(device)
        if spec != "static":
            model.calibrate(seen, given.budget)
        batchers[spec] = Batcher(model, wait=0.0, queue=given.count)
        print(f"{spec} ready", flush=True)
    rates: dict[str, list[float]] = {spec: [] for spec in batchers}
    singles: dict[str, list[float]] = {spec: [] for spec in batchers}
    answers: dict[str, Any] = {}
    for turn in range(given.turns + 1):
        for spec, batcher in batchers.items():
            rate, answers[spec] = full(batcher, served)
            alone = single(batcher, served[: given.singles])
            if turn:  # the first warms up
                rates[spec].append(rate)
                singles[spec].append(alone)
        print(f"turn {turn} of {given.turns}", flush=True)
    best = max(rates["static"])
    for spec, batcher in batchers.items():
        batcher.close()
        found = answers[spec]
        ratios = [a / b for a, b in zip(rates[spec], rates["static"], strict=True)]
        row = {
            "policy": spec,
            "budget": "" if spec == "static" else given.budget,
            "mac_share": sum(a.macs for a in found) / sum(a.static_macs for a in found),
            "live_tokens": statistics.mean(sum(a.live) / len(a.live) for a in found),
            "batch_images": statistics.mean(a.images for a in found),
            "images_per_s": statistics.median(rates[spec]),
            "images_per_s_best": max(rates[spec]),
            "speed_vs_static": statistics.median(ratios),
            "speed_vs_static_least": min(ratios),
            "speed_vs_static_most": max(ratios),
            "speed_vs_static_of_bests": max(rates[spec]) / best,
            "one_at_a_time_per_s": statistics.median(singles[spec]),
            "speed_vs_one_at_a_time": statistics.median(a / b for a, b in zip(rates[spec], singles[spec], strict=True)),
            "backbone": BACKBONE,
            "batch_tokens": batcher.tokens,
            "images": given.count,
            "turns": given.turns,
            "seed": given.seed,
            "device": device_name(device),
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "adaptivit": adaptivit.__version__,
        }
        append_csv(given.out, {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
        print(
            f"{spec:8} {row['images_per_s']:7.1f} images/s, {row['speed_vs_static']:.2f}x static "
            f"({row['speed_vs_static_least']:.2f}..{row['speed_vs_static_most']:.2f}), "
            f"{row['speed_vs_one_at_a_time']:.2f}x one at a time, batches of {row['batch_images']:.1f}, "
            f"{100 * row['mac_share']:.1f} % of the MACs"
        )


if __name__ == "__main__":
    main()
