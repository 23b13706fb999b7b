"""One short file a method. `register` adds a policy of your own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, TypeVar

from ..backbones.timm_vit import Shape
from ..errors import UserError, unknown
from .base import Policy
from .settings import NoSettings
from .spec import SETTINGS, make

_BUILT_IN = {
    "static": "static:Static",
    "aht": "aht:AHT",
    "avit": "avit:AViT",
    "mod": "mod:MoD",
    "amod": "amod:AMoD",
    "dynamicvit": "dynamicvit:DynamicViT",
    "evit": "evit:EViT",
    "tome": "tome:ToMe",
    "fold": "fold:Fold",
    "act": "act:ACT",
    "confidence": "exits:Confidence",
    "similarity": "exits:SimilarityExit",
    "pondernet": "pondernet:PonderNet",
    "replay": "replay:Replay",
}
_REGISTERED: dict[str, type[Policy]] = {}

P = TypeVar("P", bound=type[Policy])

__all__ = ["Policy", "build", "names", "register"]


def register(name: str, settings: type = NoSettings) -> Callable[[P], P]:
    """Decorator: make a Policy subclass available under `name`, with its frozen dataclass of settings."""
    if name in _BUILT_IN:
        raise UserError(f"The policy {name!r} is built in; choose another name.")
    if not is_dataclass(settings):
        raise UserError(f"settings of policy {name!r}: expected a dataclass, got {settings!r}.")

    def add(cls: P) -> P:
        if not issubclass(cls, Policy):
            raise UserError(f"policy {name!r}: expected a subclass of adaptivit.Policy, got {cls.__name__}.")
        _REGISTERED[name] = cls
        SETTINGS[name] = settings
        return cls

    return add


def names() -> list[str]:
    return sorted((*_BUILT_IN, *_REGISTERED))


def build(name: str, shape: Shape, values: dict[str, Any]) -> Policy:
    """A policy by name for a backbone of that shape."""
    settings = make(name, values)
    if name in _REGISTERED:
        return _REGISTERED[name](settings, shape)
    if name not in _BUILT_IN:
        raise unknown("policy", name, names())
    module, cls = _BUILT_IN[name].split(":")
    built = getattr(importlib.import_module(f".{module}", __package__), cls)(settings, shape)
    assert isinstance(built, Policy)
    return built
