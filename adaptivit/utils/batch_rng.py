"""Random numbers of a forward pass over a part of a batch: those that the whole batch would draw.

Every part draws for all B images from the same seed and takes its own rows, so drop path and Gumbel noise follow from
the seed, the step and the image's place in the batch, not from the number of processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchSlice:
    """Where the images of a pass are in the whole batch."""

    rows: Tensor  # [b] of these images in the whole batch
    of: int  # B


_slice: BatchSlice | None = None  # None: the batch is whole


@contextlib.contextmanager
def drawing(rows: BatchSlice | None, seed: int) -> Iterator[None]:
    """Draws inside follow from the seed, for these rows of a batch."""
    global _slice
    before, _slice = _slice, rows
    torch.manual_seed(seed)
    try:
        yield
    finally:
        _slice = before


def draw(images: int, random: Callable[[int], Tensor]) -> Tensor:
    """random(B), one row an image, for the images of the pass."""
    return random(images) if _slice is None else random(_slice.of)[_slice.rows]
