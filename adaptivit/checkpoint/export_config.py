"""The settings of `adaptivit export`. Nothing here imports torch, so that --help is instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ..errors import UserError

KINDS = ("masked", "topk", "ragged")


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint as ONNX or .pt2, compared with the model before the file is put in place.

    Example: adaptivit export runs/aht/model --out aht.onnx
    """

    checkpoint: Annotated[str, tyro.conf.Positional]
    """Directory saved by `train` or save_pretrained."""
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

    def __post_init__(self) -> None:
        if not self.tolerance > 0:
            raise UserError(f"tolerance: expected a number > 0, got {self.tolerance}.")
