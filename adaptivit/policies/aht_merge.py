"""AHT-ViT's improved form (ours): tokens halt by merge score and merge into their most similar remaining patch.

Shapes: B images, N slots, L layers 1..L.

    feature     f = -log(a sqrt(n d))       a attention from the class token, d = 1 - cosine to the nearest patch
    centred     f - center_per_image * (mean of f over the image's patches)
    gate        h = sigmoid(gamma_l f + beta_l + shift)       shift: a budget's, or drawn for each image in training

A token halts where its scores are full, as in aht, between attention and MLP of `halting_blocks`. With
surrogate=logit the straight-through gradient is the slope of a soft step in gamma f + beta: of sharp gates h (1 - h),
and with it the slope in the cumulative score, is 0 nearly everywhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..decision import Decision, Drop, Keep, Trace
from ..errors import UserError
from ..utils.batch_rng import draw
from . import aht
from .aht import AHT
from .common import check_blocks, merge_leaving

if TYPE_CHECKING:
    from ..model import AdaptiveViT
    from .context import BlockContext

BY_ATTENTION = ("merge_score", "class_row", "received")  # features that are known before the MLP


@dataclass(kw_only=True)
class State(aht.State):
    size: Tensor  # [B, N] of each token, where patches merge
    shift: Tensor | None  # [B, 1] of the logit of halting
    features: list[Tensor] = field(default_factory=list)  # [B, N] each, when asked for


def mean_over(values: Tensor, where: Tensor) -> Tensor:
    """[B, N], [B, N] bool -> [B, 1] the mean of an image's values there."""
    there = where.float()
    return torch.where(where, values, 0.0).sum(-1, keepdim=True) / there.sum(-1, keepdim=True).clamp_min(1.0)


