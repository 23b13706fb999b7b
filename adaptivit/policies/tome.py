"""ToMe: in every block the r most similar pairs of tokens merge (Bolya et al., ICLR 2023). Works without training.

Shapes: B images, n tokens left in each, d head width.

Between attention and MLP: metric = keys, mean over heads, unit length. Tokens stand in a row; A = even positions,
B = odd ones. Each A finds its most similar B; the r A's most similar to theirs merge into them, as size-weighted
means, and sizes add. Attention then adds log(size) to key logits (proportional attention). Prefix tokens take no part.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cost import Shape
from ..decision import Merge
from ..errors import UserError
from ..kernels.bipartite_match import bipartite_match
from .base import FIXED, Policy
from .common import join
from .records import ToMeSettings

if TYPE_CHECKING:
    from .context import BlockContext


def schedule(r: tuple[int, ...] | int, inflection: float, layers: int) -> list[int]:
    """Tokens to merge in each block: constant, or rising or falling in a line around r, or as listed (then 0)."""
    if isinstance(r, int) or len(r) == 1:
        r = r if isinstance(r, int) else r[0]
        low = int(r * (1.0 - inflection))
        step = (2 * r - 2 * low) / (layers - 1) if layers > 1 else 0.0
        return [int(low + step * i) for i in range(layers)]
    if len(r) > layers:
        raise UserError(f"r: expected at most {layers} numbers, one a block, got {len(r)}.")
    return [*r, *[0] * (layers - len(r))]


@dataclass
class State:
    order: Tensor  # [B, n] slots in the order in which the authors' code would hold them
    size: Tensor  # [B, N]


class ToMe(Policy):
    def __init__(self, settings: ToMeSettings, shape: Shape) -> None:
        super().__init__(settings, shape, replace(FIXED, pools_alive=True, dial="r"))
        self.r = schedule(settings.r, settings.inflection, shape.layers)

    def positions(self) -> tuple[float, float]:
        return 0.0, (self.shape.tokens - self.shape.num_prefix_tokens) / 2

    def at_position(self, position: float) -> ToMe:
        """r on average, which need not be whole: the schedule of the settings (even where they merge nothing)
        scaled to it, what is over going to the next block."""
        other = copy.copy(self)
        other.training = False
        shape = self.r if any(self.r) else [1] * len(self.r)
        ends = [math.floor(position * len(shape) * part / sum(shape) + 1e-9) for part in itertools.accumulate(shape)]
        other.r = [end - start for start, end in itertools.pairwise([0, *ends])]
        return other

    def evidence(self, layer: int, aux: frozenset[str]) -> frozenset[str]:
        return frozenset({"match"}) if self.r[layer] > 0 else frozenset()

    def init_state(self, ctx: BlockContext) -> State:
        slots = torch.arange(ctx.present.shape[1], device=ctx.present.device)
        return State(slots.expand(ctx.present.shape), torch.ones_like(ctx.present, dtype=torch.float32))

    def between(self, ctx: BlockContext, state: State) -> Merge | None:
        order, prefix = state.order, self.shape.num_prefix_tokens
        n = order.shape[1]
        r = min(self.r[ctx.layer], (n - prefix) // 2)
        if r <= 0:
            return None
        a, b = order[:, ::2], order[:, 1::2]  # slots
        best, partner = ctx.evidence["match"].match(a, b, prefix)
        ctx.add_macs(float(a.shape[1] * b.shape[1] * (self.shape.attention_dim // self.shape.heads)))
        if "keep_scores" in ctx.aux:
            unranked = torch.full(ctx.present.shape, float("nan"), device=best.device)
            ctx.record_scores(unranked.scatter(1, a, -best.float()), ctx.layer + 1)
        into, state.order = bipartite_match(best, partner, order, ctx.present, r, prefix)
        merge = join(into, state.size, ctx.present)
        assert merge.size is not None
        state.size = merge.size
        return replace(merge, size=merge.size if self.settings.prop_attn else None, tokens_left=n - r)
