"""What `adaptivit evaluate` measures and shows: a progress bar, a row for CSV and JSON, a table for the screen."""

from __future__ import annotations

from typing import Any

import torch
from rich.table import Table

from .. import tasks
from ..data import dataset
from ..data.dataset import Labelled
from ..data.gpu_pipeline import evaluation_images
from ..model import AdaptiveViT
from ..policies import spec
from ..utils.console import announce, bar, count
from ..utils.environment import summary
from ..utils.hardware import device_name
from ..utils.text import signed_percent
from .evaluate import Result, evaluate, flipped_decisions


def measure(
    model: AdaptiveViT,
    labelled: Labelled,
    device: torch.device,
    *,
    precision: str = "fp32",
    layout: str = "auto",
    batch_size: int = 64,
    workers: int = 0,
    what: str = "evaluate",
) -> Result:
    """Evaluate with a progress bar that shows the score so far."""
    model = model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
    images = evaluation_images(labelled.for_model(model), model.preprocessing, device)
    batches = dataset.batches(images, dataset.in_order(len(images), batch_size), workers)
    classes = f" of {count(len(labelled.classes), 'class')}" if labelled.classes else ""
    order = count(-(-len(images) // batch_size), "batch")
    announce(f"{what} {model.policy_name}", count(len(images), "image") + classes, order, device_name(device))
    metric = next(iter(tasks.get(model.task).metrics.values()))
    with bar(what, len(images)) as progress:
        return evaluate(
            model,
            batches,
            layout=layout,
            device=device,
            progress=lambda done, score: progress(done, figures=[f"{metric.title} {metric.text(score)}"]),
        )


def flipped(model: AdaptiveViT, exact: AdaptiveViT, labelled: Labelled, device: torch.device) -> float:
    """The share of token depths that differ between bf16 and fp32, on up to 64 images."""
    images = evaluation_images(labelled.spread(64), model.preprocessing, device)
    batch = next(dataset.batches(images, dataset.in_order(len(images), 64)))
    return flipped_decisions(model, exact.to(device), batch.images.to(device))


def figures(model: AdaptiveViT, result: Result) -> dict[str, Any]:
    """Columns of a model and its result, by timm's names where timm has them."""
    found = {
        **result.row(),
        "param_count": round(sum(p.numel() for p in model.parameters()) / 1e6, 3),
        "img_size": model.preprocessing.size[0],
        "crop_pct": model.preprocessing.crop_pct,
        "interpolation": model.preprocessing.interpolation,
    }
    return found | {k: v for k, v in result.summary().items() if k not in found}


def row(name: str, model: AdaptiveViT, result: Result, device: torch.device, precision: str) -> dict[str, Any]:
    """What `evaluate` writes: the figures with what they are of."""
    policy = spec.spec(model.policy_name, model.policy.settings) if model.policy_name != "replay" else "replay"
    found = {"model": name, "policy": policy, **figures(model, result)}
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    here = summary()
    return found | {"precision": precision, "device": where} | {k: here[k] for k in ("date", "adaptivit", "torch")}


def table(row: dict[str, Any], result: Result) -> Table:
    """One line a figure."""
    shown = Table(title=f"{row['model']}, {row['policy']}", show_header=False, title_justify="left")
    share, figures = signed_percent(-result.saved), result.shown()
    lines = {
        "images": f"{result.images}",
        " / ".join(metric.title for metric, _ in figures): " / ".join(metric.text(value) for metric, value in figures),
        "GMACs an image": f"{result.gmacs:.4f} ({share} against static {result.gmacs_static:.4f})",
        "mean depth": f"{result.mean_depth:.2f} of {len(result.live)} blocks",
        "live tokens by block": " ".join(f"{n:.0f}" for n in result.live),
        "images/s": f"{result.images_per_second:.1f} ({result.layout}, {row['device']}, {row['precision']})",
    }
    if result.plan_gap is not None:
        correlation = "undefined" if result.plan_correlation is None else f"{result.plan_correlation:.3f}"
        lines["plan"] = f"mean N - N_target {result.plan_gap:+.2f}, correlation {correlation}"
    if "flipped_decisions" in row:
        lines["flipped decisions"] = f"{100 * row['flipped_decisions']:.3f} % of token depths differ from fp32"
    for name, value in lines.items():
        shown.add_row(name, value)
    return shown
