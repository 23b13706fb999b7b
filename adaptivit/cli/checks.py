"""Paths, checkpoints and flags of a command, checked before torch is imported, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..budget import curve
from ..checkpoint import config as stored
from ..errors import DataError, UserError, WeightsError
from ..policies import spec
from ..utils.settings import flat


def check(config: Any) -> None:
    """Refuse flags that do not go together, what cannot be, and paths and checkpoints that are not there or damaged."""
    parts: tuple[Any, ...] = (config, getattr(config, "model", None))
    for part in parts:
        if hasattr(part, "verify"):
            part.verify()
    if getattr(config, "dry_run", False) or getattr(config, "minutes", None) == 0:
        return  # reproduce, which then reads none of it
    given = {name.rpartition(".")[2]: value for name, value in flat(config).items() if value is not None}
    for name, look in _CHECKS.items():
        value = given.get(name, ())
        for one in value if isinstance(value, tuple) else (value,):
            look(one, name)


def _policy(text: str, _: str) -> None:
    name, values = spec.parse(text)
    spec.make(name, values)
    if name == "replay" and isinstance(values.get("trace"), str):
        _file(values["trace"], "replay")


def _weights(path: str, _: str) -> None:
    if path != "none" and not Path(path).exists():
        raise WeightsError(f"Weights not found: {path}.")
    if Path(path).is_dir():
        stored.read_config(path)


def _data(path: str, _: str) -> None:
    place = path.removeprefix("hf:").partition("?")[0] if path.startswith("hf:") else path
    if path != "digits" and "{" not in path and not Path(place).exists():
        raise DataError(f"Data not found: {place}.")


def _image(path: str, _: str) -> None:
    if not Path(path).exists():
        raise DataError(f"Image not found: {path}.")


def _file(path: str, name: str) -> None:
    if not Path(path).exists() or Path(path).is_dir():  # a pipe is fine
        raise UserError(f"{name}: file not found: {path}.")


def _profile(name: str, what: str) -> None:
    if name.startswith("replay:"):
        _file(name.removeprefix("replay:"), what)


# What is looked at, in this order, under the name of its flag in every command.
_CHECKS: dict[str, Callable[[str, str], Any]] = {
    **dict.fromkeys(("policy", "policies"), _policy),
    **dict.fromkeys(("budget", "max_macs"), curve.parse),
    **dict.fromkeys(("checkpoint", "compare_to"), lambda path, _: stored.check(path)),
    **dict.fromkeys(("weights", "teacher", "static"), _weights),
    **dict.fromkeys(("data", "check"), _data),
    "images": _image,
    **dict.fromkeys(("class_names", "token_file"), _file),
    "profile": _profile,
}
