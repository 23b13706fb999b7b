"""Patch Slimming: masks of patches for every block, found from the last one down (Tang et al., CVPR 2022). Static form.

Shapes: B images, N slots, P patches, L blocks, H heads.

A mask m_l says which patches of the image go on after the attention of block l; all images share it, and m_l contains
m_{l+1}. Of the last block the head reads its prefix tokens alone. From there down, block by block, with A the attention
of block l + 1 and V its values on images of the data:

    reach_l = m_l (reach_{l+1} + mean_h reach_{l+1} A_h)           reach_L = 1 for the tokens that the head reads
    score_l = mean over images of sum_h (reach_{l+1} A_h)^2 |V_h|^2
    error_l = |m_{l+1} (Z - Z')|^2 / |m_{l+1} Z|^2                 Z' = block l + 1 with the keys of m_l alone

m_l = m_{l+1} and the patches with the highest score_l, in steps, until error_l is at most the tolerance.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cost import Shape
from ..decision import Drop
from ..errors import UserError
from ..kernels.attention import probabilities
from .base import FIXED, Policy
from .records import PatchSlimmingSettings

if TYPE_CHECKING:
    from ..backbones.protocol import Backbone
    from ..model import AdaptiveViT
    from .context import BlockContext

Choose = Callable[[int, int, Callable[[int], float]], int]  # block, least, the error of so many patches -> how many


class PatchSlimming(Policy):
    """Until it is fitted (init_gate) every patch stays, or with the setting `counts` those that stand first.

    `rank` [P]: the lower, the longer a patch stays; `left` [L - 1]: how many after each block's attention, of the last
    none. `counts` is `left` where no tensor may be looked at.
    """

    rank: Tensor
    left: Tensor

    def __init__(self, settings: PatchSlimmingSettings, shape: Shape) -> None:
        traits = replace(FIXED, ignores_last_mlp_patches=False, fits_images=True, dial="counts")
        super().__init__(settings, shape, traits)
        if not shape.class_token or shape.head_tokens == shape.tokens:
            raise UserError(
                "patch_slimming: expected a backbone whose head reads a class token, towards which patches are chosen; "
                "use 'fold'."
            )
        patches = shape.tokens - shape.num_prefix_tokens
        self.counts = settings.counts or (patches,) * (shape.layers - 1)
        self.register_buffer("rank", torch.arange(patches))
        self.register_buffer("left", torch.tensor(self.counts, dtype=torch.int64))
        self._check("counts")

    def _check(self, name: str) -> None:
        most, many = len(self.rank), self.shape.layers - 1
        falls = all(a >= b for a, b in zip((most, *self.counts), (*self.counts, 0), strict=True))
        if len(self.counts) != many or not falls:
            raise UserError(f"{name}: expected {many} numbers that do not rise, {most} at most, got {self.counts}.")

    def _load_from_state_dict(self, *given: Any, **more: Any) -> None:
        super()._load_from_state_dict(*given, **more)
        self.counts = tuple(self.left.tolist())
        self._check("left")
        if self.rank.sort().values.tolist() != list(range(len(self.rank))):
            raise UserError(f"rank: expected every number of 0..{len(self.rank) - 1} once, got others.")

    def at_position(self, position: float) -> PatchSlimming:
        """The mean share of the patches over the blocks: the counts' shares to one power. Not fitted: falling in a
        line."""
        patches, many = len(self.rank), len(self.counts)
        shares = [n / patches for n in self.counts]
        shares = [1 - (i + 1) / (many + 1) for i in range(many)] if all(s == 1 for s in shares) else shares
        low, high = 0.0, 64.0
        for _ in range(40):
            power = (low + high) / 2
            dear = sum(s**power for s in shares) > position * many
            low, high = (power, high) if dear else (low, power)
        other = copy.copy(self)
        other.training = False
        other.counts = tuple(max(1, round(patches * s**low)) for s in shares)
        return other

    def between(self, ctx: BlockContext, state: None) -> Drop | None:
        prefix, most = self.shape.num_prefix_tokens, len(self.rank)
        counts = (most, *self.counts)
        counts = (*counts, 0 if counts[-1] < most else most)  # nothing is pruned: not in the last block either
        if ctx.present.shape[1] - prefix != most:
            raise UserError(
                f"patch_slimming: its masks are for images of {most} patches, got {ctx.present.shape[1] - prefix}; "
                "fit them at that size."
            )
        before, count = counts[ctx.layer], counts[ctx.layer + 1]
        if count == before:
            return None
        rank = torch.cat([self.rank.new_full((prefix,), -1), self.rank])
        ctx.record_scores(-rank.expand(ctx.present.shape), ctx.layer + 1)
        return Drop(ctx.patches & (rank >= count), tokens_left=prefix + count)

    @torch.no_grad()
    def init_gate(self, model: AdaptiveViT, images: Tensor, share: float | None = None) -> str | None:
        """Find the masks on these images, for the setting `counts` or within the setting `tolerance`."""
        settings, training = self.settings, model.training
        model.eval()
        given = settings.counts
        choose: Choose = self._within if given is None else lambda block, least, error: given[block]
        order, self.counts = Fit(model.backbone, self.shape, images).masks(choose)
        self.rank[order] = torch.arange(len(order), device=order.device)
        self.left.copy_(torch.tensor(self.counts, dtype=torch.int64))
        model.train(training)
        return f"masks found on {len(images)} images: {'+'.join(map(str, self.counts))} patches after the blocks"

    def _within(self, block: int, least: int, error: Callable[[int], float]) -> int:
        """The fewest patches, in steps, whose error is within the tolerance; more are taken to err less."""
        step, most = self.settings.step, len(self.rank)
        low, high = 0, math.ceil((most - least) / step)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if error(least + middle * step) <= self.settings.tolerance else (middle + 1, high)
        return min(least + low * step, most)


class Fit:
    """What the masks are found from: every token after each block, on some images, nothing pruned."""

    def __init__(self, backbone: Backbone, shape: Shape, images: Tensor) -> None:
        self.backbone, self.shape = backbone, shape
        positions = backbone.positions(images)
        self.positions = None if positions is None else positions.expand(len(images), *positions.shape)
        self.rows = [backbone.embed(images)]  # [L + 1] of [B, N, D]
        for layer in range(shape.layers):
            y, a, v = self._attention(layer)
            self.rows.append(self._after(layer, self.rows[layer], y, a, v))

    def _attention(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """[B, N, D] normed rows, [B, H, N, N] attention, [B, H, N, d] values."""
        block = self.backbone.blocks[layer]
        y = self.backbone.norm1(block, self.rows[layer])
        q, k, v = (t.transpose(1, 2) for t in self.backbone.qkv(block, y, self.positions))
        return y, probabilities(q, k, None), v

    def _after(self, layer: int, x: Tensor, y: Tensor, a: Tensor, v: Tensor) -> Tensor:
        """[B, n, D] rows after the block."""
        backbone, block = self.backbone, self.backbone.blocks[layer]
        x = x + backbone.project(block, (a.to(v.dtype) @ v).transpose(1, 2), y)
        return x + backbone.mlp_out(block, backbone.mlp_hidden(block, backbone.norm2(block, x)))

    def masks(self, choose: Choose) -> tuple[Tensor, tuple[int, ...]]:
        """[P] patches, those that stay longest first, and how many are left after each block but the last."""
        prefix, slots = self.shape.num_prefix_tokens, self.rows[0].shape[1]
        order, counts = torch.arange(slots, device=self.rows[0].device), list[int]()
        kept, reach = order[:prefix], (order < self.shape.head_tokens).float().expand(self.rows[0].shape[:2])
        for layer in reversed(range(1, self.shape.layers)):
            y, a, v = self._attention(layer)
            through = (reach[:, None, None] @ a)[:, :, 0]  # [B, H, N]
            score = (through.square() * v.float().square().sum(-1)).sum(1).mean(0).index_fill(0, kept, -1.0)
            order = torch.cat([kept, score.argsort(descending=True, stable=True)[: slots - len(kept)]])

            def error(count: int, layer=layer, order=order, kept=kept, y=y, a=a, v=v) -> float:  # type: ignore[no-untyped-def]
                keys, wanted = order[: prefix + count], self.rows[layer + 1][:, kept]
                part = a[:, :, kept][..., keys]
                part = part / part.sum(-1, keepdim=True).clamp_min(1e-30)
                got = self._after(layer, self.rows[layer][:, kept], y[:, kept], part, v[:, :, keys])
                return float((got - wanted).square().sum() / wanted.square().sum())

            counts.append(choose(layer - 1, max(len(kept) - prefix, 1), error))
            kept = order[: prefix + counts[-1]]
            reach = (reach + through.mean(1)) * torch.zeros_like(reach).index_fill(1, kept, 1.0)
        return order[prefix:] - prefix, tuple(reversed(counts))
