"""Values, or their texts from the command line, as the types that settings want; checks with one-line errors."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

from ..errors import UserError, unknown


@dataclasses.dataclass(frozen=True)
class Check:
    """What a value must be, as an annotation of a setting."""

    ok: Callable[[Any], bool]
    expected: str


Share = Annotated[float, Check(lambda v: 0 < v <= 1, "a share in (0, 1]")]
Positive = Annotated[float, Check(lambda v: v > 0, "a number > 0")]
NotNegative = Annotated[float, Check(lambda v: v >= 0, "a number >= 0")]
Index = Annotated[int, Check(lambda v: v >= 0, "a number >= 0")]
Count = Annotated[int, Check(lambda v: v >= 1, "a number >= 1")]
Name = Annotated[str, Check(lambda v: len(v) <= 200 and v.isprintable(), "at most 200 characters in one line")]


def up_to(most: int, least: int = 1) -> Check:
    return Check(lambda v: least <= v <= most, f"{least}..{most}")


_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
shown = _short.repr  # of a value that may be of any size


def require(ok: bool, name: str, expected: str, value: object) -> None:
    if not ok:
        raise UserError(f"{name}: expected {expected}, got {shown(value)}.")


def convert(name: str, value: Any, kind: Any, strict: bool = False) -> Any:
    """A value, or its text, as the type a field wants; an error names both. strict: as JSON has it, no texts."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        made = convert(name, value, arguments[0], strict)
        for check in kind.__metadata__:
            require(check.ok(made), name, check.expected, made)
        return made
    if typing.is_typeddict(kind) or dataclasses.is_dataclass(kind):
        return _record(name, value, kind, strict)
    if origin is Literal:
        if value not in arguments:
            raise unknown(f"value of {name}:", value if isinstance(value, str) else shown(value), arguments)
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None or (value == "none" and not strict):
            return None
        return convert(name, value, next(a for a in arguments if a is not type(None)), strict)
    if origin in (tuple, list):
        parts = value.strip("()").replace("+", " ").split() if isinstance(value, str) and not strict else value
        if not isinstance(parts, (list, tuple)):
            require(not strict, name, "a list", value)
            parts = [parts]
        each = arguments[:1] if origin is list or arguments[-1] is Ellipsis else arguments
        if len(each) > 1:
            require(len(parts) == len(each), name, f"{len(each)} values", value)
        return origin(convert(name, p, each[i % len(each)], strict) for i, p in enumerate(parts))
    kind = origin or kind
    if strict and kind in (bool, str, dict):
        require(type(value) is kind, name, {bool: "true or false", str: "a text", dict: "an object"}[kind], value)
        return value
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "1", "yes"):
            return True
        if str(value).lower() in ("false", "0", "no"):
            return False
        raise UserError(f"{name}: expected true or false, got {shown(value)}.")
    try:
        if (kind is int or strict) and isinstance(value, bool):
            raise ValueError
        if kind is int and float(value) != int(float(value)):
            raise ValueError
        if strict and not isinstance(value, (int, kind)):
            raise ValueError
        number = kind(value) if not (kind is int and isinstance(value, str)) else int(value)
    except (TypeError, ValueError, OverflowError):
        wanted = {"int": "a whole number", "float": "a number"}.get(getattr(kind, "__name__", ""), str(kind))
        raise UserError(f"{name}: expected {wanted}, got {shown(value)}.") from None
    if kind is float and not math.isfinite(number):
        raise UserError(f"{name}: expected a finite number, got {number}.")
    return number


def _record(name: str, value: Any, kind: Any, strict: bool) -> Any:
    """A dataclass, or the dictionary of a TypedDict, from its fields."""
    require(isinstance(value, dict), name or "the file", "an object", value)
    plain, hints = typing.is_typeddict(kind), _hints(kind)
    needed = kind.__required_keys__ if plain else {f.name for f in dataclasses.fields(kind) if _no_default(f)}
    for key in value:
        if key not in hints:
            raise unknown(f"field of {name}:", key, hints)
    for key in hints:
        if key in needed and key not in value:
            raise UserError(f"{name}.{key} is missing.".lstrip("."))
    made = {key: convert(f"{name}.{key}".lstrip("."), v, hints[key], strict) for key, v in value.items()}
    return made if plain else kind(**made)


def _no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


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
