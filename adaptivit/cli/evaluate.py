"""Accuracy, cost and depth on labelled images."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from ..utils.coerce import at_least
from .command import Command, ModelConfig, loaded


@dataclass(frozen=True)
class EvaluateConfig:
    """Accuracy, cost and depth of a model on labelled images.

    Example: adaptivit evaluate --data photos/val --checkpoint runs/train/model --csv results.csv
    """

    data: str
    """Image folder (CLASS/*.jpg, or with val/), .npz with test_x, test_y, mosaics, .tar shards, or hf:PATH."""
    model: Annotated[ModelConfig, tyro.conf.arg(name="")] = ModelConfig()
    split: Literal["auto", "train", "val", "test"] = "auto"
    """Which part of the data; auto: test, else val, else all of it."""
    layout: Literal["auto", "masked", "packed", "gathered"] = "auto"
    """How live tokens are stored."""
    batch_size: int = 64
    """Images at a time."""
    limit: int | None = None
    """Only so many images, evenly spread over the split."""
    compare_to: str | None = None
    """A second checkpoint directory; prints the paired difference with its 95 % confidence interval."""
    json: str | None = None
    """Write the result as JSON here."""
    csv: str | None = None
    """Append the result as a CSV row here (timm's column names where they exist)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Weights and activations; bf16 also reports the rate of decisions that differ from fp32's."""
    workers: int = 0
    """Data-loading processes."""

    def __post_init__(self) -> None:
        at_least("batch_size", self.batch_size, 1)
        at_least("workers", self.workers, 0)
        if self.limit is not None:
            at_least("limit", self.limit, 1)


def run(config: EvaluateConfig) -> None:
    from ..data import dataset
    from ..evaluation import report
    from ..evaluation.evaluate import paired_difference
    from ..utils.atomic_io import write_json
    from ..utils.console import left_out, show
    from ..utils.csv import append_csv
    from ..utils.hardware import device_of
    from ..utils.text import signed_percent

    model, device = config.model.build(), device_of(config.device)
    other = loaded(config.compare_to) if config.compare_to else None
    exact = copy.deepcopy(model) if config.precision == "bf16" else None
    labelled = dataset.for_evaluation(config.data, config.split, model.task)
    if config.limit is not None:
        labelled = labelled.spread(config.limit)
    for m in filter(None, (model, other)):
        labelled.for_model(m)  # an error before anything runs where classes do not fit
    given: dict[str, Any] = {k: getattr(config, k) for k in ("precision", "layout", "batch_size", "workers")}
    result = report.measure(model, labelled, device, **given)
    row = report.row(config.model.checkpoint or config.model.backbone or "", model, result, device, config.precision)
    if exact is not None:
        row["flipped_decisions"] = report.flipped(model, exact, labelled, device)
    show(report.table(row, result), width=110)
    if config.split == "auto" and not {"test", "val"} & set(dataset.read(config.data)):
        print(f"note: {config.data} has neither test nor val; if the model was trained on it, these figures flatter")
    left_out(labelled.without(set(range(len(labelled))) - set(result.indices)))
    if other is not None:
        second = report.measure(other, labelled, device, **given, what="compare")
        difference, half, n = paired_difference(result, second)
        row |= {"difference": difference, "difference_ci95": half, "compared_to": config.compare_to}
        print(
            f"against {config.compare_to} ({second.text} at {second.gmacs:.4f} GMACs): "
            f"{difference:+.2f} ± {half:.2f} points (paired, 95 %, {n} images), "
            f"{signed_percent(result.gmacs / second.gmacs - 1)} GMACs"
        )
    if config.json:
        write_json(config.json, row)
    if config.csv:
        append_csv(config.csv, row)


COMMAND = Command(EvaluateConfig, run, policies=True)
