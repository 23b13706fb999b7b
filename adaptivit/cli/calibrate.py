"""Set what a checkpoint costs: a budget in MACs, percent or ms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ..errors import UserError
from ..utils.coerce import at_least
from .command import Command


@dataclass(frozen=True)
class CurveFlags:
    """How a curve is measured."""

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


@dataclass(frozen=True)
class CalibrateConfig:
    """Find how a policy meets a budget, on unlabelled images, and keep the curve in the checkpoint.

    Example: adaptivit calibrate runs/train/model --data photos/ --budget -33%
    """

    checkpoint: Annotated[str, tyro.conf.Positional]
    """Directory of a run of `train`, or saved by save_pretrained."""
    data: str | None = None
    """Images: a folder (labels are not looked at), or .npz with x, train_x, val_x or test_x. Not needed to set another
    budget by the curve that the checkpoint has."""
    budget: str | None = None
    """Set this budget: '0.8 GMACs', -33% or '3 ms'; none: what the policy's settings cost. Without one the curve
    alone is measured anew, and a budget that the checkpoint has stays."""
    out: str | None = None
    """Write a new checkpoint directory; default: add to the one that was given."""
    curve: Annotated[CurveFlags, tyro.conf.arg(name="")] = CurveFlags()

    def __post_init__(self) -> None:
        if self.data is None and self.budget is None:
            raise UserError("Expected --data IMAGES to measure the curve on, or --budget, or both.")


def run(config: CalibrateConfig) -> None:
    from ..checkpoint.place import checkpoint_at
    from ..utils.lock import writing

    with writing(config.out or checkpoint_at(config.checkpoint)):
        from ..experiments.calibrate import calibrate

        calibrate(**{k: v for k, v in vars(config).items() if k != "curve"}, **vars(config.curve))


COMMAND = Command(CalibrateConfig, run)
