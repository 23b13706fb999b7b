"""A batch in parts: every process has a share of it, and with --run.accumulate takes that in several steps.

A loss is that of the whole batch, however many parts it has; so are random draws (utils/batch_rng.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .losses import Sums


def rows(batch: int, part: int, parts: int, pairs: bool = False) -> list[int]:
    """Rows of the batch in this part; with `pairs`, rows i and B - 1 - i, which mixup mixes, are in the same part."""
    return [i for i in range(batch) if (min(i, batch - 1 - i) if pairs else i) % parts == part]


@dataclass(frozen=True)
class GlobalBatch:
    """Turns sums of a part into those of the whole batch, with the gradient of the part alone.

    Gradients of the parts are added up within a process and averaged over the processes (DDP and FSDP do so), hence
    the factor.
    """

    processes: int
    total: Mapping[str, Tensor] | None = None  # the sums of the whole batch, where they are known already
    images: Tensor | None = None  # [] B, where every loss is a mean over images: then a part gives its part of it
    weight: float = 1.0  # 0 for the stand-in of a part without images

    def __call__(self, own: Sums) -> Sums:
        own = {name: value * self.weight for name, value in own.items()}
        fixed: Mapping[str, Tensor]
        if self.images is not None:
            fixed = {name: torch.stack([value.detach()[0], self.images]) for name, value in own.items()}
        else:
            fixed = over_processes(own) if self.total is None else self.total
        return {name: fixed[name] + self.processes * (value - value.detach()) for name, value in own.items()}


@torch.no_grad()
def over_processes(sums: Sums) -> Sums:
    """The sums of all processes, without a gradient, in one message."""
    sizes = [value.numel() for value in sums.values()]
    joined = torch.cat([value.detach().flatten() for value in sums.values()])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(joined)
    parts = joined.split(sizes)
    return {name: part.view_as(value) for (name, value), part in zip(sums.items(), parts, strict=True)}
