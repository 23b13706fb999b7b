"""What an image's own budget could bring, and what is known of it early: python benchmarks/difficulty.py --help

A static model is given `fold` at several budgets, as it is, on images held out of training. Then every image gets one
of two budgets, so that the mean is the one aimed for: the smaller for images that are easy. Easy is

    final      what the static model itself is sure of in the end (log-odds of its two best classes): nobody can know
    block L    what a linear probe of the class token after block L says of that (ridge regression, five-fold)

Writes OUT/difficulty.csv: accuracy of both beside that of one budget for all, and the probe's correlation. The two
budgets are the best of all pairs on these very images, so that all gains are upper bounds.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import adaptivit
from adaptivit.data import dataset
from adaptivit.data.gpu_pipeline import evaluation_images
from adaptivit.utils.atomic_io import write_text
from adaptivit.utils.environment import commit
from adaptivit.utils.hardware import device_name

BUDGETS = (0.42, 0.48, 0.52, 0.58, 0.64, 0.70, 0.78, 1.0)
Floats = np.ndarray


def predictions(vit: torch.nn.Module, images: list[torch.Tensor], budgets: tuple[float, ...]) -> dict[float, Floats]:
    """Logits [images, classes] at every budget."""
    found = {}
    for budget in budgets:
        policy = ("static", {}) if budget == 1 else ("fold", {"budget": budget})
        model = adaptivit.create(vit, policy[0], **policy[1]).eval()
        found[budget] = torch.cat([model(batch).logits for batch in images]).float().cpu().numpy()
        print(f"budget {budget}: {len(found[budget])} images", flush=True)
    return found


def class_tokens(vit: torch.nn.Module, images: list[torch.Tensor]) -> list[Floats]:
    """[images, D] after every block."""
    seen: list[list[torch.Tensor]] = [[] for _ in vit.blocks]
    hooks = [
        block.register_forward_hook(lambda _m, _i, out, at=at: at.append(out[:, 0].float().cpu()))
        for block, at in zip(vit.blocks, seen, strict=True)
    ]
    for batch in images:
        vit(batch)
    for hook in hooks:
        hook.remove()
    return [torch.cat(each).numpy() for each in seen]


def probe(tokens: Floats, wanted: Floats, folds: int = 5, ridge: float = 30.0) -> Floats:
    """[images] what a linear function of the token says, fitted on the other folds."""
    x = np.c_[(tokens - tokens.mean(0)) / (tokens.std(0) + 1e-6), np.ones(len(tokens))]
    said, order = np.zeros(len(x)), np.random.default_rng(0).permutation(len(x))
    for fold in range(folds):
        test = order[fold::folds]
        train = np.setdiff1d(order, test)
        known = x[train]
        weights = np.linalg.solve(known.T @ known + ridge * np.eye(x.shape[1]), known.T @ wanted[train])
        said[test] = x[test] @ weights
    return said


def best_of_two(easy: Floats, right: dict[float, Floats], mean: float) -> tuple[float, float, float]:
    """Accuracy %, and the two budgets that give the most, the smaller one to the easiest images."""
    order, best = np.argsort(-easy), (100 * right[mean].mean(), mean, mean)
    for low in (b for b in right if b < mean):
        for high in (b for b in right if b > mean):
            cut = round((high - mean) / (high - low) * len(order))
            hits = np.r_[right[low][order[:cut]], right[high][order[cut:]]]
            best = max(best, (100 * hits.mean(), low, high))
    return best


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", required=True, help="a static model of the data's classes")
    parser.add_argument("--backbone", default="deit_tiny_patch16_224")
    parser.add_argument("--val-split", type=float, default=0.1)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--means", type=float, nargs="+", choices=BUDGETS, default=[0.52, 0.58, 0.64])
    parser.add_argument("--out", type=Path, default=Path("runs/difficulty"))
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    held = dataset.for_training(given.data, given.val_split, 0)[1].spread(given.images)
    make = {"weights": given.weights, "num_classes": len(held.classes)}
    model = adaptivit.create(given.backbone, "static", **make).to(device).eval()
    source = evaluation_images(held, model.preprocessing, device)
    batches = list(dataset.batches(source, dataset.in_order(len(source), 50), 0))
    images = [batch.images.to(device) for batch in batches]
    labels = np.concatenate([np.asarray(batch.labels) for batch in batches])
    tokens = class_tokens(model.vit, images)
    logits = predictions(model.vit, images, BUDGETS)
    right = {budget: (values.argmax(1) == labels).astype(float) for budget, values in logits.items()}
    two = np.sort(logits[1.0], 1)[:, -2:]
    sure = two[:, 1] - two[:, 0]
    rows = []
    scores = {"final": sure} | {f"block {n + 1}": probe(t, np.minimum(sure, 6.0)) for n, t in enumerate(tokens)}
    for mean in given.means:
        rows.append({"easy by": "", "mean budget": mean, "top1": 100 * right[mean].mean(), "low": mean, "high": mean})
        for name, easy in scores.items():
            top1, low, high = best_of_two(easy, right, mean)
            rows.append({"easy by": name, "mean budget": mean, "top1": top1, "low": low, "high": high})
            rows[-1]["correlation"] = float(np.corrcoef(easy, sure)[0, 1])
    where = {"images": len(labels), "static": 100 * right[1.0].mean(), "weights": given.weights}
    where |= {"date": datetime.now(UTC).date().isoformat(), "device": device_name(device), "torch": torch.__version__}
    text = io.StringIO()
    columns = ("easy by", "mean budget", "top1", "low", "high", "correlation", *where, "commit")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    for row in rows:
        short = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in (row | where | {"commit": commit()}).items()}
        writer.writerow(short)
        print(f"{row['mean budget']}  {row['easy by']:10} {row['top1']:.2f}  {row.get('correlation', '')}")
    write_text(given.out / "difficulty.csv", text.getvalue())


if __name__ == "__main__":
    main()
