"""Find what each position of a policy's dial costs, on unlabelled images; see docs/calibrate.md.

A dial that fixes counts costs the same for every image, so one image tells all: the interval of positions is halved
where neighbours differ by more than half a token a block. A dial that shifts scores has no bounds: the interval is
doubled until almost nothing more changes, then halved on a few images down to COARSE, and the positions so found are
measured on all images.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cost import CostModel
from ..errors import UserError
from ..output import Output
from ..utils.hardware import device_name
from . import control
from . import curve as budgets
from .control import RunSetting, fixes_counts
from .curve import Budget, Calibration, Latency, Point, falling

if TYPE_CHECKING:
    from ..model import AdaptiveViT

COARSE = 0.045  # of static's MACs
MOST = 400  # positions
FEW = 32  # images that positions are looked for with
NEAR = 0.001  # of static's MACs: how closely a budget is met on the images of the curve
TOUCHES = 5  # tries at that
FAR = 2.0**14  # a shift that no score withstands
TIMES = 9  # positions whose time is measured

Progress = Callable[[int, int], None]


class Meter:
    """Mean cost and its spread over images at a position of the dial; `step` is told of every batch."""

    def __init__(self, model: AdaptiveViT, batches: Sequence[Tensor], step: Callable[[], None] | None = None) -> None:
        self.model, self.batches, self.step = model, batches, step

    @torch.inference_mode()
    def __call__(self, position: float | None) -> Point:
        macs, live = [], []
        weight, run = next(self.model.parameters()), _at(self.model, position)
        for batch in self.batches:
            output = run(batch.to(weight.device, weight.dtype))
            macs += output.macs_deployed.tolist()
            live += output.trace.live.double().mean(0).tolist()
            if self.step is not None:
                self.step()
        spread = statistics.stdev(macs) if len(macs) > 1 else None
        return Point(position or 0.0, statistics.fmean(macs), statistics.fmean(live), spread)


def calibrate(
    model: AdaptiveViT,
    images: Tensor | Sequence[Tensor],
    budget: str | float | None = None,
    batch_size: int = 32,
    latency_batch: int | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """model.calibrate: `progress` is called with batches done and in all, as far as known."""
    wanted = None if budget is None else budgets.parse(budget)
    _check(model, wanted, latency_batch)
    batches = _batches(model, images, batch_size)
    count = sum(map(len, batches))
    training = model.training
    model.eval()
    try:
        static = static_macs(model)
        points = _steps(model, batches) if fixes_counts(model.policy) else _slope(model, batches, static, progress)
        continuous = not fixes_counts(model.policy)
        made = Calibration(
            dial=model.policy.dial or "",
            continuous=continuous,
            tokens=model.shape.tokens,
            static=static,
            images=count,
            points=falling(points, continuous),
            settings=Meter(model, batches if continuous else [batches[0][:1]])(None),
        )
        if continuous and wanted is not None and wanted.ms is None and not wanted.free:
            made = _touched_up(model, made, wanted, batches)
        if latency_batch is not None or (wanted is not None and wanted.ms is not None):
            made = _timed(model, made, batches, latency_batch or 1)
    finally:
        model.train(training)
    model.calibration = made  # kept where the budget turns out to be impossible: another one needs no data
    model.budget = None
    model._turned.clear()
    model.budget = budget
    return made


def static_macs(model: AdaptiveViT) -> float:
    return CostModel(model.whole or model.shape, model.shape.tokens).static


def _check(model: AdaptiveViT, wanted: Budget | None, latency_batch: int | None) -> None:
    if model.policy.dial is None:
        raise UserError(f"calibrate: the policy {model.policy_name!r} has no dial that a budget could turn.")
    if latency_batch is not None and latency_batch < 1:
        raise UserError(f"latency_batch: expected at least 1 image, got {latency_batch}.")
    if wanted is not None and wanted.macs is not None and wanted.macs > static_macs(model):
        raise UserError(f"budget: {wanted.text} is above the static model's {budgets.gmacs(static_macs(model))}.")


def _batches(model: AdaptiveViT, images: Tensor | Sequence[Tensor], batch_size: int) -> list[Tensor]:
    given = [images] if isinstance(images, Tensor) else list(images)
    if not given:
        raise UserError("calibrate: expected images, got none.")
    for batch in given:
        model._check(batch.to(next(model.parameters()).dtype) if isinstance(batch, Tensor) else batch)
        if tuple(batch.shape[2:]) != tuple(model.backbone.image_size):
            raise UserError(f"calibrate: expected images of {model.backbone.image_size} px.")
    return [part for batch in given for part in batch.split(batch_size)]


# -- the curve -------------------------------------------------------------------------------------------------------
def _steps(model: AdaptiveViT, batches: Sequence[Tensor]) -> list[Point]:
    """Every step of a dial that fixes counts, from dear to cheap."""
    meter = Meter(model, [batches[0][:1]])
    dear, cheap = model.policy.positions()
    if model.policy.dial == "depth":  # whole blocks
        return [meter(float(depth)) for depth in range(int(dear), int(cheap) - 1, -1)]
    return _halved(meter, [meter(dear), meter(cheap)], lambda a, b: a.live - b.live > 0.5, abs(dear - cheap) / 1024)


def _slope(model: AdaptiveViT, batches: Sequence[Tensor], static: float, progress: Progress | None) -> list[Point]:
    """The curve of a shift, from dear to cheap."""
    few = _first(batches, FEW)
    done, total = 0, 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, max(total, done))

    pilot = Meter(model, few, step)
    total = 25 * len(few) + 22 * len(batches)
    ends = []
    for sign in (-1.0, 1.0):
        far, near = pilot(sign * FAR), 1.0
        while near < FAR and abs(pilot(sign * near).macs - far.macs) > COARSE / 4 * static:
            near *= 2
        ends.append(sign * near)
    found = _halved(pilot, [pilot(end) for end in ends], lambda a, b: a.macs - b.macs > COARSE * static, 1e-4)
    positions = [p.position for p in found]
    total = done + len(positions) * len(batches)
    meter = Meter(model, batches, step)
    return _halved(meter, [meter(p) for p in positions], lambda a, b: a.macs - b.macs > 1.3 * COARSE * static, 1e-4)


def _first(batches: Sequence[Tensor], count: int) -> list[Tensor]:
    """At most `count` images, evenly out of all."""
    joined = torch.cat([b[:: math.ceil(sum(map(len, batches)) / count)] for b in batches])
    return list(joined[:count].split(len(batches[0])))


def _halved(meter: Meter, points: list[Point], wide: Callable[[Point, Point], bool], nearest: float) -> list[Point]:
    """More positions between neighbours that are `wide` apart and not yet `nearest`, the widest gap first."""
    while len(points) < MOST:
        gaps = [
            (abs(a.macs - b.macs), i)
            for i, (a, b) in enumerate(itertools.pairwise(points))
            if wide(a, b) and abs(a.position - b.position) > nearest
        ]
        if not gaps:
            break
        _, i = max(gaps)
        points.insert(i + 1, meter((points[i].position + points[i + 1].position) / 2))
    return points


def _touched_up(model: AdaptiveViT, made: Calibration, wanted: Budget, batches: Sequence[Tensor]) -> Calibration:
    """The curve with points where the budget is, until one comes NEAR enough."""
    for _ in range(TOUCHES):
        position = made.position_for(wanted, "")
        if position is None or any(p.position == position for p in made.points):
            break
        point = Meter(model, batches)(position)
        made = replace(made, points=falling(sorted([*made.points, point], key=lambda p: p.position), True))
        if abs(point.macs - made.wanted(wanted, "")) < NEAR * made.static:
            break
    return made


# -- images that it has not seen --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Check:
    """A budget, and what it comes to."""

    budget: str
    position: float
    wanted: float  # MACs
    point: Point  # on images that the curve has not seen

    @property
    def error(self) -> float:
        return self.point.macs / self.wanted - 1


def check(
    model: AdaptiveViT,
    images: Tensor | Sequence[Tensor],
    asked: Sequence[str],
    batch_size: int = 32,
    progress: Progress | None = None,
) -> list[Check]:
    """What these budgets cost in the mean over images [n, C, H, W] (or batches of them)."""
    curve, device = control.curve(model, "check"), device_name(next(model.parameters()).device)
    wanted = [budgets.parse(one) for one in asked]
    targets = [(one.text, curve.position_for(one, device), curve.wanted(one, device)) for one in wanted if not one.free]
    batches = _batches(model, images, batch_size)
    meter = Meter(model, batches, None if progress is None else _counted(progress, len(targets) * len(batches)))
    training = model.training
    model.eval()
    found = [Check(text, position, macs, meter(position)) for text, position, macs in targets if position is not None]
    model.train(training)
    return found


def _counted(progress: Progress, total: int) -> Callable[[], None]:
    done = itertools.count(1)
    return lambda: progress(next(done), total)


# -- milliseconds ----------------------------------------------------------------------------------------------------
def _timed(model: AdaptiveViT, made: Calibration, batches: Sequence[Tensor], batch: int) -> Calibration:
    """The curve with the time of a batch at some of its points, measured in turns on the model's device."""
    from ..evaluation.timing import interleaved

    weight = next(model.parameters())
    images = torch.cat([b[:batch] for b in batches[: max(1, batch)]])
    images = images.repeat(math.ceil(batch / len(images)), 1, 1, 1)[:batch].to(weight.device, weight.dtype)
    chosen = _spread(made.points, TIMES)
    runs = {str(p.position): _at(model, p.position) for p in chosen}
    timings = interleaved(runs, images, 15, warm_up=2, inner=None)
    took = [1e3 * statistics.median(timings[str(p.position)].seconds) for p in chosen]
    # time falls with work in truth: pooled, where noise says otherwise
    pooled = falling([Point(p.macs, ms, 0.0) for p, ms in zip(chosen, took, strict=True)], True)
    layout = next(iter(timings.values())).layout
    latency = Latency(
        device_name(weight.device),
        batch,
        layout,
        str(weight.dtype).removeprefix("torch."),
        tuple((p.position, p.macs) for p in pooled),
    )
    return replace(made, latency=latency)


def _spread(points: Sequence[Point], count: int) -> list[Point]:
    """So many points evenly spread over their MACs, ends included."""
    top, least = points[0].macs, points[-1].macs
    goals = [top + (least - top) * i / (count - 1) for i in range(count)]
    return list(dict.fromkeys(min(points, key=lambda p: abs(p.macs - goal)) for goal in goals))


def _at(model: AdaptiveViT, position: float | None) -> Callable[[Tensor], Output]:
    """The model at one position of its dial; None: as its settings say."""
    counts = fixes_counts(model.policy)
    policy = model.policy.turned(position) if counts and position is not None else model.policy

    def run(images: Tensor) -> Output:
        turn = RunSetting(policy)
        if position is not None and not counts:
            turn = RunSetting(policy, shift=torch.full((len(images),), position, device=images.device))
        return model._run(model._choose("auto", images.device), images, turn=turn)

    return run
