"""Classes, probabilities and cost of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from ..errors import DataError, UserError
from ..utils.coerce import at_least
from .command import Command, ModelConfig, names_of


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
    format: Literal["table", "json", "jsonl", "csv"] = "table"
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
        if not self.images:
            raise DataError("Expected at least one image file or folder.")
        if self.out and self.format == "table":
            raise UserError("--out writes json, jsonl or csv: add --format jsonl, for example.")


def run(config: PredictConfig) -> None:
    from .. import tasks
    from ..evaluation import predict
    from ..utils.atomic_io import write_text
    from ..utils.console import left_out, show
    from ..utils.hardware import device_of

    others: list[str] = []
    bad: list[str] = []
    paths = predict.find_images(config.images, others)
    model = config.model.build()
    names, task, device = names_of(config.class_names, model), tasks.get(model.task), device_of(config.device)
    sizes: dict[str, Any] = {"top_k": config.top_k, "layout": config.layout, "batch_size": config.batch_size}
    found = predict.predict(model.to(device), paths, names=names, device=str(device), **sizes, unreadable=bad)
    if not found:
        raise DataError(bad[0] if len(bad) == 1 else f"None of {len(bad)} images can be read. {bad[0]}")
    if config.format == "table":
        show(predict.as_table(found, task))
    else:
        text = {
            "json": lambda: predict.as_json(found, config.model.checkpoint or config.model.backbone or ""),
            "jsonl": lambda: predict.as_jsonl(found),
            "csv": lambda: predict.as_csv(found, task),
        }[config.format]()
        if config.out is None:
            print(text, end="", flush=True)
        else:
            write_text(config.out, text)
    left_out([*bad, *others])
    if bad:
        raise SystemExit(1)


COMMAND = Command(PredictConfig, run, policies=True)
