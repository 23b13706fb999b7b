"""What several methods share: the best k tokens of every image, and leaving by folding.

Shapes: B images, N slots.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..decision import Merge
from ..errors import UserError
from ..layouts import Similarity


def top(score: Tensor, among: Tensor, count: int) -> Tensor:
    """[B, N] bool: in every image the `count` tokens of `among` [B, N] with the highest score."""
    chosen = score.masked_fill(~among, float("-inf")).topk(count, dim=-1).indices
    return torch.zeros_like(among).scatter(1, chosen, True) & among


def check_blocks(name: str, blocks: Iterable[int], low: int, layers: int) -> None:
    bad = [b for b in blocks if not low <= b < layers]
    if bad:
        raise UserError(f"{name}: expected block numbers in {low}..{layers - 1}, got {bad[0]}.")


def thirds(layers: int) -> tuple[int, ...]:
    """A quarter, half and three quarters of the depth: blocks 3, 6, 9 of 12, where the papers prune."""
    return tuple(sorted({max(1, layers * q // 4) for q in (1, 2, 3)}))


def join(into: Tensor, size: Tensor, present: Tensor) -> Merge:
    """Tokens meet where `into` [B, N] says (-1: nowhere): rows become size-weighted means and sizes add."""
    goes = into.clamp_min(0)
    brought = torch.where((into < 0) | ~present, torch.zeros_like(size), size)
    total = torch.zeros_like(size).scatter_add(1, goes, brought)
    scale = brought / total.gather(1, goes).clamp_min(1e-6)
    stays = into == torch.arange(size.shape[1], device=size.device)
    return Merge(into, scale, torch.where(stays & present, total, size))


def fold(leaving: Tensor, targets: Tensor, size: Tensor, similarity: Similarity) -> Merge:
    """Every leaving token joins its most similar target, [B, N] each; `size` are the sizes so far.

    A token that finds no target leaves and joins nobody.
    """
    _, nearest = similarity.nearest(targets & ~leaving)
    slot = torch.arange(size.shape[1], device=size.device).expand_as(leaving)
    return join(torch.where(leaving, nearest, slot), size, similarity.here)
