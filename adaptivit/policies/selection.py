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
    """[B, N] bool: in every image the `count` tokens of `among` [B, N] with the highest score; of equals the first."""
    score = score.masked_fill(~among, float("-inf"))
    chosen = score.argsort(dim=-1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(among).scatter(1, chosen, True) & among


def check_blocks(name: str, blocks: Iterable[int], low: int, layers: int) -> None:
    bad = [b for b in blocks if not low <= b < layers]
    if bad:
        raise UserError(f"{name}: expected block numbers in {low}..{layers - 1}, got {bad[0]}.")


def thirds(layers: int) -> tuple[int, ...]:
    """A quarter, half and three quarters of the depth: blocks 3, 6, 9 of 12, where the papers prune."""
    return tuple(sorted({max(1, layers * q // 4) for q in (1, 2, 3)}))


def join(into: Tensor, size: Tensor, present: Tensor, say: Tensor | None = None) -> Merge:
    """Tokens meet where `into` [B, N] says (-1: nowhere): rows become means and sizes add.

    The means are weighted by `say` [B, N], by default the sizes.
    """
    goes = into.clamp_min(0)
    nobody = (into < 0) | ~present
    brought, part = (t.masked_fill(nobody, 0.0) for t in (size, size if say is None else say))
    total, whole = (torch.zeros_like(t).scatter_add(1, goes, t) for t in (brought, part))
    scale = part / whole.gather(1, goes).clamp_min(1e-12)
    stays = into == torch.arange(size.shape[1], device=size.device)
    return Merge(into, scale, torch.where(stays & present, total, size))


def fold(leaving: Tensor, patches: Tensor, size: Tensor, similarity: Similarity, say: Tensor | None = None) -> Merge:
    """Every leaving patch joins the most similar one that stays; `size` [B, N] are the sizes so far, `say` as in join.

    Whoever is no patch, or finds none that stays, leaves and joins nobody.
    """
    return join(similarity.joins(leaving, patches), size, similarity.here, say)
