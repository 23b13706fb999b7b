"""See which tokens stop, skip or merge: pictures and an HTML report."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ..errors import UserError
from ..utils.coerce import at_least
from .command import Command, ModelConfig, loaded, names_of

if TYPE_CHECKING:
    from ..model import AdaptiveViT


@dataclass(frozen=True)
class VisualizeConfig(ModelConfig):
    """See what a model does: halting maps, animations, charts, and one HTML report.

    Example: adaptivit visualize runs/train/model --images cat.jpg photos/ --out seen
    """

    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT]")] = None
    """Directory of a run of `train`, or saved by save_pretrained; or leave it out and name a --backbone with a
    --policy."""
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
    batch_size: int = 32
    """Images at a time."""
    seed: int = 0
    """Chooses the patches that are left out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("shown", "batch_size"):
            at_least(name, getattr(self, name), 1)
        at_least("seed", self.seed, 0)
        if self.limit is not None:
            at_least("limit", self.limit, 1)
        if self.tokens != 0:
            at_least("tokens", self.tokens, 3)
        if bool(self.images) == (self.data is not None):
            raise UserError("Expected either --images FILES... or --data FOLDER.")


def run(config: VisualizeConfig) -> None:
    from ..utils.console import bars
    from ..utils.hardware import device_of
    from ..visualize import data_set, report

    start, model, device = time.perf_counter(), config.build(), device_of(config.device)
    names = names_of(config.class_names, model)
    static = _static_model(config.static, model) if config.static else None
    images: Any = list(config.images)
    if config.data is not None:
        images = data_set(config.data, model, config.limit, config.split)
    with bars() as progress:
        page = report(
            model.to(device),
            images,
            config.out,
            static=None if static is None else static.to(device),
            class_names=names,
            name=config.checkpoint or "",
            shown=config.shown,
            tokens=config.tokens,
            batch_size=config.batch_size,
            seed=config.seed,
            command=shlex.join(["adaptivit", *sys.argv[1:]]) if sys.argv[1:2] == ["visualize"] else "",
            progress=progress,
        )
    print(f"wrote {page} and its pictures in {time.perf_counter() - start:.1f} s")


def _static_model(path: str, model: AdaptiveViT) -> AdaptiveViT:
    from ..factory import create

    if not Path(path).is_file():
        return loaded(path)
    if model.backbone_name is None:
        raise UserError(
            f"static: {path} is a weights file, and the backbone has no timm name; give a checkpoint directory."
        )
    return create(model.backbone_name, "static", weights=path, img_size=model.preprocessing.size)


COMMAND = Command(VisualizeConfig, run, policies=True)
