"""Fine-tune a backbone into an adaptive model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from ..training.config import TrainConfig
from .command import Command


def run(config: TrainConfig) -> None:
    from accelerate import PartialState

    from ..training.run import fit

    result = fit(config)
    if PartialState().is_main_process:
        place = Path(config.out) / "model"
        print(f"saved {place}: {result.text} at {result.gmacs:.4f} GMACs on validation")


def of_recipe(name: str) -> TrainConfig:
    """A recipe; the data is still to be named."""
    from ..training import recipes

    missing: Any = tyro.MISSING
    return replace(recipes.get(name), recipe=name, data=missing)


COMMAND = Command(TrainConfig, run, policies=True, recipes="--recipe NAME; other flags override", of_recipe=of_recipe)
