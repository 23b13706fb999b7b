"""The settings of `adaptivit sweep`: those of a training run, and how to search over them. No torch, no optuna."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from ...errors import UserError
from ...training import config
from ...training.config import TrainConfig

# Of one run on one machine, not of a recipe: neither searched over nor written into a recipe, and free to differ when
# a sweep goes on. `data` and `val_split` stay what they were.
FREE = config.FREE | {"allow_corrupt"}
NOT_IN_RECIPE = FREE | {"data"}
NOT_IN_SPACE = NOT_IN_RECIPE | {"val_split"}

TRIALS = 20  # of a random or TPE search where none are asked for


@dataclass(frozen=True)
class TrialConfig(TrainConfig):
    """What every trial starts from: the flags of `adaptivit train`."""

    out: str = "runs/sweep"
    """Directory of the sweep; a second process with the same one joins, a later call goes on."""
    resume: bool = False
    """Not needed: a sweep in the same --out always goes on."""
    epochs: int = 50
    """Passes over the training images; 0: adapt without training, for policies that learn nothing."""

    def __post_init__(self) -> None:
        if self.epochs == 0:
            TrainConfig(**(vars(self) | {"epochs": 1}))  # the other limits hold
        else:
            super().__post_init__()


@dataclass(frozen=True)
class SweepConfig:
    """Search over the settings of training and of a policy, on the validation images.

    Example: adaptivit sweep --data photos/ --weights runs/static/model --recipe aht-balanced --epochs 10
    --space 'loss.ponder=1e-3|1e-2|5e-2' 'loss.target_depth=0.2|0.5|1.0' --objective budget --max-share 0.67
    """

    train: Annotated[TrialConfig, tyro.conf.arg(name="")]
    space: tuple[str, ...]
    """What varies: KEY=v1|v2|v3, KEY=low..high, KEY=low..high:log or KEY=1..5:int, quoted for the shell. KEY is a flag
    of training with underscores (optim.lr, loss.target_depth), or policy.NAME for a setting of the policy."""
    method: Literal["grid", "random", "tpe"] = "grid"
    """Every combination; random ones; or Optuna's TPE, which learns from the trials before."""
    trials: int | None = None
    """Most trials in all, earlier calls included; default: the whole grid, or 20."""
    objective: Literal["accuracy", "budget", "hypervolume"] = "budget"
    """Top-1; top-1 within --max-share; or the area under the front of top-1 against the share of static's MACs."""
    max_share: float = 0.67
    """The budget of --objective budget, as a share of static's MACs."""

    def __post_init__(self) -> None:
        if self.trials is not None and self.trials < 1:
            raise UserError(f"trials: expected at least 1, got {self.trials}.")
        if not 0 < self.max_share <= 1:
            raise UserError(f"max_share: expected a share of static's MACs in (0, 1], got {self.max_share}.")


def from_recipe(name: str) -> SweepConfig:
    """A sweep whose base is a recipe; the data is still to be named."""
    from ...training.recipes import get

    mine: dict[str, Any] = {"recipe": name, "data": tyro.MISSING, "out": TrialConfig.out}
    return SweepConfig(TrialConfig(**(vars(get(name)) | mine)), tyro.MISSING)
