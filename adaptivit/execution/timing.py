"""Time of several models on one batch: they take turns, so that what else the machine does hits all alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..model import AdaptiveViT

ENOUGH = 2e-3  # seconds that one measurement should last
_MOST = 1000  # calls in one measurement


@dataclass(frozen=True)
class Timing:
    """Seconds a call in every turn of one contender, and the layout that ran."""

    seconds: tuple[float, ...]
    layout: str
    batch: int

    @property
    def images_per_second(self) -> float:
        return self.batch / statistics.median(self.seconds)

    def speed(self, reference: Timing) -> float:
        """How many times as fast as the reference: the median of the ratios within a turn."""
        return statistics.median(r / s for r, s in zip(reference.seconds, self.seconds, strict=True))

    def percentile(self, share: float) -> float:
        """Seconds a call that this share of the turns did not exceed, between neighbours by a straight line."""
        ordered = sorted(self.seconds)
        place = share * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        return low + (high - low) * (place - math.floor(place))


@torch.inference_mode()
def interleaved(
    contenders: Mapping[str, tuple[AdaptiveViT, str] | Callable[[Tensor], Any]],
    images: Tensor,
    repeats: int,
    *,
    warm_up: int = 1,
    inner: int | None = 1,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Timing]:
    """Each turn runs every contender once on the same batch; warm-up turns are not counted.

    A contender is a model and a layout, or anything that can be called with the batch. Models must be on the batch's
    device. The order changes from turn to turn. A measurement is `inner` calls in a row; None: so many that
    it lasts ENOUGH.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    layouts: dict[str, str] = {}
    training = {c[0]: c[0].training for c in contenders.values() if isinstance(c, tuple)}
    for model in training:
        model.eval()
    calls = {name: _call(contender) for name, contender in contenders.items()}
    counts = dict.fromkeys(names, 1 if inner is None else inner)
    for turn in range(-warm_up, repeats):
        if turn == 0 and inner is None:
            counts = {name: _count(call, images) for name, call in calls.items()}
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            spent, output = _timed(calls[name], images, counts[name])
            if turn >= 0:
                seconds[name].append(spent)
            layouts[name] = "" if isinstance(output, Tensor) else getattr(output, "layout", "")
            del output  # its memory is free for the next
        if progress is not None and turn >= 0:
            progress(turn + 1)
    for model, was in training.items():
        model.train(was)
    return {name: Timing(tuple(seconds[name]), layouts[name], len(images)) for name in names}


def _call(contender: tuple[AdaptiveViT, str] | Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    if not isinstance(contender, tuple):
        return contender
    model, layout = contender
    return lambda images: model(images, layout=layout)


def _count(call: Callable[[Tensor], Any], images: Tensor) -> int:
    """Calls that last ENOUGH together."""
    shortest = min(_timed(call, images, 1)[0] for _ in range(3))
    return min(_MOST, max(1, math.ceil(ENOUGH / max(shortest, 1e-9))))


def _timed(call: Callable[[Tensor], Any], images: Tensor, calls: int) -> tuple[float, Any]:
    """Seconds a call, of so many in a row, and what the last one returned. A GPU is timed by its own clock."""
    if images.device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(calls):
            output = call(images)
        return (time.perf_counter() - begun) / calls, output
    with torch.cuda.device(images.device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            output = call(images)
        end.record()
        torch.cuda.synchronize()  # a GPU works on after the call has returned
    return start.elapsed_time(end) / 1e3 / calls, output
