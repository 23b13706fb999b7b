"""Budgets as a user writes them, and the calibrated curve that turns them into a position of a policy's dial.

    "0.8 GMACs", "800 MMACs", 8e8     multiply-accumulates an image, in the mean over images
    "-33%"                            so much less than the static model
    "3 ms"                            a batch, on the device that it was measured on
    "none"                            what the policy's settings say

Nothing here imports torch.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from ..errors import UserError
from ..utils.coerce import Check, Count, Name, NotNegative, Positive, convert, require

SOME = Check(lambda v: len(v) > 0, "at least one point")
FORMS = "'0.8 GMACs', '-33%' (less than static) or '3 ms'"
STEP = 0.06  # of static's MACs: two neighbours further apart are a step, with nothing between them
GOAL = 0.02  # of a budget: how well it is to be met on images that the curve has not seen
_SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_FORM = re.compile(r"([+-]?\d*\.?\d+(?:e[+-]?\d+)?)\s*(?:(%)|([kmgt]?)macs?|(ms))", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """One of the four; all None is the policy's settings."""

    text: str
    macs: float | None = None
    share: float | None = None  # of static's MACs
    ms: float | None = None

    @property
    def free(self) -> bool:
        return self.macs is None and self.share is None and self.ms is None


def parse(given: object, what: str = "budget") -> Budget:
    """A budget from its text, or from a number of MACs."""
    if isinstance(given, Budget):
        return given
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        try:
            number = float(given)
        except OverflowError:  # whole numbers have no end
            number = math.inf
        if not (math.isfinite(number) and number > 0):
            raise UserError(f"{what}: expected a number of MACs > 0, or {FORMS}, got {number:g}.")
        return Budget(f"{number:.15g} MACs", macs=number)
    text = given.strip().replace("−", "-") if isinstance(given, str) else ""
    if text.lower() == "none":
        return Budget("none")
    found = _FORM.fullmatch(text) if len(text) <= 40 else None
    require(found is not None, what, FORMS, given)
    assert found is not None
    number, percent, size, ms = float(found[1]), found[2], found[3], found[4]
    if percent:
        if found[1][0] != "-":
            raise UserError(f"{what}: a saving against static is written with a minus, like '-33%', got {given!r}.")
        if not -100 < number <= 0:
            raise UserError(f"{what}: expected a saving between -0% and -100%, got {given!r}.")
        return Budget(text, share=1 + number / 100)
    if not 0 < number < math.inf:
        raise UserError(f"{what}: expected more than 0 and less than infinity, got {given!r}.")
    return Budget(text, ms=number) if ms else Budget(text, macs=number * _SIZES[(size or "").lower()])


def gmacs(macs: float) -> str:
    return f"{macs / 1e9:.4g} GMACs"


def unit_hint(macs: float) -> str:
    """What to say of a number that is too small for MACs: 0.8 was meant in GMACs, 0.67 as a share."""
    return " A number alone means MACs; write '0.8 GMACs' or '-33%'." if macs < 1000 else ""


@dataclass(frozen=True)
class Point:
    """The dial at one position: mean over the calibration images."""

    position: float
    macs: Positive
    live: NotNegative  # tokens that enter a block, mean over the blocks
    spread: NotNegative | None = (
        None  # standard deviation of an image's MACs; None: not known (one image, or an older curve)
    )


@dataclass(frozen=True)
class Latency:
    """Milliseconds of a batch at some positions, on one device."""

    device: Name
    batch: Count
    layout: Name
    dtype: Name
    points: Annotated[tuple[tuple[Positive, Positive], ...], SOME]  # (MACs an image, ms), from dear to cheap, falling

    @property
    def images(self) -> str:
        return "1 image" if self.batch == 1 else f"{self.batch} images"


