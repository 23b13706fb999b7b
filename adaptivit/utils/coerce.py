"""Values, or their texts from the command line, as the types that settings want; checks with one-line errors."""

from __future__ import annotations

import math
import types
import typing
from typing import Any, Literal

from ..errors import UserError, unknown


def require(ok: bool, name: str, expected: str, value: object) -> None:
    if not ok:
        raise UserError(f"{name}: expected {expected}, got {value!r}.")


def convert(name: str, value: Any, kind: Any) -> Any:
    """A value, or its text, as the type a field wants; an error names both."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Literal:
        if value not in arguments:
            raise unknown(f"value of {name}:", str(value), map(str, arguments))
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None or value == "none":
            return None
        return convert(name, value, next(a for a in arguments if a is not type(None)))
    if origin is tuple:
        parts = value.strip("()").replace("+", " ").split() if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)):
            parts = [parts]
        return tuple(convert(name, p, arguments[0]) for p in parts)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "1", "yes"):
            return True
        if str(value).lower() in ("false", "0", "no"):
            return False
        raise UserError(f"{name}: expected true or false, got {value!r}.")
    try:
        if kind is int and (isinstance(value, bool) or float(value) != int(float(value))):
            raise ValueError
        number = kind(value) if not (kind is int and isinstance(value, str)) else int(value)
    except (TypeError, ValueError, OverflowError):
        wanted = {"int": "a whole number", "float": "a number"}.get(getattr(kind, "__name__", ""), str(kind))
        raise UserError(f"{name}: expected {wanted}, got {value!r}.") from None
    if kind is float and not math.isfinite(number):
        raise UserError(f"{name}: expected a finite number, got {number}.")
    return number


def check_size(value: int | None) -> None:
    if value is not None:
        at_least("img_size", value, 1)


def at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise UserError(f"{name}: expected at least {least}, got {value}.")


def positive(name: str, value: float) -> None:
    if not value > 0:
        raise UserError(f"{name}: expected a number > 0, got {value}.")


def between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value < high:
        raise UserError(f"{name}: expected {low} <= value < {high}, got {value}.")
