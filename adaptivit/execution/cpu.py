"""A block on a CPU, for inference: the same arithmetic with fewer passes over memory.

Shapes: B images, D width; R rows of a layout, K and N widths of a product.

Products are added to the rows in place, and GELU is applied in place. Only layouts with rows of their own
(`drops_rows`) run so, and what keeps a row's value keeps a copy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backbones.protocol import Backbone
from ..layouts import Layout
from ..utils.hardware import processor
from .evidence import EvidenceRequest, collect_evidence
from .torch import Executor

# Whether a product takes its bias, or gets it afterwards. Measured: AMD's processors are 2 to 20 % faster with the bias
# inside; Intel's were timed with it outside (benchmarks/LOG.md).
BIAS_INSIDE = processor().startswith("AMD ")  # not AMD64, as Windows calls them all


def refusal(backbone: Backbone, device: torch.device) -> str | None:
    """Why this executor cannot run this backbone here; None if it can."""
    if device.type != "cpu":
        return "the model is not on a CPU"
    if torch.is_grad_enabled():
        return "gradients are on; use torch.inference_mode()"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on; convert the model instead: model.to(torch.bfloat16)"
    return backbone.fusion_refusal()


class CpuExecutor(Executor):
    name = "products in place"

    def embed(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, N, D], with the patch convolution as one matrix product."""
        stem = self.backbone.stem()
        if stem is None:
            return self.backbone.embed(images).contiguous()
        (high, wide), (down, across) = stem.patch_size, stem.grid_size
        whole = images[..., : down * high, : across * wide]  # a border narrower than a patch is not read
        grid = whole.unflatten(3, (across, wide)).unflatten(2, (down, high)).permute(0, 2, 4, 1, 3, 5)
        patches = grid.reshape(len(images), down * across, -1)
        return self.backbone.finish_embedding(F.linear(patches, stem.weight, stem.bias)).contiguous()

    def attention(self, block: Any, layout: Layout, request: EvidenceRequest) -> None:
        weights = self.backbone.attention_weights(block)
        qkv = _product(weights.norm(layout.rows), weights.qkv)
        q, k, v = qkv.unflatten(-1, (3, weights.heads, weights.head_dim)).unbind(-3)
        collect_evidence(layout, request, q, k)
        out = layout.attend(q, k, v)
        if "halted_row" in request.wanted:
            request.give("halted_row", self.halted_row(block, layout, k, v))
        _add(layout, out.flatten(-2), weights.proj, weights.scale)

    def mlp(self, block: Any, layout: Layout, request: EvidenceRequest) -> None:
        weights = self.backbone.mlp_weights(block)
        hidden = _product(weights.norm(layout.rows), weights.fc1)
        if "fc1" in request.wanted:
            request.give("fc1", layout.to_grid(hidden[..., request.index].float()))
        _add(layout, torch.ops.aten.gelu_(hidden), weights.fc2, weights.scale)


def _product(x: Tensor, linear: Any) -> Tensor:
    """[R, K] -> [R, N]"""
    if BIAS_INSIDE:
        return F.linear(x, linear.weight, linear.bias)
    out = x.flatten(0, -2) @ linear.weight.t()
    if linear.bias is not None:
        out.add_(linear.bias)
    return out.unflatten(0, x.shape[:-1])


def _add(layout: Layout, x: Tensor, linear: Any, scale: Tensor | None) -> None:
    """rows += scale * linear(x)"""
    rows = layout.rows.view(-1, layout.rows.shape[-1])  # a view, or an error: a copy would be lost
    if scale is not None:
        rows.addcmul_(_product(x, linear).flatten(0, -2), scale)
        return
    torch.addmm(rows, x.flatten(0, -2), linear.weight.t(), out=rows)
    if linear.bias is not None:
        rows.add_(linear.bias)
