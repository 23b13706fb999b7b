"""EViT: the class token's attention says which patches stay; the others fuse into one (Liang et al., ICLR 2022).

Shapes: B images, N slots.

Between attention and MLP of the blocks 3, 6, 9: score = the class token's attention row of this block, mean over heads;
the ceil(keep n) best of n patches stay. The others become one more patch, sum_j a_j x_j with weights not normalised,
or leave. If all would stay, nothing happens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..cost import Shape
from ..decision import Decision, Drop, Merge
from ..errors import UserError
from .base import FIXED, Policy
from .common import check_blocks, thirds, topk
from .records import EViTSettings

if TYPE_CHECKING:
    from .context import BlockContext


class EViT(Policy):
    """State: the number of patches left, the same in every image."""

    def __init__(self, settings: EViTSettings, shape: Shape) -> None:
        super().__init__(settings, shape, replace(FIXED, pools_alive=True, dial="keep", evidence_grad=True))
        if not shape.class_token:
            raise UserError("evit: expected a backbone with a class token, whose attention is the score; use 'fold'.")
        self.blocks = thirds(shape.layers) if settings.blocks is None else settings.blocks
        check_blocks("blocks", self.blocks, 0, shape.layers)
        self.keep_now = settings.keep  # in training the rate comes down slowly

    def schedule(self, epoch: float) -> None:
        """1 for warm_epochs, then a cosine down to `keep` over shrink_epochs."""
        settings = self.settings
        done = (epoch - settings.warm_epochs) / settings.shrink_epochs if settings.shrink_epochs else 1.0
        done = 0.0 if epoch < settings.warm_epochs else min(done, 1.0)
        self.keep_now = settings.keep + (1 - settings.keep) * 0.5 * (1 + math.cos(math.pi * done))

    def evidence(self, layer: int, aux: frozenset[str]) -> frozenset[str]:
        return frozenset({"class_row"}) if layer in self.blocks else frozenset()

    def init_state(self, ctx: BlockContext) -> list[int]:
        return [ctx.present.shape[1] - self.shape.num_prefix_tokens]

    def between(self, ctx: BlockContext, state: list[int]) -> Decision | None:
        if ctx.layer not in self.blocks:
            return None
        keep = self.keep_now if self.training else self.settings.keep
        before, after = state[-1], math.ceil(keep * state[-1])
        if after >= before:
            return None
        score, patches = ctx.evidence["class_row"], ctx.patches
        ctx.record_scores(score, ctx.layer + 1)
        leaving = topk(score, patches, after, rest=True)
        if not self.settings.fuse:
            state.append(after)
            return Drop(leaving, tokens_left=after + self.shape.num_prefix_tokens)
        state.append(after + 1)
        fused = score.masked_fill(~leaving, float("-inf")).argmax(-1, keepdim=True)  # its slot
        slot = torch.arange(leaving.shape[1], device=leaving.device)
        into = torch.where(leaving, fused, slot)
        scale = torch.where(leaving, score, torch.ones_like(score))
        return Merge(into, scale, tokens_left=after + 1 + self.shape.num_prefix_tokens)
