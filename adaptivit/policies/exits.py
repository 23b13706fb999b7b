"""Early exits: the model's own head runs after every block, and an image leaves by what it answers.

Shapes: B images, N slots, L layers 1..L, C classes. No parameters.

    confidence   leave when the largest probability reaches the threshold
    similarity   leave when the output has stopped changing: mean squared change of the logits (or of the token that the
                 head reads) from the block before <= threshold                        (A-ViT's Table 2; MSE form)

With patience p the rule must hold p blocks in a row. Trained with the mean of the exits' cross-entropies: with
aux=('exits',) every exit runs and no image leaves.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cost import CostModel, Shape
from ..decision import Drop
from ..errors import UserError
from .base import Policy, Traits

if TYPE_CHECKING:
    from .context import BlockContext

_TINY = 1e-30


@dataclass
class State:
    row: Tensor  # [B] blocks in a row that the rule has held
    exits: list[Tensor] = field(default_factory=list)  # [B, C] each, when asked for
    before: Tensor | None = None  # [B, ...] the output of the block before


class Exits(Policy):
    """What both rules share. Facts with aux=('exits',): exits [L, B, C]."""

    def __init__(self, settings: Any, shape: Shape) -> None:
        super().__init__(settings, shape, Traits(dial="shift", optional_aux=frozenset({"exits"})))
        if not shape.num_classifiers:
            raise UserError("Exits need a backbone with a classifier; this one has num_classes = 0.")

    def init_state(self, ctx: BlockContext) -> State:
        return State(torch.zeros(ctx.present.shape[0], dtype=torch.long, device=ctx.present.device))

    def after(self, ctx: BlockContext, state: State) -> Drop | None:
        asked = "exits" in ctx.aux
        if asked:
            state.exits.append(ctx.logits("asked"))
            return None
        if ctx.last:
            return None
        holds = self._holds(ctx, state)
        state.row = torch.where(holds, state.row + 1, torch.zeros_like(state.row))
        leaves = (state.row >= self.settings.patience)[:, None]
        forced = ctx.over_limit(~leaves, torch.zeros_like(leaves))
        return Drop((leaves if forced is None else leaves | forced) & ctx.present)

    def policy_macs(self, layer: int, costs: CostModel) -> tuple[float, float]:
        asks = getattr(self.settings, "of", "logits") == "logits" and layer < self.shape.layers - 1
        return 0.0, costs.head if asks else 0.0

    @abstractmethod
    def _holds(self, ctx: BlockContext, state: State) -> Tensor:
        """[B] bool: whether the rule holds after this block. A shift acts on log-odds, and on the log of a change."""

    def facts(self, state: State) -> dict[str, Tensor]:
        return {"exits": torch.stack(state.exits)} if state.exits else {}


class Confidence(Exits):
    def _holds(self, ctx: BlockContext, state: State) -> Tensor:
        logits, threshold = ctx.logits().float(), self.settings.threshold
        if ctx.shift is None:
            return logits.softmax(-1).amax(-1) >= threshold
        first, others = logits.max(-1), torch.arange(logits.shape[-1], device=logits.device)
        rest = logits.masked_fill(others == first.indices[:, None], float("-inf")).logsumexp(-1)
        bar = min(threshold, 1 - 1e-6)
        return first.values - rest + ctx.shift[:, 0] >= math.log(bar / (1 - bar))


class SimilarityExit(Exits):
    def _holds(self, ctx: BlockContext, state: State) -> Tensor:
        now = ctx.logits().float() if self.settings.of == "logits" else ctx.image()
        before, state.before = state.before, now
        if before is None:
            return torch.zeros_like(state.row, dtype=torch.bool)
        change, threshold = (now - before).pow(2).mean(-1), self.settings.threshold
        if ctx.shift is None:
            return change <= threshold
        return change.clamp_min(_TINY).log() <= math.log(max(threshold, _TINY)) + ctx.shift[:, 0]
