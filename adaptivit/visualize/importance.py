"""Do the scores find the patches that matter? Correlation with leave-one-out importance (A-MoD, Sec. 4 and Fig. 4).

Shapes: B images, P patches, S places where patches were scored, T patches that are left out at each.

The importance of a patch at a block is the change of the loss of the static transformer, in which every token goes
through every block, when that patch is left out from that block on. The same measure serves every policy: none of its
own decisions is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..model import AdaptiveViT
from .collect import Array, Progress, Seen
from .statistics import correlations, p_value


@dataclass(frozen=True)
class Importance:
    """Correlations by scored block and image; NaN where one side does not vary."""

    blocks: list[int]  # [S] counted from 0: the patch is left out from this block on
    pearson: Array  # [S, B] positive: what matters is what stays
    spearman: Array  # [S, B]
    images: list[int]  # [B] indices into Seen
    chosen: Array  # [S, B, T] patches, -1 where fewer were scored
    change: Array  # [S, B, T] of the loss, NaN there
    tokens: int  # T

    def p_values(self, correlation: Array) -> Array:
        """[S, B] of `pearson` or `spearman`: two-sided p, were scores and importance unrelated."""
        return np.vectorize(p_value, otypes=[float])(correlation, (self.chosen >= 0).sum(-1))


@torch.inference_mode()
def leave_one_out(
    model: AdaptiveViT,
    seen: Seen,
    *,
    tokens: int = 24,
    images: Sequence[int] | int = 8,
    seed: int = 0,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> Importance:
    """Leave out up to `tokens` random patches, one at a time, at every scored block of some images.

    images: their indices, or the first so many. The loss is the cross-entropy of the label; without labels that of the
    class that the static transformer predicts.
    """
    if seen.scores is None:
        raise UserError(f"{seen.policy} gives patches no scores that could be compared with their importance.")
    if tokens < 3:
        raise UserError(f"tokens: a correlation takes at least 3 patches, got {tokens}.")
    scores, random = seen.scores, np.random.default_rng(seed)
    which = list(range(min(images, len(seen)))) if isinstance(images, int) else list(images)
    tokens = min(tokens, seen.attended.shape[-1])
    places = (len(scores.blocks), len(which))
    chosen, change = np.full((*places, tokens), -1), np.full((*places, tokens), np.nan)
    pearson, spearman = np.full(places, np.nan), np.full(places, np.nan)
    for b, i in enumerate(which):
        rows = _rows(model, seen.tensor(i))
        whole = logits_of(model, rows[-1])
        target = whole.argmax(-1) if seen.labels is None else torch.tensor(seen.labels[i : i + 1], device=whole.device)
        base = float(F.cross_entropy(whole, target))
        for s, block in enumerate(scores.blocks):
            picked = np.sort(random.permutation(np.flatnonzero(np.isfinite(scores.values[s, i])))[:tokens])
            if count := len(picked):
                parts = np.array_split(picked, -(-count // batch_size))
                losses = [_without(model, rows[block], part + seen.prefix, block, target) for part in parts]
                keep = scores.values[s, i, picked] * (-1 if scores.stops else 1)
                chosen[s, b, :count] = picked
                change[s, b, :count] = torch.cat(losses).cpu().numpy() - base
                pearson[s, b], spearman[s, b] = correlations(keep, change[s, b, :count])
            if progress:
                progress(b * places[0] + s + 1, places[0] * places[1])
    return Importance(scores.blocks, pearson, spearman, which, chosen, change, tokens)


def _rows(model: AdaptiveViT, image: Tensor) -> list[Tensor]:
    """[1, N, D] before every block and after the last, with every token in every block."""
    first = next(model.parameters())
    rows = model.backbone.embed(image[None].to(first.device, first.dtype))
    return list(accumulate(model.backbone.blocks, lambda rows, block: block(rows), initial=rows))


def _without(model: AdaptiveViT, rows: Tensor, left: Array, block: int, target: Tensor) -> Tensor:
    """[T] losses, each with one slot of `left` missing from the rows [1, N, D] that enter `block`."""
    slots = torch.arange(rows.shape[1])
    others = torch.stack([slots[slots != int(i)] for i in left]).to(rows.device)  # [T, N - 1]
    rows = rows[0][others]
    for later in model.backbone.blocks[block:]:
        rows = later(rows)
    return F.cross_entropy(logits_of(model, rows), target.expand(len(left)), reduction="none")


def logits_of(model: AdaptiveViT, rows: Tensor) -> Tensor:
    shape = model.shape
    read = rows[:, : shape.head_tokens] if shape.head_tokens < shape.tokens else rows
    return model.backbone.head(read)[1].float()
