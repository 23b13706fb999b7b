"""Time of several models on one batch: they take turns, so that what else the machine does hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import AdaptiveViT


@dataclass(frozen=True)
class Timing:
    """Seconds of every turn of one model, and the layout that ran."""

    seconds: tuple[float, ...]
    layout: str
    batch: int

    @property
    def images_per_second(self) -> float:
        return self.batch / statistics.median(self.seconds)

    def speed(self, reference: Timing) -> float:
        """How many times as fast as the reference: the median of the ratios within a turn."""
        return statistics.median(r / s for r, s in zip(reference.seconds, self.seconds, strict=True))


@torch.inference_mode()
def interleaved(
    contenders: Mapping[str, tuple[AdaptiveViT, str]],
    images: Tensor,
    repeats: int,
    *,
    warm_up: int = 1,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Timing]:
    """Each turn runs every contender (a model and a layout) once on the same batch; warm-up turns are not counted.

    The models must be on the batch's device. Whoever comes first changes from turn to turn.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    layouts: dict[str, str] = {}
    training = {model: model.training for model, _ in contenders.values()}
    for model in training:
        model.eval()
    for turn in range(-warm_up, repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            model, layout = contenders[name]
            _wait(images)
            start = time.perf_counter()
            output = model(images, layout=layout)
            _wait(images)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
            layouts[name] = output.layout
        if progress is not None and turn >= 0:
            progress(turn + 1)
    for model, was in training.items():
        model.train(was)
    return {name: Timing(tuple(seconds[name]), layouts[name], len(images)) for name in names}


def _wait(images: Tensor) -> None:
    """A GPU works on after the call has returned."""
    if images.device.type == "cuda":
        torch.cuda.synchronize(images.device)
