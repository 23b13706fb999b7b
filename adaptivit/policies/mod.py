"""MoD: a router sends the best tokens through a block, the others skip it (Raposo et al.; A-MoD Sec. 3, Eq. 1).

Shapes: B images, N slots, D width.

    r_i = x_i . W_l                                            one linear router a routed block, no bias
    x_i + r_i (Block(X_selected)_i - x_i)   for the k = ceil(C N) tokens with the highest r, x_i for the others

The class token (and every other prefix token) always takes one of the k places. Skipped tokens are back in the next
block.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..cost import Shape
from ..decision import Skip
from .base import FIXED, Policy
from .common import check_blocks, topk
from .records import MoDSettings

if TYPE_CHECKING:
    from .context import BlockContext


ROUTING = replace(FIXED, dial="capacity")


def routed_blocks(blocks: tuple[int, ...] | None, first: int, layers: int) -> tuple[int, ...]:
    """Every second block from `first` on, or those that were named."""
    chosen = tuple(range(first, layers, 2)) if blocks is None else blocks
    check_blocks("first_block" if blocks is None else "blocks", chosen or (first,), 0, layers)
    return chosen


def skip(score: Tensor, ctx: BlockContext, capacity: float, gate: Tensor | None = None) -> Skip:
    """The answer of a routed block: the ceil(C N) best take part, prefix tokens first."""
    prefix, slots = ctx.shape.num_prefix_tokens, ctx.present.shape[1]
    count = max(math.ceil(capacity * slots), prefix)
    return Skip(topk(score, ctx.patches, count - prefix, rest=True), gate=gate, tokens_left=count)


class MoD(Policy):
    def __init__(self, settings: MoDSettings, shape: Shape) -> None:
        super().__init__(settings, shape, ROUTING)
        blocks = routed_blocks(settings.blocks, settings.first_block, shape.layers)
        self.routers = nn.ModuleDict({str(b): self._router(shape.dim) for b in blocks})

    def _router(self, dim: int) -> nn.Module:
        last = nn.Linear(dim, 1, bias=False)
        nn.init.trunc_normal_(last.weight, std=0.02)
        if self.settings.router == "linear":
            return last
        return nn.Sequential(nn.Linear(dim, dim), nn.GELU(), last)

    def before(self, ctx: BlockContext, state: None) -> Skip | None:
        if str(ctx.layer) not in self.routers:
            return None
        score = ctx.apply(self.routers[str(ctx.layer)])[..., 0].float()
        ctx.record_scores(score, ctx.layer)
        gate = {"raw": score, "sigmoid": torch.sigmoid(score), "none": None}[self.settings.gate]
        return skip(score.detach(), ctx, self.settings.capacity, gate)
