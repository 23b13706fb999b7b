"""The settings of `adaptivit visualize`. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ..errors import UserError
from ..utils.coerce import at_least, check_size


@dataclass(frozen=True)
class VisualizeConfig:
    """See what a model does: halting maps, animations, charts, and one HTML report.

    Example: adaptivit visualize runs/train/model --images cat.jpg photos/ --out seen
    """

    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT]")] = None
    """Directory saved by `train` or save_pretrained; or leave it out and name a --backbone with a --policy."""
    images: tuple[str, ...] = ()
    """Image files or folders; no labels are needed."""
    data: str | None = None
    """Instead of --images labelled data: image folder (CLASS/*.jpg, or with val/), or .npz with test_x, test_y."""
    split: Literal["auto", "train", "val", "test"] = "auto"
    """Which part of --data; auto: test, else val, else all of it."""
    limit: int | None = 200
    """Of --data only so many images, evenly spread over the split; None for all."""
    static: str | None = None
    """A static model to compare with (which classes gain and lose, where answers agree): a checkpoint directory, or
    weights of the same backbone in timm's keys."""
    out: str = "adaptivit-visualize"
    """Folder for report.html, the pictures (PNG, GIF) and the figures (CSV)."""
    shown: int = 8
    """Images with pictures, animation and slider of their own; of --images the first, of --data spread over it."""
    tokens: int = 0
    """Correlate scores with leave-one-out importance: patches left out, one at a time, at every scored block of the
    shown images. 24 is a good number and takes minutes on a CPU; 0 for none of it."""
    class_names: str | None = None
    """Text file with one class name a line; default: the checkpoint's."""
    backbone: str | None = None
    """timm name, where there is no checkpoint."""
    policy: str = "static"
    """Policy and settings for that backbone, e.g. fold:budget=0.67 (listed below)."""
    weights: str | None = None
    """Weights for that backbone: .safetensors or .pth in timm's keys."""
    img_size: int | None = None
    """Image size in pixels; default: the backbone's."""
    budget: str | None = None
    """What an image may cost in the mean: '0.8 GMACs', -33% or '3 ms'; for a calibrated checkpoint. none: its
    settings."""
    max_macs: str | None = None
    """What any single image may cost at most: '1.0 GMACs' or -20%."""
    batch_size: int = 32
    """Images at a time."""
    seed: int = 0
    """Chooses the patches that are left out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""

    def __post_init__(self) -> None:
        check_size(self.img_size)
        for name in ("shown", "batch_size"):
            at_least(name, getattr(self, name), 1)
        at_least("seed", self.seed, 0)
        if self.limit is not None:
            at_least("limit", self.limit, 1)
        if self.tokens != 0:
            at_least("tokens", self.tokens, 3)
        if bool(self.images) == (self.data is not None):
            raise UserError("Expected either --images FILES... or --data FOLDER.")
