"""SPViT: a multi-head selector prunes patches in three stages, into package tokens (Kong et al., ECCV 2022).

Shapes: B images, N slots, D width, H heads, S stages.

Before the blocks 3, 6, 9 every head h of a selector gives each patch probabilities s_h of (keep, prune), from its own
D / H channels and their mean over the patches still kept. Another branch weighs the heads by the means of their
channels: s = sum_h a_h s_h / sum_h a_h. Inference prunes below s_keep = 0.5, or keeps fixed shares; training draws by
a hard Gumbel-softmax. What a stage prunes becomes one token, its package: sum_i s_i x_i / sum_i s_i with s_i = s_keep.
It is never pruned, so that each stage adds one. The gradient comes through the key weights, the kept share and s_i.

The module is called score_predictor, as in the authors' state dicts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cost import Shape
from ..decision import Decision, Merge
from ..errors import UserError
from .base import FIXED, Policy
from .common import check_blocks, thirds, topk
from .dynamicvit import hard_gumbel
from .records import SPViTSettings

if TYPE_CHECKING:
    from .context import BlockContext


class Selector(nn.Module):
    """[R, D] -> [R, 2] log-probabilities of keeping and pruning: the heads' own, weighted for each row."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, d = heads, dim // heads
        squeezed, half, quarter = (max(n, 1) for n in (heads // 2, d // 2, d // 4))
        self.senet = nn.Sequential(nn.Linear(heads, squeezed), nn.GELU(), nn.Linear(squeezed, heads), nn.Sigmoid())
        self.in_conv = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU()) for _ in range(heads))
        self.out_conv = nn.ModuleList(
            nn.Sequential(nn.Linear(d, half), nn.GELU(), nn.Linear(half, quarter), nn.GELU(), nn.Linear(quarter, 2))
            for _ in range(heads)
        )

    def forward(self, rows: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        x = rows.unflatten(-1, (self.heads, -1))  # [R, H, d]
        weight = self.senet(x.mean(-1)).float().clamp_min(1e-6).log()  # [R, H]
        z = torch.stack([into(x[..., h, :]) for h, into in enumerate(self.in_conv)], -2)
        half = z.shape[-1] // 2
        shared = mean(z[..., half:].flatten(-2)).to(z.dtype).unflatten(-1, (self.heads, -1))
        joined = torch.cat([z[..., :half], shared], -1)
        each = torch.stack([out(joined[..., h, :]) for h, out in enumerate(self.out_conv)], -2)  # [R, H, 2]
        weight = weight - weight.logsumexp(-1, keepdim=True)
        return (F.log_softmax(each.float(), -1) + weight[..., None]).logsumexp(-2)


@dataclass
class State:
    decision: Tensor  # [B, N] 1 for a kept patch, else 0; with gradient in training
    package: Tensor  # [B, N] bool: slots that hold a package
    left: int  # patches, where they are counted
    packages: int = 0  # the same
    kept: list[Tensor] = field(default_factory=list)  # [B] share of the patches that is kept, each stage
    scores: list[Tensor] = field(default_factory=list)  # [B, N] log-probability of keeping, each stage


class SPViT(Policy):
    """Facts: scores [S, B, N], kept [S, B] share of patches (with gradient), ratios [S], kept_last [B, N]."""

    def __init__(self, settings: SPViTSettings, shape: Shape) -> None:
        counted = settings.select == "count"
        dial = "keep" if counted else "shift"
        traits = replace(FIXED, fixed_counts=counted, fixed_counts_in_training=False, dial=dial)
        super().__init__(settings, shape, traits)
        self.blocks = thirds(shape.layers) if settings.blocks is None else tuple(sorted(settings.blocks))
        check_blocks("blocks", self.blocks, 0, shape.layers)
        if len(settings.keep) != len(self.blocks) and (settings.blocks or len(settings.keep) < len(self.blocks)):
            raise UserError(f"keep: expected {len(self.blocks)} shares, one a stage, got {len(settings.keep)}.")
        if shape.dim % shape.heads:
            raise UserError(
                f"spvit: expected a width that {shape.heads} heads divide, got {shape.dim}; use 'dynamicvit'."
            )
        self.score_predictor = nn.ModuleList(Selector(shape.dim, shape.heads) for _ in self.blocks)

    def at_position(self, position: float) -> SPViT:
        """The first stage keeps this share, and the others less by the powers that the settings stand to each other."""
        first, *_ = keep = self.settings.keep
        powers = [math.log(k) / math.log(first) if first < 1 else s + 1.0 for s, k in enumerate(keep)]
        other = copy.copy(self)
        other.training = False
        other.settings = replace(self.settings, keep=tuple(position**power for power in powers))
        return other

    def init_state(self, ctx: BlockContext) -> State:
        patches = ctx.patches
        return State(patches.float(), torch.zeros_like(patches), patches.shape[1] - self.shape.num_prefix_tokens)

    def before(self, ctx: BlockContext, state: State) -> Decision | None:
        if ctx.layer not in self.blocks:
            return None
        stage, prefix = self.blocks.index(ctx.layer), self.shape.num_prefix_tokens
        total = ctx.present.shape[1] - prefix
        candidates = ctx.patches & ~state.package
        log_p = ctx.apply(self.score_predictor[stage], over=state.decision + state.package.float())  # [B, N, 2]
        score, one = log_p[..., 0], torch.ones_like(state.decision)
        state.scores.append(score.detach())
        ctx.record_scores(score.masked_fill(state.package, float("nan")), ctx.layer)
        count = None
        if self.training:
            state.decision = torch.where(candidates, hard_gumbel(log_p)[..., 0], one) * state.decision
            leaving = candidates & (state.decision.detach() < 0.5)
        else:
            if self.traits.fixed_counts:
                count = min(max(1, int(self.settings.keep[stage] * total)), state.left)
                leaving = topk(score, candidates, count, rest=True)
            else:
                leaving = candidates & (score - log_p[..., 1] < (0.0 if ctx.shift is None else ctx.shift))
            state.decision = (candidates & ~leaving).float()
        state.kept.append(state.decision.sum(-1) / total)
        if count is not None and count == state.left:
            return None
        merge = package(leaving, score)
        slot = torch.arange(leaving.shape[1], device=leaving.device)
        state.package = state.package | (leaving & (merge.target == slot))
        if count is not None:
            state.left, state.packages = count, state.packages + 1
            return replace(merge, tokens_left=prefix + count + state.packages)
        if not self.training:
            return merge
        weight = torch.where(state.package | (slot < prefix), one, state.decision)
        return replace(merge, key_weight=weight, self_key_grad=False)

    def facts(self, state: State) -> dict[str, Tensor]:
        decision = state.decision
        return {
            "scores": torch.stack(state.scores),
            "kept": torch.stack(state.kept),
            "ratios": torch.stack(
                [torch.full((), r, device=decision.device) for r in self.settings.keep[: len(self.blocks)]]
            ),
            "kept_last": decision.detach() > 0.5,
        }


def package(leaving: Tensor, log_score: Tensor) -> Merge:
    """All leaving patches of an image, as the mean weighted by exp(log_score), in the slot of the best of them."""
    some = leaving.any(-1, keepdim=True)
    into = log_score.detach().masked_fill(~leaving, float("-inf")).argmax(-1, keepdim=True)
    slot = torch.arange(leaving.shape[1], device=leaving.device)
    share = log_score.masked_fill(~leaving & some, float("-inf")).softmax(-1)
    return Merge(torch.where(leaving, into, slot), torch.where(leaving, share, torch.ones_like(share)))
