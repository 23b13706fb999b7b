"""The settings of `adaptivit evaluate` and `predict`. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ..evaluation.model_config import ModelConfig
from ..utils.coerce import at_least


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


@dataclass(frozen=True)
class PredictConfig:
    """Classes with probabilities for images, and what each one cost.

    Example: adaptivit predict cat.jpg dog.jpg --checkpoint runs/train/model
    """

    images: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Image files or folders."""
    model: Annotated[ModelConfig, tyro.conf.arg(name="")] = ModelConfig()
    top_k: int = 3
    """Classes to show for each image."""
    format: Literal["table", "jsonl", "csv"] = "table"
    """How to print."""
    out: str | None = None
    """Write there instead of printing."""
    class_names: str | None = None
    """Text file with one class name a line; default: the checkpoint's."""
    layout: Literal["auto", "masked", "packed", "gathered"] = "auto"
    """How live tokens are stored."""
    batch_size: int = 32
    """Images at a time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""

    def __post_init__(self) -> None:
        at_least("top_k", self.top_k, 1)
        at_least("batch_size", self.batch_size, 1)
