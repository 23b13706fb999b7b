"""Images in; the task's answers, and what each image cost, out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from .. import tasks
from ..data.dataset import image_files, instead
from ..data.image_files import open_image
from ..errors import DataError
from ..model import AdaptiveViT
from ..tasks.protocol import Task
from ..utils.console import screen_table
from ..utils.csv import csv_text
from ..utils.text import json_text
from .record import document, record


@dataclass(frozen=True)
class Prediction:
    """The answer to one image, and what it cost."""

    image: str
    answer: dict[str, Any]  # as Task.answer gives it
    gmacs: float
    static_gmacs: float
    mean_depth: float
    live: list[int]  # tokens that entered each block

    @property
    def record(self) -> dict[str, Any]:
        """As JSON."""
        costs = (self.gmacs, self.static_gmacs, self.mean_depth, self.live)
        return {"image": self.image, **record(self.answer, *costs)}


def find_images(paths: tuple[str, ...], left_out: list[str] | None = None) -> list[Path]:
    """Image files, and those inside folders, whose other files are added to `left_out`; what is missing is named."""
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside, others = image_files(path)
            if not inside:
                raise DataError(f"The folder {path} has no images{instead(others)}.")
            found += inside
            if left_out is not None:
                left_out += others
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"Image not found: {path}.")
    if not found:
        raise DataError("Expected at least one image file or folder.")
    return found


@torch.inference_mode()
def predict(
    model: AdaptiveViT,
    paths: list[Path],
    *,
    names: list[str] | None = None,
    top_k: int = 3,
    layout: str = "auto",
    batch_size: int = 32,
    device: str = "cpu",
    unreadable: list[str] | None = None,
) -> list[Prediction]:
    """Answers to image files. Those that cannot be read are named in `unreadable`; without it the first is an error."""
    model.eval()
    transform, task = model.preprocessing.evaluation(), tasks.get(model.task)
    done: list[Prediction] = []
    for i in range(0, len(paths), batch_size):
        read, pictures = [], []
        for path in paths[i : i + batch_size]:
            try:
                pictures.append(transform(open_image(path)))
                read.append(path)
            except DataError as error:
                if unreadable is None:
                    raise
                unreadable.append(str(error))
        if not pictures:
            continue
        output = model(torch.stack(pictures).to(device, next(model.parameters()).dtype), layout=layout)
        logits = output.logits.float().cpu()
        for b, path in enumerate(read):
            done.append(
                Prediction(
                    image=str(path),
                    answer=task.answer(logits[b], names or model.class_names, top_k),
                    gmacs=float(output.macs_deployed[b]) / 1e9,
                    static_gmacs=model.static_macs(output) / 1e9,
                    mean_depth=float(output.trace.mean_depth[b]),
                    live=output.trace.live[:, b].tolist(),
                )
            )
    return done


def as_json(predictions: list[Prediction], model: str) -> str:
    """One document, as the service returns it, with the names of the images."""
    return json_text(document(model, [p.record for p in predictions])) + "\n"


def as_jsonl(predictions: list[Prediction]) -> str:
    """One image a line."""
    return "".join(json_text(p.record) + "\n" for p in predictions)


def as_csv(predictions: list[Prediction], task: Task) -> str:
    """One row an image."""
    rows = [
        {"image": p.image, **task.columns(p.answer), "gmacs": f"{p.gmacs:.6f}", "mean_depth": f"{p.mean_depth:.4f}"}
        for p in predictions
    ]
    return csv_text(rows)


def as_table(found: list[Prediction], task: Task) -> Table:
    """For the screen."""
    rows = []
    for p in found:
        share = f"{100 * p.gmacs / p.static_gmacs:.0f} %"
        rows.append((p.image, task.caption(p.answer), f"{p.gmacs:.3f}", share, f"{p.mean_depth:.2f}"))
    return screen_table("", rows, ("image", "answer", "GMACs", "of static", "mean depth"), left=2)
