"""Policies by name: those of this package (records.py), and those from outside.

A policy from outside calls `adaptivit.register_policy`, in a file given by `--import` or in a module that an installed
package names as an entry point of `adaptivit.policies`. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UserError, unknown
from .records import BUILT_IN, NoSettings, Record

if TYPE_CHECKING:
    from .base import Policy

ENTRY_POINTS = "adaptivit.policies"
P = TypeVar("P", bound="type[Policy]")


_registered: dict[str, Record] = {}


def names() -> list[str]:
    """Every policy that can be asked for, those of installed packages included."""
    return sorted({*BUILT_IN, *_registered, *_entry_points()})


def get(name: str) -> Record:
    """The record of a policy; an entry point is loaded the first time it is asked for."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name not in _registered and name in _entry_points():
        _load(_entry_points()[name])
    if name not in _registered:
        raise UserError(f"{unknown('policy', name, names())} One of your own: --import FILE, or import its module.")
    return _registered[name]


def register(
    name: str, settings: type = NoSettings, *, title: str = "", colour: str = "", recipe: str = ""
) -> Callable[[P], P]:
    """Decorator: make a Policy subclass available under `name`, with its frozen dataclass of settings."""
    if name in BUILT_IN:
        raise UserError(f"The policy {name!r} is built in; choose another name.")
    if not is_dataclass(settings):
        raise UserError(f"settings of policy {name!r}: expected a dataclass, got {settings!r}.")

    def add(cls: P) -> P:
        from .base import Policy

        if not issubclass(cls, Policy):
            raise UserError(f"policy {name!r}: expected a subclass of adaptivit.Policy, got {cls.__name__}.")
        _registered[name] = Record(settings, cls, title or name, colour, recipe)
        return cls

    return add


def build(name: str, shape: Any, values: dict[str, Any]) -> Policy:
    """A policy by name for a backbone of that shape."""
    from .base import Policy
    from .spec import make

    record, settings = get(name), make(name, values)
    cls: Any = record.home
    if isinstance(cls, str):
        module, _, attribute = cls.partition(":")
        cls = getattr(importlib.import_module(f".{module}", __package__), attribute)
    built = cls(settings, shape)
    assert isinstance(built, Policy)
    return built


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def _load(point: importlib.metadata.EntryPoint) -> None:
    try:
        point.load()
    except Exception as error:
        raise UserError(f"The policy {point.name!r} of {point.value} cannot be imported: {error!r}.") from None
    if point.name not in _registered:
        raise UserError(f"{point.value} was imported but registered no policy {point.name!r} (register_policy).")
