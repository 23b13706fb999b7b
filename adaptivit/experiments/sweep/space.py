"""The space of a sweep: its text, its points, and the configuration that a point stands for. No torch, no optuna."""

from __future__ import annotations

import itertools
import math
import random
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import UserError, unknown
from ...policies import get, names, spec
from ...training.config import TrainConfig, with_settings, wrong_name
from ...utils.settings import kinds
from .config import NOT_IN_SPACE, TrialConfig

Value = str | int | float
Params = dict[str, Value]

_HINTS = kinds(TrainConfig)
_KEYS = [name for name in _HINTS if name not in NOT_IN_SPACE]
_RANGE = re.compile(r"[-+.\de]*\d\.\.[-+.\de]*\d(:|$)")  # of numbers, where a setting may be anything
_COMBINATIONS = 1000  # looked through for one in which a value is allowed


@dataclass(frozen=True)
class Axis:
    """One setting and the values that it may take."""

    key: str
    choices: tuple[str, ...] = ()  # as written; empty for a range
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    @property
    def values(self) -> tuple[Value, ...] | None:
        """All the values, or None where they cannot be counted."""
        if self.choices:
            return self.choices
        return tuple(range(int(self.low), int(self.high) + 1)) if self.whole else None

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values whose limits are checked: every choice, or both ends and one between."""
        inside = self.low + 0.37 * (self.high - self.low)
        return self.choices or (self._typed(self.low), self._typed(inside), self._typed(self.high))

    def draw(self, generator: random.Random) -> Value:
        if self.choices:
            return generator.choice(self.choices)
        half = 0.5 if self.whole else 0.0  # whole numbers at the ends are as likely as the others
        low, high = self.low - half, self.high + half
        x = math.exp(generator.uniform(math.log(low), math.log(high))) if self.log else generator.uniform(low, high)
        return self._typed(min(max(x, self.low), self.high))

    def _typed(self, x: float) -> Value:
        return round(x) if self.whole else x


def parse(space: Sequence[str], base: TrialConfig) -> tuple[Axis, ...]:
    """The axes of a space, checked: keys, values and their limits."""
    if not space:
        raise UserError("space: expected at least one KEY=VALUES, e.g. --space 'optim.lr=1e-4|3e-4', got none.")
    spec.parse(base.policy)
    keys = [text.partition("=")[0].strip() for text in space]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"space: {key} is given {keys.count(key)} times; give all its values at once.")
    policies = [base.policy]
    if "policy" in keys:
        policies = space[keys.index("policy")].partition("=")[2].split("|")
    names = [p.partition(":")[0].strip() for p in policies]
    axes = tuple(_axis(text, names) for text in space)
    _check(axes, base)
    return axes


def _axis(text: str, policies: Sequence[str]) -> Axis:
    key, sign, values = (part.strip() for part in text.partition("="))
    if not sign or not key or not values:
        raise UserError(f"space: expected KEY=v1|v2, KEY=low..high, KEY=low..high:log or KEY=1..5:int, got {text!r}.")
    kind = _kind(key, policies)
    if "|" not in values and (".." in values if kind in (int, float) else kind is Any and _RANGE.match(values)):
        return _range(key, values, text, kind)
    choices = tuple(part.strip() for part in values.split("|"))
    if not all(choices):
        raise UserError(f"space: {text!r} has an empty value.")
    twice = next((c for c in choices if choices.count(c) > 1), None)
    if twice is not None:
        raise UserError(f"space: {text!r} names {twice!r} twice.")
    return Axis(key, choices)


def _kind(key: str, policies: Sequence[str]) -> Any:
    """The type of a setting; float for float | None."""
    if key.startswith("policy."):
        name = key.removeprefix("policy.")
        known = {n: typing.get_type_hints(get(n).settings) for n in policies if n in names()}
        kind = next((hints[name] for hints in known.values() if name in hints), None)
        if known and kind is None:
            valid = {f"policy.{k}" for hints in known.values() for k in hints}
            raise unknown(f"key in --space for policy {'|'.join(known)}:", key, valid)
    elif key in _KEYS:
        kind = _HINTS[key]
    elif key in _HINTS:
        raise UserError(f"space: {key} belongs to the run, not to a recipe, and cannot be searched over.")
    else:
        raise wrong_name("key in --space:", key, [*_KEYS, "policy.NAME"])
    return next((k for k in (int, float) if kind is k or k in typing.get_args(kind)), kind)


def _range(key: str, values: str, text: str, kind: type) -> Axis:
    ends, *options = values.split(":")
    low_text, _, high_text = ends.partition("..")
    odd = set(options) - {"log", "int"}
    if odd:
        raise UserError(f"space: {text!r}: expected :log or :int after the range, got :{min(odd)}.")
    try:
        low, high = float(low_text), float(high_text)
    except ValueError:
        raise UserError(f"space: {text!r}: expected two numbers as low..high, got {ends!r}.") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"space: {text!r}: expected low < high, got {ends}.")
    whole = "int" in options
    if kind is int and not whole:
        raise UserError(f"space: {key} is a whole number: write {key}={ends}:int.")
    if whole and (low != int(low) or high != int(high)):
        raise UserError(f"space: {text!r}: expected whole numbers for :int, got {ends}.")
    if "log" in options and low <= 0:
        raise UserError(f"space: {text!r}: expected low > 0 for :log, got {low_text}.")
    return Axis(key, (), low, high, "log" in options, whole)


def _check(axes: Sequence[Axis], base: TrialConfig) -> None:
    """Every value must be allowed, with the base or with some values of the other axes."""
    for axis in axes:
        others = [a for a in axes if a is not axis]
        for value in axis.ends:
            first: UserError | None = None
            mixed = itertools.product(*(a.ends for a in others))
            combinations = ({a.key: v for a, v in zip(others, values, strict=True)} for values in mixed)
            for others_now in itertools.chain([{}], itertools.islice(combinations, _COMBINATIONS)):
                try:
                    apply(base, {**others_now, axis.key: value})
                except UserError as error:
                    first = first or error
                else:
                    break
            else:
                raise UserError(f"space: {axis.key}={value}: {first}")


def apply(base: TrialConfig, params: Mapping[str, Value]) -> TrialConfig:
    """The base with the values of a point."""
    changes: dict[str, Any] = {}
    of_policy: dict[str, Value] = {}
    for key, value in params.items():
        if key.startswith("policy."):
            of_policy[key.removeprefix("policy.")] = value
        else:
            changes[key] = value
    changes["policy"] = _spec(changes.get("policy", base.policy), of_policy)
    made = with_settings(base, changes)
    assert isinstance(made, TrialConfig)
    return made


def _spec(policy: str, changes: Mapping[str, Value]) -> str:
    """A policy's text with other settings. What it gives stays, defaults too: a given gate is not calibrated."""
    name, values = spec.parse(policy)
    if not changes:
        return policy
    said = values | dict(changes)
    made = spec.make(name, said)
    return f"{name}:{','.join(f'{key}={_text(getattr(made, key))}' for key in said)}"


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "+".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def total(axes: Sequence[Axis], method: str, trials: int | None, default: int) -> int:
    """How many trials there will be."""
    counts = [len(a.values) if a.values is not None else None for a in axes]
    size = math.prod(c for c in counts if c is not None) if None not in counts else None
    if method == "grid":
        open_ended = next((a.key for a in axes if a.values is None), None)
        if size is None:
            raise UserError(
                f"space: a grid needs values to enumerate: write {open_ended}=v1|v2|v3, or --method random."
            )
        return min(size, trials or size)
    wanted = trials or default
    return wanted if method == "tpe" or size is None else min(wanted, size)


def points(axes: Sequence[Axis], method: str, seed: int, count: int) -> list[Params]:
    """The first points of a grid or of a random search, none twice; more of them begin with the same ones."""
    source = _grid(axes) if method == "grid" else _random(axes, seed)
    return list(itertools.islice(source, count))


def _grid(axes: Sequence[Axis]) -> Iterator[Params]:
    for values in itertools.product(*(a.values or () for a in axes)):
        yield {a.key: v for a, v in zip(axes, values, strict=True)}


def _random(axes: Sequence[Axis], seed: int) -> Iterator[Params]:
    generator, seen = random.Random(seed), set()
    while True:
        point = {a.key: a.draw(generator) for a in axes}
        if tuple(point.values()) not in seen:
            seen.add(tuple(point.values()))
            yield point
