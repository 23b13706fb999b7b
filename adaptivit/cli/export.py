"""ONNX or .pt2, compared with the model before it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ..utils.coerce import positive
from .command import Command, loaded


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint as ONNX or .pt2, compared with the model before the file is put in place.

    Example: adaptivit export runs/aht/model --out aht.onnx
    """

    checkpoint: Annotated[str, tyro.conf.Positional]
    """Directory of a run of `train`, or saved by save_pretrained."""
    out: str
    """The file to write."""
    format: Literal["onnx", "pt2"] = "onnx"
    """ONNX (needs the extra `export`), or a program of torch.export."""
    kind: Literal["auto", "masked", "topk", "ragged"] = "auto"
    """masked computes every token and hides those that left; topk keeps as many rows of every image; ragged crops the
    batch to its longest image. auto: topk where the policy keeps equally many, else ragged."""
    images: tuple[str, ...] = ()
    """Images or folders to compare on (64 at most); default: scikit-learn's two photos and noise."""
    tolerance: float = 1e-3
    """Largest difference of a logit, relative to the largest logit where that is above 1."""

    random_weights: bool = False
    """Export though the weights are random, for a test."""

    def __post_init__(self) -> None:
        positive("tolerance", self.tolerance)


def run(config: ExportConfig) -> None:
    from rich.console import Console

    from ..checkpoint.export import export
    from ..checkpoint.model_card import pictures_for
    from ..evaluation.predict import find_images

    model = loaded(config.checkpoint, config.random_weights)
    images = pictures_for(model, find_images(config.images)[:64]) if config.images else None
    kind, tolerance = config.kind, config.tolerance
    with Console(stderr=True).status("tracing the model, then comparing; a minute or two"):
        done = export(model, config.out, format=config.format, kind=kind, images=images, tolerance=tolerance)
    print(
        f"wrote {done.path}: {config.format}, {done.kind}, {done.size / 1e6:.1f} MB; on {done.images} images the "
        f"largest difference of a logit is {done.difference:.2g}, "
        f"and {100 * done.flipped:.2f} % of the tokens differ in depth"
    )


COMMAND = Command(ExportConfig, run)
