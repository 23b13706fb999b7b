"""ONNX or .pt2, compared with the model before it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ..utils.coerce import positive
from .command import Command, loaded, say_random


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

    def verify(self) -> None:
        if not self.random_weights:
            say_random(None, self.checkpoint, refused=True)


def run(config: ExportConfig) -> None:
    from ..checkpoint.export import choose, export
    from ..checkpoint.model_card import pictures_for
    from ..evaluation.predict import find_images
    from ..utils.console import announce, bar, count, left_out

    model = loaded(config.checkpoint)
    others: list[str] = []
    images = pictures_for(model, find_images(config.images, others)[:64]) if config.images else None
    left_out(others)
    kind, tolerance = choose(model, config.kind), config.tolerance
    compared = count(len(images), "image") if images is not None else "two photos and noise"
    announce(f"export {model.policy_name}", f"traced to {config.format}, {kind}, then compared on {compared}", "cpu")
    with bar("a minute or two") as progress:
        progress(0)
        done = export(model, config.out, format=config.format, kind=kind, images=images, tolerance=tolerance)
    print(
        f"wrote {done.path}: {config.format}, {done.kind}, {done.size / 1e6:.1f} MB; on {done.images} images the "
        f"largest difference of a logit is {done.difference:.2g}, "
        f"and {100 * done.flipped:.2f} % of the tokens differ in depth"
    )


COMMAND = Command(ExportConfig, run)
