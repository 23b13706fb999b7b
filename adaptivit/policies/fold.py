"""fold (ours): merge low-attention, redundant patches into their nearest kept patch. Works without training.

Shapes: B images, N slots.

Between attention and MLP, with a_i the attention that patch i gets and d_i its distance (1 - cosine of head-mean keys)
from the most similar other patch:

    score_i = a_i d_i^power                     the patches with the lowest score leave
    merged row = mean of the rows that merge, weighted by size_i a_i^value; sizes add

Each leaving patch merges into the most similar one that stays, and attention is in proportion to size (ToMe). a_i comes
from the class token, which costs next to nothing (EViT's evidence), or is the mean over all queries (A-MoD's), which
takes the scores a second time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cost import CostModel, Shape
from ..decision import Merge
from ..errors import UserError
from ..kernels.merge_score import MergeScore
from .base import FIXED, Policy
from .common import check_blocks
from .records import FoldSettings

if TYPE_CHECKING:
    from .context import BlockContext


@dataclass
class State:
    counts: tuple[int, ...]  # patches that leave each block
    size: Tensor  # [B, N]


class Fold(Policy):
    def __init__(self, settings: FoldSettings, shape: Shape) -> None:
        super().__init__(settings, shape, replace(FIXED, pools_alive=True, dial="keep"))
        if settings.evidence == "class" and not shape.class_token:
            raise UserError("evidence: 'class' needs a class token, which this backbone lacks; use 'column'.")
        first = max(1, shape.layers // 4) if settings.first_block is None else settings.first_block
        blocks = tuple(range(first, shape.layers)) if settings.blocks is None else settings.blocks
        check_blocks("first_block" if settings.blocks is None else "blocks", blocks or (first,), 0, shape.layers)
        self.blocks = frozenset(blocks)
        column = settings.evidence == "column" or not shape.class_token
        self.look = "received" if column else "class_row"
        # an impossible budget is an error now; other image sizes are counted when they come
        self._known = {shape.tokens: self._counts(shape.tokens)}

    def at_position(self, position: float) -> Fold:
        other = super().at_position(position)
        assert isinstance(other, Fold)
        other.settings = replace(other.settings, budget=None)
        other._known = {self.shape.tokens: other._counts(self.shape.tokens)}
        return other

    def evidence(self, layer: int, aux: frozenset[str]) -> frozenset[str]:
        return frozenset({self.look, "similarity"}) if layer in self.blocks else frozenset()

    def init_state(self, ctx: BlockContext) -> State:
        size = torch.ones_like(ctx.present, dtype=torch.float32)
        tokens = ctx.present.shape[1]
        return State(self._known.get(tokens) or self._counts(tokens), size)

    def _counts(self, tokens: int) -> tuple[int, ...]:
        settings, shape = self.settings, self.shape
        if settings.budget is None:
            return patches_left(tokens - shape.num_prefix_tokens, self.blocks, shape.layers, settings.keep)
        return patches_within(shape, tokens, self.blocks, self.look, settings.budget)

    def between(self, ctx: BlockContext, state: State) -> Merge | None:
        patches, count = ctx.patches, state.counts[ctx.layer]
        if ctx.layer not in self.blocks or count == (state.counts[ctx.layer - 1] if ctx.layer else -1):
            return None
        similarity, settings = ctx.evidence["similarity"], self.settings
        cosine = similarity.nearest(patches)[0] if settings.power else None
        score = MergeScore(ctx.evidence[self.look], cosine, settings.power, settings.value)
        if "keep_scores" in ctx.aux:
            ctx.record_scores(score.numbers(state.size)[0], ctx.layer + 1)
        merged = similarity.assign(patches, state.size, score=score, count=count)
        state.size = merged.size
        return Merge(
            merged.target,
            merged.source_weight,
            merged.size,
            tokens_left=count + self.shape.num_prefix_tokens,
            left_counts=merged.left_counts,
        )


def patches_left(patches: int, blocks: frozenset[int], layers: int, keep: float) -> tuple[int, ...]:
    """[L] patches after each block where a share `keep` of them stays at every block of `blocks`, at least one."""
    left, exact = [], float(patches)
    for layer in range(layers):
        exact = exact * keep if layer in blocks else exact
        left.append(max(1, round(exact)))
    return tuple(left)


def macs(shape: Shape, tokens: int, blocks: frozenset[int], look: str, left: tuple[int, ...]) -> float:
    """What an image costs with so many patches after each block, evidence and similarity included."""
    costs = CostModel(shape, tokens)
    updated = torch.tensor([[float(n + shape.num_prefix_tokens)] for n in left], dtype=torch.float64)
    attended = torch.cat([updated.new_tensor([[float(tokens)]]), updated[:-1]])
    pooled = left[-1] + shape.num_prefix_tokens if shape.head_tokens == shape.tokens else tokens
    total = costs.embedding + costs.head_over(pooled) + float(costs.blocks(attended, updated))
    for layer in blocks:
        total += float(sum(costs.evidence(name, attended[layer]) for name in (look, "similarity")))
    return total


@lru_cache(maxsize=64)
def patches_within(shape: Shape, tokens: int, blocks: frozenset[int], look: str, budget: float) -> tuple[int, ...]:
    """The most patches whose cost is at most `budget` of static's, at one keep share for all blocks."""
    allowed = budget * CostModel(shape, tokens).static
    low, high = 0.0, 1.0
    for _ in range(40):
        keep = (low + high) / 2
        left = patches_left(tokens - shape.num_prefix_tokens, blocks, shape.layers, keep)
        low, high = (keep, high) if macs(shape, tokens, blocks, look, left) <= allowed else (low, keep)
    left = patches_left(tokens - shape.num_prefix_tokens, blocks, shape.layers, low)
    least = macs(shape, tokens, blocks, look, left)
    if least > allowed:
        raise UserError(f"budget: these blocks cannot cost less than {least / allowed * budget:.3f} of static's MACs.")
    return left
