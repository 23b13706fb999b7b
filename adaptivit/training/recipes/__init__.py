"""Named recipes: functions that return a full TrainConfig; the docstring holds the command and what is known of it."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from ...errors import UserError, unknown
from ...policies.spec import parse
from ...utils.coerce import convert
from ..config import TrainConfig
from . import aht, amod, avit, baselines, dynamicvit, evit

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    **aht.RECIPES,
    **avit.RECIPES,
    "dynamicvit": dynamicvit.paper,
    "evit": evit.paper,
    **amod.RECIPES,
    **baselines.RECIPES,
}
_ALWAYS = ("backbone", "policy", "epochs", "batch_size", "lr", "weight_decay", "augment")  # shown even by default


@dataclass(frozen=True)
class RecipesConfig:
    """List every recipe with a line of what it is, or show one: what is known of it and all its settings.

    Example: adaptivit recipes aht-balanced
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    """A recipe; none to list them."""

    def __post_init__(self) -> None:
        if self.name and self.name not in RECIPES:
            raise unknown("recipe", self.name, RECIPES)


def listing() -> str:
    """One line a recipe."""
    return "\n".join(f"  {name}: {(make.__doc__ or '').splitlines()[0]}" for name, make in RECIPES.items())


def show(config: RecipesConfig) -> None:
    """adaptivit recipes"""
    if not config.name:
        print(listing())
        return
    make = RECIPES[config.name]
    print(f"{config.name}: {inspect.cleandoc(make.__doc__ or '')}\n")
    here, plain = make(), TrainConfig(data="")
    for field in fields(here):
        value = getattr(here, field.name)
        if field.name in _ALWAYS or value != getattr(plain, field.name):
            print(f"  --{field.name.replace('_', '-')} {value}")


def get(name: str) -> TrainConfig:
    """A recipe by its name, or by the path of a .json file such as `adaptivit sweep` writes."""
    if name.endswith(".json"):
        return _read(Path(name))
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]()


def _read(path: Path) -> TrainConfig:
    """{"recipe": {field: value}}; fields that are not there keep the defaults of training."""
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"Cannot read the recipe {path}: {error.strerror or error}.") from None
    except ValueError as error:  # not JSON, or not text
        raise UserError(f"The recipe {path} is not JSON ({error}).") from None
    fields = given.get("recipe") if isinstance(given, dict) else None
    if not isinstance(fields, dict):
        raise UserError(f'The recipe {path}: expected {{"recipe": {{"lr": 0.0001, ...}}}}, got something else.')
    hints = typing.get_type_hints(TrainConfig)
    try:
        for field in fields:
            if field not in hints:
                raise unknown("field", field, hints)
        config = TrainConfig(**({"data": ""} | {k: convert(k, v, hints[k]) for k, v in fields.items()}))
        parse(config.policy)
    except UserError as error:
        raise UserError(f"The recipe {path}: {error}") from None
    return config
