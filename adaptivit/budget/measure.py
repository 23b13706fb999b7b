"""Measure what each position of a policy's dial costs, on unlabelled images.

A dial that fixes counts costs the same for every image, so one image is enough: the interval of positions is halved
where neighbours differ by more than 2 % of the tokens, around the budget and every tenth by more than half a token. A
dial that shifts scores has no bounds: the interval is doubled until almost nothing more changes, then halved on a few
images down to COARSE, and the positions so found are measured on all images.
"""

from __future__ import annotations

import functools
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
from ..execution.timing import interleaved
from ..output import Output
from ..utils.hardware import device_name
from .curve import Budget, Calibration, Latency, Point, falling, gmacs, parse

if TYPE_CHECKING:
    from ..model import AdaptiveViT

COARSE = 0.045  # of static's MACs
MOST = 400  # positions
APART = 0.02  # of the tokens: two steps of a dial that fixes counts
FEW = 32  # images for the search of positions
NEAR = 0.001  # of static's MACs: how closely a budget is met on the images of the curve
TRIES = 5  # at that
FAR = 2.0**14  # a shift that no score withstands
TIMES = 9  # positions whose time is measured

Progress = Callable[[int, int], None]


class Meter:
    """Mean cost and its spread over images at a position of the dial; `step` is called after every batch."""

    def __init__(self, model: AdaptiveViT, batches: Sequence[Tensor], step: Callable[[], None] | None = None) -> None:
        self.model, self.batches, self.step = model, batches, step

    @torch.inference_mode()
    def __call__(self, position: float | None) -> Point:
        macs, live = [], []
        weight = next(self.model.parameters())
        for batch in self.batches:
            output = _run(self.model, position, batch.to(weight.device, weight.dtype))
            macs += output.macs_deployed.tolist()
            live += output.trace.live.double().mean(0).tolist()
            if self.step is not None:
                self.step()
        spread = statistics.stdev(macs) if len(macs) > 1 else None
        return Point(position or 0.0, statistics.fmean(macs), statistics.fmean(live), spread)


def _run(model: AdaptiveViT, position: float | None, images: Tensor) -> Output:
    """A pass at one position of the dial; None: as the policy's settings say."""
    setting = model.budget_state.setting_at(position, images)
    return model.run(model.choose("auto", images.device), images, setting=setting)


