"""Where the time of a pass goes, by the PyTorch profiler: attention, MLP, routing (what a policy decides), the rest."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from ..layouts import Layout
from .cpu import CpuExecutor
from .torch import Executor
from .triton import TritonExecutor

if TYPE_CHECKING:
    from ..model import AdaptiveViT

PARTS = ("attention", "MLP", "routing", "other")
_PASS = "pass"
_POLICY = ("before", "between", "after")


@dataclass(frozen=True)
class PartTimes:
    """Milliseconds a pass of each of PARTS, medians."""

    cpu: dict[str, float]
    device: dict[str, float]  # of its kernels; empty without a GPU


@torch.inference_mode()
def part_times(model: AdaptiveViT, images: Tensor, repeats: int = 5, warm_up: int = 2) -> PartTimes:
    """Profile a model in evaluation mode on a batch [B, C, H, W] that lies on its device."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * images.is_cuda
    for _ in range(warm_up):
        model(images)
    with _named(model), profile(activities=activities) as made:
        for _ in range(repeats):
            with record_function(_PASS):
                model(images)
        if images.is_cuda:
            torch.cuda.synchronize()
    events = [e for e in made.events() if e.name in (*PARTS, _PASS) and e.device_type.name == "CPU"]
    passes = [[e for e in events if _within(e, one)] for one in events if one.name == _PASS]

    def times(column: str) -> dict[str, float]:
        def middle(name: str) -> float:
            return statistics.median(sum(getattr(e, column) for e in one if e.name == name) / 1e3 for one in passes)

        each = {name: middle(name) for name in PARTS}
        return each | {"other": max(middle(_PASS) - sum(each.values()), 0.0)}

    return PartTimes(times("cpu_time_total"), times("device_time_total") if images.is_cuda else {})


def _within(event: Any, other: Any) -> bool:
    return bool(other.time_range.start <= event.time_range.start <= other.time_range.end)


@contextmanager
def _named(model: AdaptiveViT) -> Iterator[None]:
    """While open, parts of a pass have names for the profiler; a part within a part belongs to the outer one."""
    inside = False

    def under(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def named(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return call(*args, **kwargs)
            inside = True
            try:
                with record_function(name):
                    return call(*args, **kwargs)
            finally:
                inside = False

        return named

    places: list[tuple[Any, str, str]] = [(model.policy, name, "routing") for name in _POLICY]
    for kind in (Executor, CpuExecutor, TritonExecutor):
        places += [(kind, "attention", "attention"), (kind, "mlp", "MLP")]
    kinds = [Layout]
    for layout in kinds:
        kinds += layout.__subclasses__()
        places += [(layout, name, "routing") for name in ("apply", "unskip") if name in vars(layout)]
    with ExitStack() as stack:
        for owner, name, part in places:
            stack.enter_context(patch.object(owner, name, under(part, getattr(owner, name))))
        yield
