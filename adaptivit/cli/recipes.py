"""`adaptivit recipes`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from ..training import recipes


@dataclass(frozen=True)
class RecipesConfig:
    """List every recipe with a line of what it is, or show one: what is known of it and all its settings.

    Example: adaptivit recipes aht-balanced
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    """A recipe; none to list them."""


def run(config: RecipesConfig) -> None:
    print(recipes.describe(config.name) if config.name else recipes.listing())
