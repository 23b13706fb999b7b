"""A block through the fused Triton kernels, for inference on a GPU: the same arithmetic in fewer passes.

Shapes: B images, N slots, D width, H heads, d head width; R rows of a layout.

A block is seven kernels: norm (which also carries out a pending move), qkv, attention, projection + residual, norm
(which also reads one element of fc1), fc1 + GELU, fc2 + residual; five with few rows, where a norm and the product
behind it are one. Weights are read from the modules at every call, so they may change between calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..backbones.protocol import Backbone
from ..kernels.launch import KernelRows, usable
from ..kernels.linear import linear
from ..kernels.norm import norm
from ..kernels.norm_linear import norm_linear, split
from ..kernels.patch_embed import patch_embed
from ..kernels.threshold_gate import GateResult, ThresholdGate
from ..layouts import PackedOnDevice
from .evidence import EvidenceRequest, collect_evidence
from .torch import Executor

FEW_ROWS = 1024  # up to here a norm is computed with the product behind it (benchmarks/LOG.md)


def refusal(backbone: Backbone, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why this executor cannot run this backbone here; None if it can."""
    if not usable(device):
        return "Triton is not installed" if device.type == "cuda" else "there is no GPU"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on; convert the model instead: model.to(torch.bfloat16)"
    if torch.is_grad_enabled():
        return "gradients are on; use torch.inference_mode()"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the weights are {dtype}"
    if why := backbone.fusion_refusal():
        return why
    weights = [(backbone.attention_weights(block), backbone.mlp_weights(block)) for block in backbone.blocks]
    width = weights[0][0].proj.out_features
    if width % 16:
        return f"the width {width} is no multiple of 16"
    if any(attn.proj.in_features % 8 or mlp.fc1.out_features % 8 for attn, mlp in weights):
        return "a width inside its blocks is no multiple of 8"
    return None


class TritonExecutor(Executor):
    name = "fused Triton kernels"

    def embed(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, N, D], with the patch convolution as one matrix product."""
        stem, added = self.backbone.stem(), self.backbone.added_to_patches()
        if stem is None or added is None or not images.is_contiguous():
            return self.backbone.embed(images)
        prefix, positions = added
        rows = patch_embed(images, stem.weight, stem.bias, positions, prefix, *stem.patch_size)
        return self.backbone.embedding_norm(rows)

    def attention(self, block: Any, layout: PackedOnDevice, request: EvidenceRequest) -> None:  # type: ignore[override]
        weights, rows = self.backbone.attention_weights(block), layout.kernel_rows()
        qkv, kept, *_ = _normed(rows, weights.norm, weights.qkv, self._scratch_width(block))
        count, expected = rows.count, rows.expected
        layout.put(kept)
        del rows  # what it holds is not needed any more, nor is qkv further down: memory is reused
        q, k, v = qkv.view(len(qkv), 3, weights.heads, weights.head_dim).unbind(-3)
        collect_evidence(layout, request, q, k)
        out = layout.attend(q, k, v).reshape(len(qkv), weights.heads * weights.head_dim)
        if "halted_row" in request.wanted:
            request.give("halted_row", self.halted_row(block, layout, k, v))
        del q, k, v, qkv
        proj = weights.proj
        layout.put(linear(out, proj.weight, proj.bias, kept, weights.scale, count, False, expected))

    def mlp(self, block: Any, layout: PackedOnDevice, request: EvidenceRequest) -> None:  # type: ignore[override]
        weights, rows = self.backbone.mlp_weights(block), layout.kernel_rows()
        probe = request.index if "fc1" in request.wanted else -1
        gate = request.gate if probe >= 0 and _few(rows) and _one_row_a_cell(layout, rows) else None
        space, where = self._scratch_width(block), (None, None) if gate is None else layout.where
        hidden, kept, element, gated = _normed(rows, weights.norm, weights.fc1, space, True, probe, gate, where)
        count, expected = rows.count, rows.expected
        layout.put(kept)
        del rows
        if element is not None:
            request.give("fc1", layout.to_grid(element))
        if gated is not None:
            request.give("gate", gated)
            layout.remember(gated.active, gated.active_rows)
        fc2 = weights.fc2
        layout.put(linear(hidden, fc2.weight, fc2.bias, kept, weights.scale, count, False, expected))

    def _scratch_width(self, block: Any) -> int:
        """The widest of a block's rows: qkv and the hidden layer are never there together and share their memory."""
        qkv, fc1 = self.backbone.attention_weights(block).qkv, self.backbone.mlp_weights(block).fc1
        return max(qkv.out_features, fc1.out_features)


def _few(rows: KernelRows) -> bool:
    """Whether norm and product are one kernel."""
    return rows.expected <= FEW_ROWS and split(rows.rows.shape[1]) is not None


def _one_row_a_cell(layout: PackedOnDevice, rows: KernelRows) -> bool:
    """Whether a gate on rows decides about the whole grid: there is room for every cell, and no token is skipped."""
    room = len(rows.rows if rows.index is None else rows.index)
    return room == layout.alive.numel() and layout.active is layout.alive


def _normed(
    rows: KernelRows,
    norm_: nn.LayerNorm,
    product: nn.Linear,
    space: int,
    gelu: bool = False,
    probe: int = -1,
    gate: ThresholdGate | None = None,
    where: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor | None, GateResult | None]:
    """Norm and product: out [R, C], the rows themselves at their new place [R, D], element `probe` of the product [R],
    and what a gate on it yields."""
    gain, offset, eps, weight, bias = norm_.weight, norm_.bias, norm_.eps, product.weight, product.bias
    if _few(rows):
        return norm_linear(rows, gain, offset, eps, weight, bias, probe, gelu, space, gate, where)
    row = None if probe < 0 else weight[probe]
    shift = None if probe < 0 or bias is None else bias[probe : probe + 1]
    y, kept, element = norm(rows, gain, offset, eps, row, shift)
    out = linear(y, weight, bias, None, None, rows.count, gelu, rows.expected, space)
    return out, kept, element, None
