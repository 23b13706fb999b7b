"""Named recipes: functions that return a full TrainConfig; the docstring holds the command and what is known of it."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable
from pathlib import Path

from ..config import TrainConfig
from ..errors import UserError, unknown
from ..settings import convert, parse
from . import aht, amod, avit, baselines, dynamicvit, evit

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    **aht.RECIPES,
    **avit.RECIPES,
    "dynamicvit": dynamicvit.paper,
    "evit": evit.paper,
    **amod.RECIPES,
    **baselines.RECIPES,
}
# The recipe whose losses a policy trains with where none is named; the others train with the task loss alone.
DEFAULTS = {
    "aht": "aht-budget",
    "avit": "avit-paper",
    "dynamicvit": "dynamicvit",
    "act": "act",
    "confidence": "confidence",
    "similarity": "similarity",
    "pondernet": "pondernet",
}


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
