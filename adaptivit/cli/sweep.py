"""Search over settings on the validation images."""

from __future__ import annotations

from ..experiments.sweep.config import SweepConfig, from_recipe
from .command import Command, say_random


def run(config: SweepConfig) -> None:
    if config.train.epochs == 0:
        say_random(config.train.backbone, config.train.weights)
    from ..experiments.sweep.run import search

    search(config)


COMMAND = Command(SweepConfig, run, policies=True, recipes="--recipe NAME; other flags override", of_recipe=from_recipe)
