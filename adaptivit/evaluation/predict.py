"""Images in; classes with probabilities, and what each image cost, out."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ..data.dataset import _UNREADABLE, SUFFIXES, rgb
from ..errors import DataError, first_line
from ..model import AdaptiveViT


@dataclass(frozen=True)
class Prediction:
    image: str
    classes: list[str]
    probabilities: list[float]
    gmacs: float
    static_gmacs: float
    mean_depth: float
    live: list[int]  # tokens that entered each block


def find_images(paths: tuple[str, ...]) -> list[Path]:
    """Image files, and those inside folders; what is missing is named."""
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
            if not inside:
                raise DataError(f"The folder {path} has no images ({', '.join(sorted(SUFFIXES))}).")
            found += inside
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
) -> list[Prediction]:
    """Classify image files; the first that cannot be read is named."""
    model.eval()
    transform = model.preprocessing.evaluation()
    names = names or model.class_names
    done: list[Prediction] = []
    for i in range(0, len(paths), batch_size):
        pictures = []
        for path in paths[i : i + batch_size]:
            try:
                with Image.open(path) as file:
                    pictures.append(transform(rgb(file)))
            except _UNREADABLE as error:
                raise DataError(f"Cannot read the image {path} ({first_line(error)}).") from None
        output = model(torch.stack(pictures).to(device, next(model.parameters()).dtype), layout=layout)
        top = output.logits.float().softmax(-1).topk(min(top_k, output.logits.shape[1]))
        for b, path in enumerate(paths[i : i + batch_size]):
            done.append(
                Prediction(
                    image=str(path),
                    classes=[names[c] if names and c < len(names) else str(c) for c in top.indices[b].tolist()],
                    probabilities=top.values[b].tolist(),
                    gmacs=float(output.macs_deployed[b]) / 1e9,
                    static_gmacs=model.static_macs(output) / 1e9,
                    mean_depth=float(output.trace.mean_depth[b]),
                    live=output.trace.live[:, b].tolist(),
                )
            )
    return done


def as_jsonl(predictions: list[Prediction]) -> str:
    return "".join(json.dumps(vars(p)) + "\n" for p in predictions)


def as_csv(predictions: list[Prediction]) -> str:
    out = io.StringIO()
    rows: list[dict[str, Any]] = []
    for p in predictions:
        row: dict[str, Any] = {"image": p.image}
        for rank, (name, probability) in enumerate(zip(p.classes, p.probabilities, strict=True), start=1):
            row |= {f"class_{rank}": name, f"probability_{rank}": f"{probability:.6f}"}
        rows.append(row | {"gmacs": f"{p.gmacs:.6f}", "mean_depth": f"{p.mean_depth:.4f}"})
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
