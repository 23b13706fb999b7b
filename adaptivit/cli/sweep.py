"""Search over settings on the validation images."""

from __future__ import annotations

from ..experiments.sweep.config import SweepConfig, from_recipe
from .command import Command


def run(config: SweepConfig) -> None:
    from ..experiments.sweep.run import search

    search(config)


COMMAND = Command(SweepConfig, run, policies=True, recipes="--recipe NAME; other flags override", of_recipe=from_recipe)
