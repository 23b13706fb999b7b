"""Policies by name: those of this package (records.py), and those from outside.

A policy from outside calls `adaptivit.register_policy`, in a file given by `--import` or in a module that an installed
package names as an entry point of `adaptivit.policies`. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UserError
from ..utils.plugins import Plugins
from .records import BUILT_IN, NoSettings, Record

if TYPE_CHECKING:
    from .base import Policy

PLUGINS: Plugins[Record] = Plugins("policy", "adaptivit.policies", BUILT_IN)
names, known = PLUGINS.names, PLUGINS.known
P = TypeVar("P", bound="type[Policy]")


def get(name: str) -> Record:
    """The record of a policy."""
    return BUILT_IN[name] if name in BUILT_IN else PLUGINS.get(name)


def register(name: str, settings: type = NoSettings, *, title: str = "", colour: str = "") -> Callable[[P], P]:
    """Decorator: make a Policy subclass available under `name`, with its frozen dataclass of settings."""
    PLUGINS.check_new(name)
    if not is_dataclass(settings):
        raise UserError(f"settings of policy {name!r}: expected a dataclass, got {settings!r}.")

    def add(cls: P) -> P:
        from .base import Policy

        if not issubclass(cls, Policy):
            raise UserError(f"policy {name!r}: expected a subclass of adaptivit.Policy, got {cls.__name__}.")
        PLUGINS.registered[name] = Record(settings, cls, title or name, colour)
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
