"""Shared by several methods: checks of block numbers, the best k tokens of every image, merging.

Shapes: B images, N slots.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ..decision import Merge
from ..errors import UserError
from ..kernels import merge
from ..kernels.topk import topk
from ..layouts import Similarity

__all__ = ["check_blocks", "join", "merge_leaving", "thirds", "topk"]


def check_blocks(name: str, blocks: Iterable[int], low: int, layers: int) -> None:
    bad = [b for b in blocks if not low <= b < layers]
    if bad and low >= layers:
        raise UserError(f"{name}: expected nothing, since there is no block for it, got {bad[0]}.")
    if bad:
        raise UserError(f"{name}: expected block numbers in {low}..{layers - 1}, got {bad[0]}.")


def thirds(layers: int) -> tuple[int, ...]:
    """A quarter, half and three quarters of the depth: blocks 3, 6, 9 of 12, where the papers prune."""
    return tuple(sorted({max(1, layers * q // 4) for q in (1, 2, 3)}))


def join(into: Tensor, size: Tensor, present: Tensor, merge_weight: Tensor | None = None) -> Merge:
    """Merge every token into slot `into` [B, N] (-1: none): rows become means and sizes add.

    The means are weighted by `merge_weight` [B, N], by default the sizes.
    """
    scale, size = merge.mean_weights(into, size, present, merge_weight)
    return Merge(into, scale, size)


def merge_leaving(
    leaving: Tensor, patches: Tensor, size: Tensor, similarity: Similarity, merge_weight: Tensor | None = None
) -> Merge:
    """Merge every leaving patch into the most similar one that stays; `size` [B, N] are the sizes so far.

    Tokens without a target leave and contribute nothing. `merge_weight` as in join.
    """
    met = similarity.assign(patches, size, merge_weight, leaving=leaving)
    return Merge(met.target, met.source_weight, met.size, left_counts=met.left_counts)
