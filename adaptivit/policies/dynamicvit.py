"""DynamicViT: small predictors drop patches in three stages (Rao et al., NeurIPS 2021).

Shapes: B images, N slots, D width, S stages.

Before the blocks 3, 6, 9 a predictor gives every patch log-probabilities of (keep, drop) from its own features and the
mean of those still kept. Inference: the int(keep^s * patches) best stay. Training: a hard Gumbel-softmax decides, and
its gradient comes through the key weights (not through a token's attention to itself) and through the kept share.

The module is called score_predictor, as in the authors' state dicts, which load as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cost import Shape
from ..decision import Decision, Drop
from ..utils.batch_rng import draw
from .base import FIXED, Policy
from .common import check_blocks, merge_leaving, thirds, topk
from .records import DynamicViTSettings

if TYPE_CHECKING:
    from .context import BlockContext


class Predictor(nn.Module):
    """[R, D] -> [R, 2] log-probabilities of keeping and dropping."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.in_conv = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())
        self.out_conv = nn.Sequential(
            *(nn.Linear(dim, dim // 2), nn.GELU(), nn.Linear(dim // 2, dim // 4), nn.GELU(), nn.Linear(dim // 4, 2))
        )

    def forward(self, rows: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        z = self.in_conv(rows)
        half = z.shape[-1] // 2
        joined = torch.cat([z[..., :half], mean(z[..., half:]).to(z.dtype)], -1)
        return F.log_softmax(self.out_conv(joined).float(), -1)


def hard_gumbel(log_p: Tensor) -> Tensor:
    """[B, N, 2] log-probabilities -> one-hot draws with the gradient of a softmax: F.gumbel_softmax(hard=True), whose
    noise does not depend on how a batch is shared."""
    noise = -draw(len(log_p), lambda n: log_p.new_empty(n, *log_p.shape[1:]).exponential_()).log()
    soft = (log_p + noise).softmax(-1)
    hard = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
    return hard - soft.detach() + soft


@dataclass
class State:
    decision: Tensor  # [B, N] 1 for a kept patch, 0 for a dropped one and for prefix tokens; with gradient in training
    size: Tensor  # [B, N]
    similarity: Any = None  # of the block before a stage, where patches merge
    kept: list[Tensor] = field(default_factory=list)  # [B] share of the patches that is kept, each stage
    scores: list[Tensor] = field(default_factory=list)  # [B, N] log-probability of keeping, each stage


class DynamicViT(Policy):
    """Facts: scores [S, B, N], kept [S, B] share of patches (with gradient), ratios [S], kept_last [B, N]."""

    def __init__(self, settings: DynamicViTSettings, shape: Shape) -> None:
        super().__init__(settings, shape, replace(FIXED, fixed_counts_in_training=False, dial="keep"))
        self.blocks = thirds(shape.layers) if settings.blocks is None else tuple(sorted(settings.blocks))
        check_blocks("blocks", self.blocks, 1 if settings.removal == "merge" else 0, shape.layers)
        self.ratios = self._ratios(settings.keep)
        self.score_predictor = nn.ModuleList(Predictor(shape.dim) for _ in self.blocks)

    def _ratios(self, keep: float) -> list[float]:
        return [keep ** (i + 1) for i in range(len(self.blocks))]

    def at_position(self, position: float) -> DynamicViT:
        other = super().at_position(position)
        assert isinstance(other, DynamicViT)
        other.ratios = self._ratios(position)
        return other

    def evidence(self, layer: int, aux: frozenset[str]) -> frozenset[str]:
        merges = self.settings.removal == "merge" and layer + 1 in self.blocks
        return frozenset({"similarity"}) if merges else frozenset()

    def init_state(self, ctx: BlockContext) -> State:
        return State(ctx.patches.float(), torch.ones_like(ctx.present, dtype=torch.float32))

    def after(self, ctx: BlockContext, state: State) -> None:
        state.similarity = ctx.evidence.get("similarity")

    def before(self, ctx: BlockContext, state: State) -> Decision | None:
        if ctx.layer not in self.blocks:
            return None
        stage = self.blocks.index(ctx.layer)
        log_p = ctx.apply(self.score_predictor[stage], over=state.decision)  # [B, N, 2]
        patches, total = ctx.patches, ctx.present.shape[1] - self.shape.num_prefix_tokens
        state.scores.append(log_p[..., 0].detach())
        ctx.record_scores(log_p[..., 0], ctx.layer)
        weight, count = None, None
        if self.training:
            drawn = hard_gumbel(log_p)[..., 0]
            state.decision = torch.where(patches, drawn, torch.ones_like(drawn)) * state.decision
            leaving = patches & (state.decision.detach() < 0.5)
            weight = torch.where(self._prefix(ctx), torch.ones_like(drawn), state.decision)
        else:
            count = min(
                max(1, int(self.ratios[stage] * total)), int(state.decision.shape[1]) - self.shape.num_prefix_tokens
            )
            leaving = topk(log_p[..., 0], patches, count, rest=True)
            state.decision = (patches & ~leaving).float()
            count += self.shape.num_prefix_tokens
        state.kept.append(state.decision.sum(-1) / total)
        if self.settings.removal == "drop":
            return Drop(leaving, key_weight=weight, self_key_grad=False, tokens_left=count)
        merge = merge_leaving(leaving, patches, state.size, state.similarity)
        assert merge.size is not None
        state.size = merge.size
        return replace(merge, key_weight=weight, self_key_grad=False, tokens_left=count)

    def _prefix(self, ctx: BlockContext) -> Tensor:
        return torch.arange(ctx.present.shape[1], device=ctx.present.device) < self.shape.num_prefix_tokens

    def facts(self, state: State) -> dict[str, Tensor]:
        return {
            "scores": torch.stack(state.scores),
            "kept": torch.stack(state.kept),
            "ratios": torch.stack([torch.full((), r, device=state.decision.device) for r in self.ratios]),
            "kept_last": state.decision.detach() > 0.5,
        }
