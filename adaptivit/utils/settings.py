"""Frozen dataclasses of settings, whose groups are dataclasses too, read and changed by dotted names (`optim.lr`)."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_hints = functools.cache(typing.get_type_hints)  # they take a millisecond, and a plan asks a thousand times


def kinds(cls: type) -> Mapping[str, Any]:
    """The type of every setting."""
    found: dict[str, Any] = {}
    for name, kind in _hints(cls).items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found |= {f"{name}.{k}": v for k, v in kinds(kind).items()}
        else:
            found[name] = kind
    return found


def flat(config: Any) -> dict[str, Any]:
    """The value of every setting."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{k}": v for k, v in flat(value).items()}
        else:
            found[field.name] = value
    return found


def changed(config: T, changes: Mapping[str, Any]) -> T:
    """A copy with other values of these settings."""
    values: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        group, dot, key = name.partition(".")
        if dot:
            groups.setdefault(group, {})[key] = value
        else:
            values[name] = value
    values |= {group: changed(getattr(config, group), own) for group, own in groups.items()}
    return dataclasses.replace(typing.cast(Any, config), **values)


def command(name: str, config: Any, leave_out: Collection[str] = ()) -> str:
    """The command line that gives this configuration."""
    words, plain = ["adaptivit", *name.split()], defaults(type(config))
    for key, value in flat(config).items():
        if key not in leave_out and value != plain.get(key, dataclasses.MISSING):
            several = value if isinstance(value, tuple) else () if isinstance(value, bool) else (value,)
            group, dot, last = key.rpartition(".")
            flag = f"{group}{dot}{'no-' if value is False else ''}{last}"
            words += ["--" + flag.replace("_", "-"), *map(str, several)]
    return shlex.join(words)


def defaults(cls: type) -> Mapping[str, Any]:
    """The default of every setting that has one."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{k}": v for k, v in flat(value).items()}
        elif value is not dataclasses.MISSING:
            found[field.name] = value
    return found
