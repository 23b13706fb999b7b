"""A policy on trained weights as they are: a checkpoint, without training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import UserError
from ..utils.coerce import check_size
from .calibrate import CurveFlags
from .command import Command, say_random


@dataclass(frozen=True)
class ApplyConfig:
    """Put a policy on trained weights as they are, and write a checkpoint that every other command takes.

    Example: adaptivit apply --backbone deit_tiny_patch16_224 --weights deit_tiny.safetensors --policy fold
    --budget -33% --out runs/fold
    """

    backbone: str
    """timm name of the VisionTransformer, or hf-hub:NAME, local-dir:PATH with their weights."""
    out: str
    """The checkpoint directory to write; a new one."""
    weights: str | None = None
    """Its weights: .safetensors or .pth in timm's keys, or a checkpoint directory of ours. Default: random ones."""
    policy: str = "fold"
    """Policy and settings, e.g. tome:r=13 (listed below); fold, tome, patch_slimming and aht_merge need no training."""
    img_size: int | None = None
    """Image size in pixels; default: the backbone's."""
    budget: str | None = None
    """What an image may cost in the mean: '0.8 GMACs', -33% or '3 ms'; default: what the policy's settings cost."""
    data: str | None = None
    """Images to calibrate on, as for calibrate: a folder (labels are not looked at), or .npz. Not needed where the
    policy keeps as many tokens of every image (static, mod, amod, dynamicvit, evit, tome, fold), but patch_slimming
    chooses its patches on them."""
    curve: Annotated[CurveFlags, tyro.conf.arg(name="")] = CurveFlags()

    def __post_init__(self) -> None:
        check_size(self.img_size)
        if Path(self.out).exists():
            raise UserError(f"{self.out} is there already: name a new directory as --out.")


def run(config: ApplyConfig) -> None:
    from ..utils.lock import writing

    say_random(config.backbone, config.weights)
    with writing(config.out):
        from ..experiments.calibrate import apply

        apply(**{k: v for k, v in vars(config).items() if k != "curve"}, **vars(config.curve))


COMMAND = Command(ApplyConfig, run, policies=True)
