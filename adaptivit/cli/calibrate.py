"""Set what a checkpoint costs: a budget in MACs, percent or ms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ..utils.coerce import at_least
from .command import Command


@dataclass(frozen=True)
class CalibrateConfig:
    """Find how a policy meets a budget, on unlabelled images, and keep the curve in the checkpoint.

    Example: adaptivit calibrate runs/train/model --data photos/ --budget -33%
    """

    checkpoint: Annotated[str, tyro.conf.Positional]
    """Directory of a run of `train`, or saved by save_pretrained."""
    data: str
    """Images: a folder (labels are not looked at), or .npz with x, train_x, val_x or test_x."""
    budget: str | None = None
    """Set this budget: '0.8 GMACs', -33% or '3 ms'. Without one only the curve is measured."""
    out: str | None = None
    """Write a new checkpoint directory; default: add to the one that was given."""
    check: str | None = None
    """Images to check the curve on; default: every second one of --data, which the curve then does not see."""
    limit: int | None = None
    """At most so many images for the curve, and as many to check it. Default: as many as the budget (without one: every
    tenth) needs to be met within 2 % on new images, where there are so many; 512 at least and 2,048 at most."""
    latency_batch: int | None = None
    """Also measure milliseconds, of a batch of so many images on this device; 1 for a budget in ms."""
    batch_size: int = 32
    """Images at a time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    workers: int = 0
    """Data-loading processes."""

    def __post_init__(self) -> None:
        at_least("batch_size", self.batch_size, 1)
        at_least("workers", self.workers, 0)
        for name in ("limit", "latency_batch"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)


def run(config: CalibrateConfig) -> None:
    from ..experiments.calibrate import calibrate

    calibrate(**vars(config))


COMMAND = Command(CalibrateConfig, run)
