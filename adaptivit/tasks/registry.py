"""Tasks by name. One from outside calls `adaptivit.register_task`, in a file given by `--import` or in a module that an
installed package names as an entry point of `adaptivit.tasks`. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..errors import UserError
from ..utils.plugins import Plugins

if TYPE_CHECKING:
    from .protocol import Task

DEFAULT = "classification"
BUILT_IN = {"classification": "classification:Classification"}
PLUGINS: Plugins[Task] = Plugins("task", "adaptivit.tasks", BUILT_IN)
names, known = PLUGINS.names, PLUGINS.known
T = TypeVar("T", bound="type[Task]")


def get(name: str) -> Task:
    """The task of that name."""
    if name in BUILT_IN and name not in PLUGINS.registered:
        module, _, cls = BUILT_IN[name].partition(":")
        PLUGINS.registered[name] = getattr(importlib.import_module(f".{module}", __package__), cls)(name)
    return PLUGINS.get(name)


def register(name: str) -> Callable[[T], T]:
    """Decorator: make a Task subclass available under `name`."""
    PLUGINS.check_new(name)

    def add(cls: T) -> T:
        from .protocol import Task

        if not issubclass(cls, Task):
            raise UserError(f"task {name!r}: expected a subclass of adaptivit.Task, got {cls.__name__}.")
        PLUGINS.registered[name] = cls(name)
        return cls

    return add
