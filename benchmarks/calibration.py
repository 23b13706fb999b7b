"""How well a budget is met on images that the curve has not seen: DeiT-T's ImageNet weights, several policies.

    python benchmarks/calibration.py SEEN UNSEEN WEIGHTS OUT.csv --policies aht avit evit

SEEN and UNSEEN are image folders; of each image the middle 224 x 224 pixels are taken, without resizing. Policies have
not been trained: the figures say how a budget is met, and nothing of accuracy. Rows are appended policy by policy.
"""

from __future__ import annotations

import argparse
import datetime
import math
import time

import torch
from torchvision.transforms import v2

import adaptivit
from adaptivit.budget.measure import Check, check
from adaptivit.data import dataset
from adaptivit.data.dataset import Images
from adaptivit.policies import spec as settings
from adaptivit.utils.csv import append_csv
from adaptivit.utils.hardware import device_name

BUDGETS = ("-20%", "-33%", "-50%")
POLICIES = (
    "aht",
    "aht_merge:feature=class_row,removal=drop",
    "avit",
    "confidence",
    "evit",
    "tome",
    "fold",
    "mod",
    "amod",
    "dynamicvit",
)


def tensors(folder: str, count: int, transform: object) -> torch.Tensor:
    images = Images(dataset.for_evaluation(folder, "auto").spread(count), transform)  # type: ignore[arg-type]
    return torch.cat([batch.images for batch in dataset.batches(images, dataset.in_order(len(images), 64))])


def chance(row: Check, seen: int, unseen: int) -> float:
    """What the two samples alone make of the error, in 19 of 20 cases: the unseen images are a sample, too."""
    return 2 * (row.point.spread or 0.0) * math.sqrt(1 / seen + 1 / unseen) / row.wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("seen", "unseen", "weights", "out"):
        parser.add_argument(name)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--check-images", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    steps = [v2.CenterCrop(224), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    seen, unseen = (
        tensors(folder, count, v2.Compose(steps))
        for folder, count in ((given.seen, given.images), (given.unseen, given.check_images))
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for spec in given.policies:
        torch.manual_seed(given.seed)  # predictors and routers start at random
        name, values = settings.parse(spec)
        model = adaptivit.create("deit_tiny_patch16_224", name, weights=given.weights, **values).to(device)
        begun = time.perf_counter()
        curve = model.calibrate(seen)
        seconds = time.perf_counter() - begun
        reachable = [b for b in BUDGETS if 1 + float(b[:-1]) / 100 >= curve.points[-1].macs / curve.static]
        for row in check(model, unseen, reachable):
            made = {
                "policy": spec,
                "knob": curve.dial,
                "points": len(curve.points),
                "least_share": curve.points[-1].macs / curve.static,
                "budget": row.budget,
                "position": row.position,
                "gmacs_asked": row.wanted / 1e9,
                "gmacs": row.point.macs / 1e9,
                "error_percent": 100 * row.error,
                "expected_percent": 100 * (curve.error(row.wanted) or 0.0),  # two standard errors
                "chance_percent": 100 * chance(row, len(seen), len(unseen)) * curve.continuous,
                "images": len(seen),
                "check_images": len(unseen),
                "seconds": seconds,
                "seed": given.seed,
                "device": device_name(device),
                "date": datetime.date.today().isoformat(),
                "torch": torch.__version__,
                "adaptivit": adaptivit.__version__,
            }
            append_csv(given.out, {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in made.items()})
            print(
                f"{spec:24} {row.budget:>5} {curve.dial} {row.position:8.4f} error {made['error_percent']:+.2f} %, "
                f"expected within {made['expected_percent']:.2f} %, here {made['chance_percent']:.2f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
