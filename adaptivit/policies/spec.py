"""A policy and its settings as text: `name` or `name:key=value,key=value`, e.g. aht:threshold=0.9,planner_blocks=3+6.

The settings themselves are in records.py. Nothing here imports torch, so that --help is instant.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import typing
from collections.abc import Mapping
from typing import Any

from ..errors import UserError, unknown
from ..utils.coerce import convert
from .registry import get
from .renamed import error_of


def make(policy: str, values: Mapping[str, Any]) -> Any:
    """The settings of a policy from keyword values, types checked."""
    cls = get(policy).settings
    hints = typing.get_type_hints(cls)
    fields = {f.name for f in dataclasses.fields(cls)}
    clean = {}
    for name, value in values.items():
        if name not in fields:
            raise error_of(policy, name, fields) or unknown(f"setting of policy {policy!r}:", name, fields)
        clean[name] = convert(name, value, hints[name])
    return cls(**clean)


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """`aht:threshold=0.9,index=2` -> ("aht", {"threshold": 0.9, "index": 2}), checked."""
    name, _, rest = spec.partition(":")
    values: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, sign, value = item.partition("=")
        if not sign:
            raise UserError(f"policy {spec!r}: expected name:key=value,key=value, got {item!r}.")
        values[key.strip()] = value.strip()
    made = make(name, values)
    return name, {key: getattr(made, key) for key in values}


def spec(policy: str, settings: Any) -> str:
    """The reverse of parse, with the settings that differ from their defaults."""
    default = type(settings)()
    items = []
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if value != getattr(default, f.name):
            text = "+".join(map(str, value)) if isinstance(value, (tuple, list)) else value
            items.append(f"{f.name}={text if isinstance(text, (str, int, float, bool)) else '...'}")
    return policy + (":" + ",".join(items) if items else "")


@functools.cache  # reads source files
def describe(cls: type) -> tuple[tuple[str, Any, str], ...]:
    """(name, default, meaning) of every field: the string under a field is its meaning."""
    meanings: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        try:
            body: Any = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, SyntaxError):  # a class without a source file
            continue
        for field_node, text_node in zip(body.body, body.body[1:], strict=False):
            if isinstance(field_node, ast.AnnAssign) and isinstance(field_node.target, ast.Name):
                value = text_node.value if isinstance(text_node, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    meanings[field_node.target.id] = " ".join(value.value.split())
    return tuple((f.name, f.default, meanings.get(f.name, "")) for f in dataclasses.fields(cls))