def calibrate(
    model: AdaptiveViT,
    images: Tensor | Sequence[Tensor],
    budget: str | float | None = None,
    batch_size: int = 32,
    latency_batch: int | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """model.calibrate: `progress` is called with batches done and in all, as far as known."""
    wanted = None if budget is None else parse(budget)
    traits, static = model.policy.traits, static_macs(model)
    if traits.dial is None:
        raise UserError(f"calibrate: the policy {model.policy_name!r} has no dial that a budget could turn.")
    if latency_batch is not None and latency_batch < 1:
        raise UserError(f"latency_batch: expected at least 1 image, got {latency_batch}.")
    if wanted is not None and wanted.macs is not None and wanted.macs > static:
        raise UserError(f"budget: {wanted.text} is above the static model's {gmacs(static)}.")
    batches = _batches(model, images, batch_size)
    continuous = not traits.dial_fixes_counts
    training = model.training
    model.eval()
    try:
        points = (
            _shifts(model, batches, static, progress)
            if continuous
            else _steps(model, batches, static, wanted, progress)
        )
        curve = Calibration(
            dial=traits.dial,
            continuous=continuous,
            tokens=model.shape.tokens,
            static=static,
            images=sum(map(len, batches)),
            points=falling(points, continuous),
            settings=Meter(model, batches if continuous else [batches[0][:1]])(None),
        )
        if continuous and wanted is not None and wanted.ms is None and not wanted.free:
            curve = _refined(model, curve, wanted, batches)
        if latency_batch is not None or (wanted is not None and wanted.ms is not None):
            curve = _timed(model, curve, batches, latency_batch or 1)
    finally:
        model.train(training)
    model.budget_state.calibrated(curve, budget)
    return curve


def static_macs(model: AdaptiveViT) -> float:
    return CostModel(model.whole or model.shape, model.shape.tokens).static


def _batches(model: AdaptiveViT, images: Tensor | Sequence[Tensor], batch_size: int) -> list[Tensor]:
    given = [images] if isinstance(images, Tensor) else list(images)
    if not given:
        raise UserError("calibrate: expected images, got none.")
    for batch in given:
        model.check_images(batch.to(next(model.parameters()).dtype) if isinstance(batch, Tensor) else batch)
        if tuple(batch.shape[2:]) != tuple(model.backbone.image_size):
            raise UserError(f"calibrate: expected images of {model.backbone.image_size} px.")
    return [part for batch in given for part in batch.split(batch_size)]


# -- the curve -------------------------------------------------------------------------------------------------------
class _Counter:
    """Tells of passes done, and of all as far as known."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress, self.done, self.total = progress, 0, 0

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, max(self.total, self.done))


def _steps(
    model: AdaptiveViT, batches: Sequence[Tensor], static: float, wanted: Budget | None, progress: Progress | None
) -> list[Point]:
    """Steps of a dial that fixes counts, from dear to cheap: of a token around the budget and every tenth."""
    step = _Counter(progress)
    meter = Meter(model, [batches[0][:1]], step)
    dear, cheap = model.policy.positions()
    if model.policy.traits.dial == "depth":  # whole blocks
        step.total = int(dear - cheap) + 1
        return [meter(float(depth)) for depth in range(int(dear), int(cheap) - 1, -1)]
    goals = [static * tenth / 10 for tenth in range(1, 10)]
    if wanted is not None and wanted.ms is None and not wanted.free:
        goals.append(wanted.macs or (wanted.share or 0.0) * static)
    apart = max(0.5, APART * model.shape.tokens)
    step.total = min(MOST, round(2.5 / APART))

    def wide(a: Point, b: Point) -> bool:
        gap = a.live - b.live
        return gap > apart or (gap > 0.5 and any(b.macs < goal < a.macs for goal in goals))

    return _halved(meter, [meter(dear), meter(cheap)], wide, abs(dear - cheap) / 1024)


def _shifts(model: AdaptiveViT, batches: Sequence[Tensor], static: float, progress: Progress | None) -> list[Point]:
    """The curve of a shift, from dear to cheap."""
    few, step = _first(batches, FEW), _Counter(progress)
    pilot = Meter(model, few, step)
    step.total = 25 * len(few) + 22 * len(batches)
    ends = []
    for sign in (-1.0, 1.0):
        far, near = pilot(sign * FAR), 1.0
        while near < FAR and abs(pilot(sign * near).macs - far.macs) > COARSE / 4 * static:
            near *= 2
        ends.append(sign * near)
    found = _halved(pilot, [pilot(end) for end in ends], lambda a, b: a.macs - b.macs > COARSE * static, 1e-4)
    positions = [p.position for p in found]
    step.total = step.done + len(positions) * len(batches)
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


def _refined(model: AdaptiveViT, curve: Calibration, wanted: Budget, batches: Sequence[Tensor]) -> Calibration:
    """The curve with points where the budget is, until one comes NEAR enough."""
    for _ in range(TRIES):
        position = curve.position_for(wanted, "")
        if position is None or any(p.position == position for p in curve.points):
            break
        point = Meter(model, batches)(position)
        curve = replace(curve, points=falling(sorted([*curve.points, point], key=lambda p: p.position), True))
        if abs(point.macs - curve.wanted(wanted, "")) < NEAR * curve.static:
            break
    return curve


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
    curve, device = model.budget_state.curve("check"), device_name(next(model.parameters()).device)
    targets = [(one.text, curve.wanted(one, device)) for one in map(parse, asked) if not one.free]
    batches, done = _batches(model, images, batch_size), itertools.count(1)
    total = len(targets) * len(batches)
    meter = Meter(model, batches, None if progress is None else lambda: progress(next(done), total))
    training = model.training
    model.eval()
    found = [Check(text, at, macs, meter(at)) for text, macs in targets for at in [curve.at(macs, text)]]
    model.train(training)
    return found


# -- milliseconds ----------------------------------------------------------------------------------------------------
def _timed(model: AdaptiveViT, curve: Calibration, batches: Sequence[Tensor], batch: int) -> Calibration:
    """The curve with the time of a batch at some of its points, measured in turns on the model's device."""
    weight = next(model.parameters())
    images = torch.cat([b[:batch] for b in batches[: max(1, batch)]])
    images = images.repeat(math.ceil(batch / len(images)), 1, 1, 1)[:batch].to(weight.device, weight.dtype)
    chosen = _spread(curve.points, TIMES)
    runs = {str(p.position): functools.partial(_run, model, p.position) for p in chosen}
    timings = interleaved(runs, images, 15, warm_up=2, inner=None)
    took = [1e3 * statistics.median(timings[str(p.position)].seconds) for p in chosen]
    # time falls with work in truth: pooled, where noise says otherwise
    pooled = falling([Point(p.macs, ms, 0.0) for p, ms in zip(chosen, took, strict=True)], True)
    layout, dtype = next(iter(timings.values())).layout, str(weight.dtype).removeprefix("torch.")
    points = tuple((p.position, p.macs) for p in pooled)
    return replace(curve, latency=Latency(device_name(weight.device), batch, layout, dtype, points))


def _spread(points: Sequence[Point], count: int) -> list[Point]:
    """So many points evenly spread over their MACs, ends included."""
    top, least = points[0].macs, points[-1].macs
    goals = [top + (least - top) * i / (count - 1) for i in range(count)]
    return list(dict.fromkeys(min(points, key=lambda p: abs(p.macs - goal)) for goal in goals))
