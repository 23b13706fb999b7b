"""Static: every token through every block, or through the first few. The baselines, through the same loop.

With `depth` all tokens leave after that many blocks and the head reads them there (A-ViT's sharp halting; A-MoD's
isoFLOP models). With `width` the factory has made the backbone narrower (narrow.py).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..cost import CostModel, Shape
from ..decision import Drop
from ..errors import UserError
from .base import FIXED, Policy
from .records import StaticSettings

if TYPE_CHECKING:
    from .context import BlockContext


class Static(Policy):
    """Answers nothing, or that everything leaves after block `depth`."""

    def __init__(self, settings: StaticSettings, shape: Shape) -> None:
        depth = settings.depth
        if settings.share is not None and settings.by == "depth":
            depth = isoflop_depth(shape, settings.share)
        if depth is not None and depth > shape.layers:
            raise UserError(f"depth: expected at most the backbone's {shape.layers} blocks, got {depth}.")
        depth = depth or shape.layers
        super().__init__(settings, shape, replace(FIXED, keeps_prefix=depth == shape.layers, dial="depth"))
        self.depth = depth

    def positions(self) -> tuple[float, float]:
        return float(self.shape.layers), 1.0

    def at_position(self, position: float) -> Static:
        other = copy.copy(self)
        other.depth = int(position)
        other.traits = replace(self.traits, keeps_prefix=other.depth == self.shape.layers)
        return other

    def after(self, ctx: BlockContext, state: None) -> Drop | None:
        if ctx.layer + 1 == self.depth and not ctx.last:
            return Drop(torch.ones_like(ctx.present), tokens_left=0)
        return None


def isoflop_depth(shape: Shape, share: float) -> int:
    """The most blocks that cost at most this share of the whole model."""
    costs = CostModel(shape, shape.tokens)
    fixed = costs.embedding + costs.head
    block = (costs.static - fixed) / shape.layers
    depth = int((share * costs.static - fixed) / block + 1e-9)
    if depth < 1:
        raise UserError(f"share: one block alone costs {(fixed + block) / costs.static:.3f} of the model, got {share}.")
    return min(depth, shape.layers)
