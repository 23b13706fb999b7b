"""Named recipes: tables in the TOML files of this folder, one file a paper, read into TrainConfigs.

A table has `title`, `train` (what its command adds to the recipe's name), `about` (what is known of it), `paper` (top-1
% / GMACs as printed), `like` (the recipe that it starts from), and settings of training. `[defaults]` of a file holds
settings of all its recipes.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...errors import UserError, unknown
from ...policies.spec import parse
from ...utils.settings import defaults, flat
from ...utils.text import headed
from ..config import TrainConfig, with_settings

FILES = {
    "aht": "AHT-ViT, and what its paper compares with",
    "avit": "A-ViT, and what its paper compares with",
    "dynamicvit": "DynamicViT",
    "spvit": "SPViT",
    "patch_slimming": "Patch Slimming",
    "evit": "EViT",
    "amod": "MoD and A-MoD, and what the paper compares with",
    "exits": "ACT, exits, PonderNet: baselines and related work",
}
START = {
    "aht-merge": "the improved AHT-ViT, from a static model: level with it at a third less work on CIFAR-100.",
    "evit": "the simplest: the task loss alone, and every image costs the same.",
    "aht-balanced": "AHT-ViT as its paper has it, without our improvements.",
}
# listed even at their defaults
_ALWAYS = ("backbone", "policy", "epochs", "batch_size", "optim.lr", "optim.weight_decay", "augment.kind")


@dataclass(frozen=True)
class Recipe:
    """Settings of training under a name, with the command and what is known of them."""

    name: str
    title: str
    train: str
    settings: Mapping[str, Any]
    group: str  # the file that it stands in
    about: str = "Not run by us."
    paper: str = ""

    def config(self) -> TrainConfig:
        return with_settings(TrainConfig(data=""), self.settings)

    def text(self) -> str:
        """Title, command and what is known."""
        top1, _, gmacs = self.paper.partition(" / ")
        known = f"The paper reports {top1} % at {gmacs} GMACs. " if self.paper else ""
        return f"{self.title}\n\nadaptivit train --recipe {self.name} {self.train}\n{known}{self.about.strip()}"


def _load() -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    for file in FILES:
        tables = tomllib.loads(files(__package__).joinpath(f"{file}.toml").read_text())
        shared = _dotted(tables.pop("defaults", {}))
        for name, table in tables.items():
            own = {k: table.pop(k) for k in ("title", "train", "about", "paper") if k in table}
            like = table.pop("like", None)
            settings = {**(found[like].settings if like else shared), **_dotted(table)}
            found[name] = Recipe(name, settings=settings, group=file, **own)
    return found


def _dotted(table: Mapping[str, Any]) -> dict[str, Any]:
    """TOML reads `optim.lr = 1` as a table in a table."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return found


RECIPES = _load()


def listing() -> str:
    """Three to start from, then all, by paper."""
    groups: dict[str, Mapping[str, str]] = {"to start from": START}
    for file, heading in FILES.items():
        groups[heading] = {name: recipe.title for name, recipe in RECIPES.items() if recipe.group == file}
    return headed(groups)


def describe(name: str) -> str:
    """A recipe's text, and its settings that differ from training's defaults."""
    recipe = _named(name)
    lines, plain = [f"{name}: {recipe.text()}", ""], defaults(TrainConfig)
    for key, value in flat(recipe.config()).items():
        if key in _ALWAYS or value != plain.get(key, ""):
            lines.append(f"  --{key.replace('_', '-')} {value}")
    return "\n".join(lines)


def get(name: str) -> TrainConfig:
    """A recipe by its name, or by the path of a .json file such as `adaptivit sweep` writes."""
    return _read(Path(name)) if name.endswith(".json") else _named(name).config()


def _named(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


def _read(path: Path) -> TrainConfig:
    """{"recipe": {setting: value}}; settings that are not there keep the defaults of training."""
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"Cannot read the recipe {path}: {error.strerror or error}.") from None
    except ValueError as error:  # not JSON, or not text
        raise UserError(f"The recipe {path} is not JSON ({error}).") from None
    settings = given.get("recipe") if isinstance(given, dict) else None
    if not isinstance(settings, dict):
        raise UserError(f'The recipe {path}: expected {{"recipe": {{"optim.lr": 0.0001, ...}}}}, got something else.')
    try:
        config = with_settings(TrainConfig(data=""), settings)
        parse(config.policy)
    except UserError as error:
        raise UserError(f"The recipe {path}: {error}") from None
    return config
