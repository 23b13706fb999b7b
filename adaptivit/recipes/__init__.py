"""Named recipes: functions that return a full TrainConfig; the docstring holds the command and what is known of it."""

from __future__ import annotations

from collections.abc import Callable

from ..config import TrainConfig
from ..errors import unknown
from . import aht, avit

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "aht-high-accuracy": aht.high_accuracy,
    "aht-balanced": aht.balanced,
    "aht-high-efficiency": aht.high_efficiency,
    "aht-budget": aht.budget,
    "avit-paper": avit.paper,
    "avit-tiny": avit.tiny,
    "avit-small": avit.small,
}


def get(name: str) -> TrainConfig:
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]()
