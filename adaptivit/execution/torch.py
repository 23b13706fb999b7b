"""A block by PyTorch operations, as the backbone's own modules compute it: for training, and as the reference.

Shapes: B images, N slots, D width, H heads, d head width; R rows of a layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backbones.protocol import Backbone
from ..layouts import Layout
from ..utils.batch_rng import draw
from .evidence import EvidenceRequest, collect_evidence


class Executor:
    """Runs embedding and blocks of a backbone on a layout's rows. Other executors do the same in fewer passes."""

    name = "PyTorch modules"
    full_last_mlp = False  # patches go through the last MLP though nothing reads them

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    def embed(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, N, D]"""
        return self.backbone.embed(images)

    def attention(self, block: Any, layout: Layout, request: EvidenceRequest) -> None:
        """The attention branch, on the layout's rows."""
        if self._idle(layout, request):
            return
        backbone, rates = self.backbone, self.backbone.rates(block)
        y, q, k, v = self.norm_qkv(backbone, block, layout.rows, layout.row_positions())
        collect_evidence(layout, request, q, k)
        out = layout.attend(q, k, v, rates.attention)
        if "halted_row" in request.wanted:
            request.give("halted_row", self.halted_row(block, layout, k, v))
        kept = branch_scale(rates.branch1, layout)
        layout.put(self.proj_residual(backbone, block, layout.rows, out, y, kept, layout.active_rows()))

    def mlp(self, block: Any, layout: Layout, request: EvidenceRequest) -> None:
        """The MLP branch, on the layout's rows."""
        if self._idle(layout, request):
            return
        kept = branch_scale(self.backbone.rates(block).branch2, layout)
        index = request.index if "fc1" in request.wanted else None
        rows, element = self.mlp_residual(self.backbone, block, layout.rows, kept, layout.active_rows(), index)
        if element is not None:
            request.give("fc1", layout.to_grid(element))
        layout.put(rows)

    @staticmethod
    def _idle(layout: Layout, request: EvidenceRequest) -> bool:
        """No row is left. With gradients the block runs all the same, so that every parameter has one."""
        return layout.empty and not request.wanted and not torch.is_grad_enabled()

    def halted_row(self, block: Any, layout: Layout, k: Tensor, v: Tensor) -> Tensor:
        """[B, D] a zero row with zeroed norms through the block: it still collects values and biases on its way."""
        backbone = self.backbone
        zero = layout.rows.new_zeros(layout.batch, layout.rows.shape[-1])
        q0, _, v0 = backbone.qkv(block, zero)
        after_attention = backbone.project(block, layout.query(q0, k, v, v0[0]), zero)
        return after_attention + backbone.mlp_out(block, backbone.mlp_hidden(block, zero))

    # what a block computes on rows alone, between what layout and policy do: compiled.py compiles these three
    @staticmethod
    def norm_qkv(
        backbone: Backbone, block: Any, rows: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[R, D] -> the rows after their norm, queries, keys and values."""
        y = backbone.norm1(block, rows)
        return y, *backbone.qkv(block, y, positions)

    @staticmethod
    def proj_residual(
        backbone: Backbone,
        block: Any,
        rows: Tensor,
        out: Tensor,
        y: Tensor,
        kept: Tensor | None,
        active_rows: Tensor | None,
    ) -> Tensor:
        """Attended values [R, H, d], projected and added to the rows."""
        return added(rows, backbone.project(block, out, y), kept, active_rows)

    @staticmethod
    def mlp_residual(
        backbone: Backbone,
        block: Any,
        rows: Tensor,
        kept: Tensor | None,
        active_rows: Tensor | None,
        index: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The MLP added to the rows, and element `index` [R] of the hidden layer, where wanted."""
        hidden = backbone.mlp_hidden(block, backbone.norm2(block, rows))
        element = None if index is None else hidden[..., index].float()
        return added(rows, backbone.mlp_out(block, hidden), kept, active_rows), element


def added(rows: Tensor, delta: Tensor, kept: Tensor | None, active_rows: Tensor | None) -> Tensor:
    """[R, D] rows + delta for the rows that a block changes."""
    moved = rows + (delta if kept is None else delta * kept[..., None].to(delta.dtype))
    return moved if active_rows is None else torch.where(active_rows[..., None], moved, rows)


def branch_scale(rate: float, layout: Layout) -> Tensor | None:
    """[R] factor of stochastic depth, drawn once an image however its rows are stored; None without it."""
    if rate == 0.0:
        return None
    keep = 1.0 - rate
    drawn = draw(layout.batch, lambda n: torch.empty(n, device=layout.alive.device).bernoulli_(keep))
    return layout.expand(drawn / keep)
