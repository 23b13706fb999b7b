"""Policies and tasks by name: built in, registered in Python, or entry points of installed packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection
from typing import Generic, TypeVar

from ..errors import UserError, unknown

T = TypeVar("T")


class Plugins(Generic[T]):
    """What was registered of one kind. An entry point is loaded the first time it is asked for."""

    def __init__(self, kind: str, group: str, built_in: Collection[str]) -> None:
        self.kind, self.group, self.built_in = kind, group, built_in
        self.registered: dict[str, T] = {}

    def names(self) -> list[str]:
        """Every name that can be asked for, those of installed packages included."""
        return sorted({*self.built_in, *self.registered, *self._entry_points()})

    def known(self, name: str) -> bool:
        """Whether it can be asked for. Installed packages are searched last, as that takes milliseconds."""
        return name in self.built_in or name in self.registered or name in self._entry_points()

    def check_new(self, name: str) -> None:
        if name in self.built_in:
            raise UserError(f"The {self.kind} {name!r} is built in; choose another name.")

    def get(self, name: str) -> T:
        """One that is registered or an entry point."""
        if name in self.registered:
            return self.registered[name]
        point = self._entry_points().get(name)
        if point is not None:
            try:
                point.load()
            except Exception as error:
                wrong = f"The {self.kind} {name!r} of {point.value} cannot be imported: {error!r}."
                raise UserError(wrong) from None
            if name not in self.registered:
                made = f"(register_{self.kind})"
                raise UserError(f"{point.value} was imported but registered no {self.kind} {name!r} {made}.")
        if name not in self.registered:
            advice = "One of your own: --import FILE, or import its module."
            raise UserError(f"{unknown(self.kind, name, self.names())} {advice}")
        return self.registered[name]

    def _entry_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        return {point.name: point for point in importlib.metadata.entry_points(group=self.group)}
