"""Fine-tune a backbone into an adaptive model."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from ..budget.curve import GOAL
from ..training.config import FOLLOW, TrainConfig
from ..utils.text import signed_percent
from .command import Command

if TYPE_CHECKING:
    from ..evaluation.evaluate import Result


def run(config: TrainConfig, flags: Sequence[str]) -> None:
    from accelerate import PartialState

    from ..training.run import fit

    result = fit(config, follow=[name for name in FOLLOW if f"--{name.replace('_', '-')}" not in flags])
    if PartialState().is_main_process:
        print(last_line(config, result))


def last_line(config: TrainConfig, result: Result) -> str:
    """What was saved, the goal of its cost, whether it was reached, and what to do."""
    place, share = Path(config.out) / "model", result.gmacs / result.gmacs_static
    line = f"saved {place}: {result.text} at {result.gmacs:.4f} GMACs ({signed_percent(share - 1)}) on validation"
    if not config.loss.cost:
        return f"{line}; training had no goal for the cost"
    goal = f"{100 * (config.loss.cost_target - 1):g}%"
    if abs(share / config.loss.cost_target - 1) <= GOAL:
        return f"{line}; goal {goal} reached"
    set_it = shlex.join(["adaptivit", "calibrate", str(place), "--data", config.data, "--budget", goal])
    return f"{line}; goal {goal} missed: train longer (--epochs), or set it now: {set_it}"


def of_recipe(name: str) -> TrainConfig:
    """A recipe; the data is still to be named."""
    from ..training import recipes

    missing: Any = tyro.MISSING
    return replace(recipes.get(name), recipe=name, data=missing)


def of_policy(policy: str | None) -> TrainConfig:
    """A policy with the losses and settings of its own recipe, as `compare` takes them."""
    from ..policies import get, names, spec
    from ..training.methods import parse_method

    missing: Any = tyro.MISSING
    plain = TrainConfig(missing) if policy is None else TrainConfig(missing, policy=policy)
    name = plain.policy.partition(":")[0]
    if name not in names() or not get(name).recipe:
        return plain
    spec.parse(plain.policy)  # a method may name a recipe, a policy has settings alone
    return parse_method(plain.policy, plain)


COMMAND = Command(
    TrainConfig,
    run,
    policies=True,
    recipes="--recipe NAME; other flags override",
    of_recipe=of_recipe,
    of_policy=of_policy,
)
