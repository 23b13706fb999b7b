"""Early exits: a head runs after every block, and an image leaves by what it answers.

Shapes: B images, N slots, D width, L layers 1..L, C classes. The head is the model's own; with heads=own each block but
the last has one, a norm and a linear layer on the class token (the mean token where the model's head pools).

    confidence   leave when the head is sure: its largest probability, or 1 - entropy / log C, reaches the threshold
                 (BranchyNet, FastBERT, DeeBERT: entropy of heads of their own)
    similarity   leave when the output has stopped changing: mean squared change of the logits (or of the token that the
                 head reads) from the block before <= threshold; with measure=lpips the distance of LPIPS between the
                 logits u, v of the two:  sum_c w_c (u_c / |u| - v_c / |v|)^2, w_c > 0 learned  (A-ViT's Table 2)

With patience p the rule must hold p blocks in a row. Trained by losses over exits: with aux=('exits',) every exit runs
and no image leaves.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cost import CostModel, Shape
from ..decision import Drop
from ..errors import UserError
from .base import Policy, Traits
from .records import ConfidenceSettings, SimilaritySettings

if TYPE_CHECKING:
    from .context import BlockContext

_TINY = 1e-30


@dataclass
class State:
    row: Tensor  # [B] blocks in a row that the rule has held
    exits: list[Tensor] = field(default_factory=list)  # [B, C] each, when asked for
    before: Tensor | None = None  # [B, ...] the output of the block before
    answer: Tensor | None = None  # [B, C] of this block, where the head is not the model's own


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
            state.exits.append(self._logits(ctx, "asked").float())
            return None
        if ctx.last:
            return None
        holds = self._holds(ctx, state)
        state.row = torch.where(holds, state.row + 1, torch.zeros_like(state.row))
        leaves = (state.row >= self.settings.patience)[:, None]
        forced = ctx.over_limit(~leaves, torch.zeros_like(leaves))
        leaves = (leaves if forced is None else leaves | forced) & ctx.present
        return Drop(leaves, logits=state.answer)

    def policy_macs(self, layer: int, costs: CostModel) -> tuple[float, float]:
        asks = getattr(self.settings, "of", "logits") == "logits" and layer < self.shape.layers - 1
        return 0.0, costs.head if asks else 0.0

    def _logits(self, ctx: BlockContext, part: str = "policy") -> Tensor:
        """[B, C] what the head answers after this block."""
        return ctx.logits(part)

    @abstractmethod
    def _holds(self, ctx: BlockContext, state: State) -> Tensor:
        """[B] bool: whether the rule holds after this block. A shift acts on log-odds, and on the log of a change."""

    def facts(self, state: State) -> dict[str, Tensor]:
        return {"exits": torch.stack(state.exits)} if state.exits else {}


class Confidence(Exits):
    def __init__(self, settings: ConfidenceSettings, shape: Shape) -> None:
        super().__init__(settings, shape)
        self.heads = nn.ModuleList()
        if settings.heads == "own":
            self.heads.extend(
                nn.Sequential(nn.LayerNorm(shape.dim, eps=1e-6), nn.Linear(shape.dim, shape.outputs))
                for _ in range(shape.layers - 1)
            )

    def policy_macs(self, layer: int, costs: CostModel) -> tuple[float, float]:
        macs = super().policy_macs(layer, costs)
        return (0.0, macs[1] and float(self.shape.dim * self.shape.outputs)) if self.heads else macs

    def _logits(self, ctx: BlockContext, part: str = "policy") -> Tensor:
        if ctx.last or not self.heads:
            return super()._logits(ctx, part)
        head = self.heads[ctx.layer]
        return ctx.apply_to_images(head, ctx.image().to(next(head.parameters()).dtype), part)

    def _holds(self, ctx: BlockContext, state: State) -> Tensor:
        logits, threshold = self._logits(ctx).float(), self.settings.threshold
        state.answer = logits if self.heads else None
        bar = min(threshold, 1 - 1e-6)
        if self.settings.criterion == "entropy":
            doubt = uncertainty(logits)
            if ctx.shift is None:
                return 1 - doubt >= threshold
            doubt = doubt.clamp(1e-7, 1 - 1e-7)
            odds = (1 - doubt).log() - doubt.log()
        elif ctx.shift is None:
            return logits.softmax(-1).amax(-1) >= threshold
        else:
            first, others = logits.max(-1), torch.arange(logits.shape[-1], device=logits.device)
            rest = logits.masked_fill(others == first.indices[:, None], float("-inf")).logsumexp(-1)
            odds = first.values - rest
        return odds + ctx.shift[:, 0] >= math.log(bar / (1 - bar))


def uncertainty(logits: Tensor) -> Tensor:
    """[B, C] -> [B] entropy as a share of its largest, log C: FastBERT's uncertainty."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1) / math.log(max(logits.shape[-1], 2))


class SimilarityExit(Exits):
    """Facts with aux=('exits',) and measure=lpips: changes [L-1, B], whose gradient reaches the weights alone."""

    def __init__(self, settings: SimilaritySettings, shape: Shape) -> None:
        super().__init__(settings, shape)
        if settings.measure == "lpips" and settings.of != "logits":
            raise UserError("measure=lpips compares the logits: leave of=token out.")
        self.log_weights = nn.Parameter(torch.zeros(shape.outputs)) if settings.measure == "lpips" else None

    def change(self, now: Tensor, before: Tensor) -> Tensor:
        """[B] between the outputs [B, C or D] of two blocks in a row."""
        if self.log_weights is None:
            return (now - before).pow(2).mean(-1)
        apart = F.normalize(now, dim=-1) - F.normalize(before, dim=-1)
        return (self.log_weights.float().exp() * apart.pow(2)).sum(-1)

    def facts(self, state: State) -> dict[str, Tensor]:
        facts = super().facts(state)
        if self.log_weights is not None and state.exits:
            pairs = itertools.pairwise(state.exits)
            facts["changes"] = torch.stack([self.change(now.detach(), before.detach()) for before, now in pairs])
        return facts

    def _holds(self, ctx: BlockContext, state: State) -> Tensor:
        now = self._logits(ctx).float() if self.settings.of == "logits" else ctx.image()
        before, state.before = state.before, now
        if before is None:
            return torch.zeros_like(state.row, dtype=torch.bool)
        change, threshold = self.change(now, before), self.settings.threshold
        if ctx.shift is None:
            return change <= threshold
        return change.clamp_min(_TINY).log() <= math.log(max(threshold, _TINY)) + ctx.shift[:, 0]