@dataclass(frozen=True)
class Calibration:
    """The curve of a policy's dial, from dear to cheap; `budget` is what was set when it was saved."""

    dial: Name
    continuous: bool  # any position between two points can be taken; otherwise the points are all there is
    tokens: Count  # slots of an image
    static: Positive  # MACs of the static model
    images: Count  # that the curve was measured on
    points: Annotated[tuple[Point, ...], SOME]  # MACs fall
    settings: Point  # what the policy's settings cost
    latency: Latency | None = None
    budget: Name | None = None

    def position_for(self, budget: Budget, device: str) -> float | None:
        """The position that meets the budget; None for the policy's settings."""
        return None if budget.free else self.at(self.wanted(budget, device), budget.text)

    def wanted(self, budget: Budget, device: str) -> float:
        """The budget in MACs, checked."""
        if budget.ms is not None:
            return self._macs_of(budget, device)
        macs = budget.macs if budget.macs is not None else (budget.share or 0.0) * self.static
        if macs > self.static * (1 + 1e-9):
            raise UserError(f"budget: {budget.text} is above the static model's {gmacs(self.static)}.")
        return macs

    def at(self, macs: float, text: str = "") -> float:
        """The position whose mean cost is `macs`; of a dial with steps, the nearest one below."""
        least = self.points[-1].macs
        if macs < least * (1 - 1e-9):
            given = f"{text} ({gmacs(macs)})" if text and "MACs" not in text else gmacs(macs)
            raise UserError(
                f"budget: {given} is below the least that this model can do, {gmacs(least)} "
                f"({100 * (least / self.static - 1):.1f} %).{unit_hint(macs)}"
            )
        dear, cheap, share = self._around(macs)
        if not self.continuous or dear.macs - cheap.macs > STEP * self.static or share == 0:
            return cheap.position
        return cheap.position + (dear.position - cheap.position) * share

    def _around(self, macs: float) -> tuple[Point, Point, float]:
        """The two points around a cost, and where it lies between: 0 at the cheaper one."""
        points = self.points
        below = min(bisect.bisect_left(points, -macs, key=lambda p: -p.macs), len(points) - 1)
        cheap, dear = points[below], points[max(below - 1, 0)]
        share = 0.0 if dear is cheap else min(1.0, max(0.0, (macs - cheap.macs) / (dear.macs - cheap.macs)))
        return dear, cheap, share

    def error(self, macs: float) -> float | None:
        """How far the mean over new images may be from a budget of `macs`, as a share of it.

        Two standard errors of the mean over the calibration images, so that 19 of 20 calibrations do better; the new
        images are many, and of the same kind. None where the spread is not known; 0 where every image costs the same.
        """
        if not self.continuous:
            return 0.0
        dear, cheap, share = self._around(macs)
        if cheap.spread is None or dear.spread is None:
            return None
        spread = cheap.spread + share * (dear.spread - cheap.spread)
        return 2 * spread / math.sqrt(self.images) / macs

    def needed(self, macs: float, goal: float = GOAL) -> int | None:
        """How many calibration images would bring the error down to `goal`."""
        error = self.error(macs)
        return None if error is None else max(2, math.ceil(self.images * (error / goal) ** 2))

    def tenths(self) -> list[str]:
        """-10%, -20% ... as far as the dial goes."""
        return [f"-{s}%" for s in range(10, 100, 10) if 1 - s / 100 >= self.points[-1].macs / self.static]

    def accuracy_warning(self, budget: str | float | None = None, device: str = "") -> str | None:
        """A line that says so where a budget (without one: any tenth that the dial can reach) may be missed by more
        than GOAL on new images, with the number of images that would do. `device` is for budgets in ms."""
        asked = self.tenths() if budget is None else [budget]
        wanted = [one for one in map(parse, asked) if not one.free]
        targets = [(one.text, self.wanted(one, device)) for one in wanted]
        if not targets or not self.continuous:
            return None
        images = f"{self.images:,} image{'s' * (self.images != 1)}"
        if any(self.error(macs) is None for _, macs in targets):
            return f"how well a budget is met on new images is not known from {images}; calibrate on more."
        error, text, macs = max((self.error(macs) or 0.0, text, macs) for text, macs in targets)
        if error <= GOAL:
            return None
        return (
            f"{text} is met within about ±{100 * error:.1f} % on new images: they differ in cost, and the curve is of "
            f"{images}; about {_round_up(self.needed(macs) or 0):,} would bring it to ±{100 * GOAL:g} %."
        )

    def _macs_of(self, budget: Budget, device: str) -> float:
        latency = self.latency
        assert budget.ms is not None
        if latency is None:
            raise UserError(
                f"budget: no milliseconds have been measured for {budget.text}; call model.calibrate(images, "
                f"budget={budget.text!r}) or adaptivit calibrate --budget {budget.text!r} on this device."
            )
        if latency.device != device:
            raise UserError(
                f"budget: milliseconds were measured on {latency.device} and do not hold on {device}; call "
                f"model.calibrate(images, budget={budget.text!r}) here."
            )
        points = latency.points
        if budget.ms < points[-1][1]:
            raise UserError(
                f"budget: {budget.text} is below the least that this model can do here, {points[-1][1]:.3g} ms for "
                f"{latency.images} on {latency.device}."
            )
        if budget.ms >= points[0][1]:
            return points[0][0]
        below = next(i for i, (_, ms) in enumerate(points) if ms <= budget.ms)
        (dear, slow), (cheap, fast) = points[below - 1], points[below]
        return cheap + (dear - cheap) * (budget.ms - fast) / (slow - fast)

    def to_config(self, budget: str | None) -> dict[str, Any]:
        return asdict(replace(self, budget=budget))

    @staticmethod
    def from_config(config: dict[str, Any]) -> Calibration:
        """The reverse; UserError where it is not what was written."""
        made: Calibration = convert("calibration", config, Calibration, strict=True)
        if any(a.macs <= b.macs for a, b in itertools.pairwise(made.points)):
            raise UserError("calibration: the curve does not fall.")
        return made


def falling(points: Sequence[Point], continuous: bool) -> tuple[Point, ...]:
    """Points in the order of the dial, from dear to cheap, as a curve that falls strictly.

    Of a dial with steps, those that cost no less than an earlier one are left out. Otherwise neighbours that rise share
    their mean (pool adjacent violators): how many tokens stay is no law of the position, only nearly one.
    """
    if not continuous:
        kept: list[Point] = []
        for p in points:
            if not kept or p.macs < kept[-1].macs:
                kept.append(p)
        return tuple(kept)
    pools: list[list[Point]] = []
    for p in points:
        pools.append([p])
        while len(pools) > 1 and _mean(pools[-2]).macs <= _mean(pools[-1]).macs:
            last = pools.pop()
            pools[-1] = pools[-1] + last
    return tuple(_mean(pool) for pool in pools)


def _mean(pool: Sequence[Point]) -> Point:
    if len(pool) == 1:
        return pool[0]
    knob, macs, live = (statistics.fmean(v) for v in zip(*((p.position, p.macs, p.live) for p in pool), strict=True))
    spreads = [p.spread for p in pool if p.spread is not None]
    return Point(knob, macs, live, statistics.fmean(spreads) if len(spreads) == len(pool) else None)


def _round_up(number: int) -> int:
    """To two digits: it is an estimate."""
    step: int = 10 ** max(0, len(str(number)) - 2)
    return -(-number // step) * step
