"""Every task by name. One from outside calls `adaptivit.register_task`, in a file that `--import` names or in a module
that an installed package names as an entry point of `adaptivit.tasks`. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..errors import UserError, unknown

if TYPE_CHECKING:
    from .protocol import Task

ENTRY_POINTS = "adaptivit.tasks"
DEFAULT = "classification"
BUILT_IN = {"classification": "classification:Classification"}
_made: dict[str, Task] = {}
T = TypeVar("T", bound="type[Task]")


def names() -> list[str]:
    """Every task that can be asked for, those of installed packages included."""
    return sorted({*BUILT_IN, *_made, *_entry_points()})


def get(name: str) -> Task:
    """The task of that name."""
    if name not in _made:
        if name in BUILT_IN:
            module, _, cls = BUILT_IN[name].partition(":")
            _made[name] = getattr(importlib.import_module(f".{module}", __package__), cls)(name)
        elif name in _entry_points():
            _load(_entry_points()[name])
        else:
            raise unknown("task", name, names())
    return _made[name]


def register(name: str) -> Callable[[T], T]:
    """Decorator: make a Task subclass available under `name`."""
    if name in BUILT_IN:
        raise UserError(f"The task {name!r} is built in; choose another name.")

    def add(cls: T) -> T:
        from .protocol import Task

        if not issubclass(cls, Task):
            raise UserError(f"task {name!r}: expected a subclass of adaptivit.Task, got {cls.__name__}.")
        _made[name] = cls(name)
        return cls

    return add


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def _load(point: importlib.metadata.EntryPoint) -> None:
    try:
        point.load()
    except Exception as error:
        raise UserError(f"The task {point.name!r} of {point.value} cannot be imported: {error!r}.") from None
    if point.name not in _made:
        raise UserError(f"{point.value} was imported but registered no task {point.name!r} (register_task).")
