"""Every policy setting: its default, its meaning, its limits. Nothing here imports torch, so that --help is instant.

A policy is written as `name` or `name:key=value,key=value`, e.g. aht:threshold=0.9,stages=3+6+9.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .errors import UserError, unknown


def _require(ok: bool, name: str, expected: str, value: object) -> None:
    if not ok:
        raise UserError(f"{name}: expected {expected}, got {value!r}.")


@dataclass(frozen=True)
class StaticSettings:
    """Every token through every block."""


@dataclass(frozen=True)
class AHTSettings:
    """AHT-ViT: planned depth per token, carried out by a two-parameter supervisor."""

    threshold: float = 1.0
    """T: a token halts when its cumulative score reaches T - eps. Lower is cheaper."""
    eps: float = 0.01
    """Slack of the threshold, so that one layer can be enough; 0 is the letter of the paper."""
    stages: tuple[int, ...] | None = None
    """Planners sit after this many blocks, e.g. 3+6+9; default: a quarter, half and three quarters of the depth."""
    feature: Literal["fc1", "gelu", "residual"] = "fc1"
    """What the supervisor reads: an element after fc1, after its activation, or of the residual stream (A-ViT)."""
    index: int = 0
    """Which element of the feature is read."""
    gamma: float = 1.0
    """Starting scale of the supervisor, shared by all layers."""
    beta: float = -3.0
    """Starting shift of the supervisor; `train` calibrates it on one batch."""
    learn_gate: bool = True
    """Whether gamma and beta are learned."""
    class_token: Literal["stays", "mean_field"] = "stays"
    """The class token never halts and the head reads the last layer, or A-ViT's mean-field readout."""
    halted: Literal["frozen", "zeroed"] = "frozen"
    """What a pooling head sees of a halted token: its last value, or zeros."""
    straight_through: bool = False
    """Pass the task's gradient to the scores through the key weights (forward stays 0/1)."""
    tau: float = 0.25
    """Width of the soft step whose slope that gradient takes."""
    plan_weight: float = 0.0
    """How much the plan acts on the score, kappa (l - N_plan); 0 is the paper: planners enter only the loss."""
    plan_range: Literal["1..L", "s..L", "s..L+1"] = "1..L"
    """Depths that a planner of stage s can predict."""

    def __post_init__(self) -> None:
        _require(self.threshold > 0, "threshold", "a number > 0", self.threshold)
        _require(0 <= self.eps < self.threshold, "eps", "0 <= eps < threshold", self.eps)
        _require(self.tau > 0, "tau", "a number > 0", self.tau)
        _require(self.index >= 0, "index", "an index >= 0", self.index)
        _require(self.plan_weight >= 0, "plan_weight", "a number >= 0", self.plan_weight)
        stages = (1,) if self.stages is None else self.stages
        _require(all(s >= 1 for s in stages), "stages", "block numbers in 1..L", stages)
        _require(len(set(stages)) == len(stages), "stages", "different block numbers", stages)
        _require(not self.plan_weight or bool(stages), "plan_weight", "0 where there is no stage", self.plan_weight)


@dataclass(frozen=True)
class AViTSettings:
    """A-ViT: adaptive tokens by one neuron of the residual stream."""

    gate_scale: float = 5.0
    """gamma in score = sigmoid(gate_scale * x[index] - gate_center); 5 in the paper, 10 in the public recipe."""
    gate_center: float = 10.0
    """-beta: 10 in the paper; 30 (tiny) and 75 (small) in the public recipe."""
    eps: float = 0.01
    """A token halts when its cumulative score reaches 1 - eps."""
    index: int = 0
    """Which element of a token is its halting neuron."""
    finish_with_class: bool = False
    """End an image when its class token has halted: exact for the logits, cheaper; depths then stop there too."""
    tau: float = 0.25
    """Width of the soft step behind the budget loss's gradient."""

    def __post_init__(self) -> None:
        _require(0 <= self.eps < 1, "eps", "0 <= eps < 1", self.eps)
        _require(self.index >= 0, "index", "an index >= 0", self.index)
        _require(self.tau > 0, "tau", "a number > 0", self.tau)


@dataclass(frozen=True)
class ReplaySettings:
    """Carry out a recorded trace again."""

    trace: Any = ""
    """A Trace, or the path of one saved by adaptivit.save_trace."""


SETTINGS: dict[str, type] = {
    "static": StaticSettings,
    "aht": AHTSettings,
    "avit": AViTSettings,
    "replay": ReplaySettings,
}


def make(policy: str, values: Mapping[str, Any]) -> Any:
    """The settings of a policy from keyword values, types checked."""
    if policy not in SETTINGS:
        raise unknown("policy", policy, SETTINGS)
    cls = SETTINGS[policy]
    hints = typing.get_type_hints(cls)
    fields = {f.name for f in dataclasses.fields(cls)}
    clean = {}
    for name, value in values.items():
        if name not in fields:
            raise unknown(f"setting of policy {policy!r}:", name, fields)
        clean[name] = convert(name, value, hints[name])
    return cls(**clean)


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """`aht:threshold=0.9,stages=3+6` -> ("aht", {"threshold": 0.9, "stages": (3, 6)}), checked."""
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
            text = "+".join(map(str, value)) if isinstance(value, tuple) else value
            items.append(f"{f.name}={text if isinstance(text, (str, int, float, bool)) else '...'}")
    return policy + (":" + ",".join(items) if items else "")


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
    if kind is float and number != number:
        raise UserError(f"{name}: expected a number, got nan.")
    return number


def describe(cls: type) -> list[tuple[str, Any, str]]:
    """(name, default, meaning) of every field: the string under a field is its meaning."""
    meanings: dict[str, str] = {}
    try:
        body: Any = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, SyntaxError):  # a class without a source file
        return [(f.name, f.default, "") for f in dataclasses.fields(cls)]
    for field_node, text_node in zip(body.body, body.body[1:], strict=False):
        if isinstance(field_node, ast.AnnAssign) and isinstance(field_node.target, ast.Name):
            value = text_node.value if isinstance(text_node, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                meanings[field_node.target.id] = value.value
    return [(f.name, f.default, meanings.get(f.name, "")) for f in dataclasses.fields(cls)]