class AHTMerge(AHT):
    """Facts: those of AHT; presence_mlp [L, B, N] where tokens halt before the MLP; with aux=('features',) what the
    halting blocks read, [halting blocks, B, N]."""

    def _check(self) -> None:
        settings, shape = self.settings, self.shape
        if settings.feature not in BY_ATTENTION:
            width = shape.dim if settings.feature == "residual" else shape.mlp_dim
            if settings.index >= width:
                raise UserError(f"index: expected less than the width {width} of the feature, got {settings.index}.")
        elif settings.feature != "received" and not shape.class_token:
            raise UserError(f"feature: {settings.feature!r} needs a class token, which this backbone lacks.")
        blocks = settings.halting_blocks
        if blocks is None:
            blocks = tuple(range(max(1, shape.layers // 4), shape.layers - 1))
        check_blocks("halting_blocks", blocks, 0, shape.layers - 1)
        self.halting_blocks = tuple(sorted(blocks))

    def _make_gate(self) -> None:
        settings = self.settings
        many = () if settings.gate == "shared" else (self.shape.layers,)
        self.gamma = nn.Parameter(torch.full(many, float(settings.gamma)))
        self.beta = nn.Parameter(torch.full(many, float(settings.beta)))
        if settings.train_budget_range:  # what is added to the logit for the lower and for the higher share
            self.register_buffer("shifts", torch.tensor([1.0, -1.0]))
        self.traits = replace(
            self.traits,
            dense_blocks=min(self.halting_blocks, default=self.shape.layers - 1) + 1,
            decides_before_mlp=settings.halt_point == "before_mlp",
            optional_aux=self.traits.optional_aux | {"features"},
        )

    def decides(self, layer: int) -> bool:
        return layer in self.halting_blocks

    def evidence(self, layer: int, aux: frozenset[str]) -> frozenset[str]:
        settings = self.settings
        if not self.decides(layer):
            return frozenset()
        if settings.feature == "merge_score":
            return frozenset({"class_row", "similarity"})
        read = frozenset({settings.feature}) - {"residual"}
        return read | {"similarity"} if settings.removal == "merge" else read

    def init_state(self, ctx: BlockContext) -> State:
        halting, shift = self._halting(ctx), ctx.shift
        device = halting.halts.device
        if self.training and self.settings.train_budget_range:
            high, low = self.shifts.unbind()  # type: ignore[operator]
            shift = draw(len(halting.halts), lambda images: low + (high - low) * torch.rand(images, 1, device=device))
        return State(halting, size=torch.ones(halting.halts.shape, device=device), shift=shift)

    def between(self, ctx: BlockContext, state: State) -> Decision | None:
        return self._halt(ctx, state) if self.traits.decides_before_mlp and not ctx.last else None

    def after(self, ctx: BlockContext, state: State) -> Decision | None:  # type: ignore[override]
        self._plan(ctx, state)
        return None if self.traits.decides_before_mlp and not ctx.last else self._halt(ctx, state)

    def _halt(self, ctx: BlockContext, state: State) -> Decision:
        settings, halting = self.settings, state.halting
        if not self.decides(ctx.layer):
            halting.step(torch.zeros_like(halting.cumulative), ctx.layer + 1, ctx.last)
            return Keep()
        score, margin = self._score_and_margin(ctx, state)
        full, _ = halting.step(score, ctx.layer + 1, ctx.last, over_limit=ctx.over_limit, margin=margin)
        weight = halting.presence[-1] if settings.straight_through else None
        if settings.removal == "drop":
            return Drop(full, key_weight=weight)
        merge_weight = None
        if settings.feature in ("class_row", "merge_score"):  # as in fold: attention counts in the mean
            merge_weight = state.size * ctx.evidence["class_row"].clamp_min(1e-9) ** 0.5
        merge = merge_leaving(full, ctx.patches, state.size, ctx.evidence["similarity"], merge_weight)
        assert merge.size is not None
        state.size = merge.size
        return replace(merge, key_weight=weight)

    def _score_and_margin(self, ctx: BlockContext, state: State) -> tuple[Tensor, Tensor | None]:
        """[B, N] h; with surrogate=logit how far gamma f + ... is above what just halts the token, in units of f."""
        settings, spent = self.settings, state.halting.cumulative
        gamma, beta = (p.float() if p.ndim == 0 else p[ctx.layer].float() for p in (self.gamma, self.beta))
        feature = self._feature(ctx)
        if settings.center_per_image > 0:
            feature = feature - settings.center_per_image * mean_over(feature, ctx.patches)
        if "features" in ctx.aux:
            state.features.append(feature)
        logit = gamma * feature + beta
        logit = logit if state.shift is None else logit + state.shift
        margin = None
        if settings.surrogate == "logit" and torch.is_grad_enabled():  # it is for the gradient alone
            missing = (settings.threshold - settings.eps - spent.detach()).clamp(0.001, 0.999)
            margin = (logit - torch.logit(missing)) / gamma.detach().abs().clamp_min(1e-3)
        return torch.sigmoid(logit), margin

    def _feature(self, ctx: BlockContext) -> Tensor:
        """[B, N] f."""
        name, count = self.settings.feature, ctx.present.sum(-1, keepdim=True)
        if name == "merge_score":
            cosine, _ = ctx.evidence["similarity"].nearest(ctx.patches)
            distance = (1 - cosine.clamp(-1, 1)).clamp_min(1e-6)
            return -0.5 * ((ctx.evidence["class_row"].clamp_min(1e-6) ** 2) * count * distance).log()
        if name == "residual":
            return ctx.channel(self.settings.index)
        if name == "fc1":
            return ctx.evidence[name]
        return -(ctx.evidence[name] * count).clamp_min(1e-6).log()

    def facts(self, state: State) -> dict[str, Tensor]:  # type: ignore[override]
        facts = super().facts(state)
        if self.traits.decides_before_mlp:  # the MLP has the tokens that are left by then
            presence = facts["presence"]
            facts["presence_mlp"] = torch.cat([presence[1:], presence[-1:]])
        if state.features:
            facts["features"] = torch.stack(state.features)
        return facts

    # -- where training starts ---------------------------------------------------------------------------------
    def _find_beta(self, model: AdaptiveViT, images: Tensor, share: float | None) -> float:
        """Set the gate for the cost target, or for a mean depth of about L - 1; and the shifts of sampled budgets.
        Gates of single blocks start alike: each keeps the same share of its patches."""

        def above(goal: float, by_depth: bool) -> bool:
            out = model(images)
            cost = out.trace.mean_depth if by_depth else out.macs_deployed / model.static_macs(out)
            return float(cost.mean()) > goal

        aims = bool(share) and self.settings.start_at == "budget"
        goal = share if aims and share else self.shape.layers - 1.0
        offset = torch.zeros_like(self.beta)
        if self.settings.gate == "block" and self.halting_blocks:
            self._start_alike(model, images, lambda: above(goal, not aims), offset)
        beta = self._bisect_beta(lambda: above(goal, not aims), offset)
        edges = self.settings.train_budget_range
        found = [self._bisect_beta(functools.partial(above, edge, False), offset) for edge in edges]
        self.beta.copy_(offset + beta)
        if found:
            self.shifts.copy_(torch.tensor(found) - beta)  # type: ignore[operator]
        return beta

    def _start_alike(self, model: AdaptiveViT, images: Tensor, too_dear: Callable[[], bool], offset: Tensor) -> None:
        """Find the share of patches to keep in every halting block, and set gamma and `offset`, of beta, by it."""
        self.beta.fill_(-1e4)
        fewest, most = 0.0, 1.0
        for _ in range(12):
            keep = (fewest + most) / 2
            for _ in range(3):  # tokens that leave change what the next blocks see
                self._keep_share(keep, model(images, aux={"features"}).trace, offset)
                self.beta.copy_(offset)
            fewest, most = (fewest, keep) if too_dear() else (keep, most)

    def _keep_share(self, keep: float, trace: Trace, offset: Tensor) -> None:
        """Set gamma and offset of each block so that a share `keep` of the patches that enter it stays.

        Over all images together; gamma f has the deviation that the setting gamma asks for."""
        prefix, settings = self.shape.num_prefix_tokens, self.settings
        enough = math.log((settings.threshold - settings.eps) / max(1 - settings.threshold + settings.eps, 1e-3))
        for block, values in zip(self.halting_blocks, trace.facts["features"], strict=True):
            feature = values[:, prefix:][trace.attended[block, :, prefix:]]
            if feature.numel() > 1:
                self.gamma[block] = settings.gamma / feature.std().clamp_min(1e-3)
                last = min(max(int(keep * feature.numel()), 1), feature.numel() - 1)
                edge = feature.sort().values[last - 1 : last + 1].mean()  # between two: neither is at the gate's edge
                offset[block] = enough - self.gamma[block] * edge
