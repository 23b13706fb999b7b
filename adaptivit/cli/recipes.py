"""Every recipe, or one with all its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from .command import Command


@dataclass(frozen=True)
class RecipesConfig:
    """List every recipe with a line of what it is, or show one: what is known of it and all its settings.

    Example: adaptivit recipes aht-balanced
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    """A recipe; none to list them."""


def run(config: RecipesConfig) -> None:
    from ..training import recipes

    print(recipes.describe(config.name) if config.name else recipes.listing())


COMMAND = Command(RecipesConfig, run)
