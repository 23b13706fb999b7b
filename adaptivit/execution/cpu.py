"""timm's blocks on a CPU, for inference: the same functions as in backbone.py, with fewer passes over memory.

Shapes: B images, D width, H heads, d head width; R rows of a layout.

What a CPU loses to is memory: a bias that is copied out before a product, a residual that is a tensor of its own. Here
products are added to the rows in place, and GELU comes after them in place; whether a bias does too depends on the
processor. Layouts whose rows are their own (`compact`) can be treated so; whoever keeps a value of a row keeps a copy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerScale
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from ..backbones import timm_vit
from ..backbones.timm_vit import EvidenceRequest
from ..layouts import Layout
from ..utils.hardware import processor
from .triton import patchwise, plain

# Whether a product is given its bias, or gets it afterwards. AMD's processors are 2 to 20 % faster with it inside; for
# Intel's, where whole passes were timed with it outside, that stays (benchmarks/LOG.md).
BIAS_INSIDE = processor().startswith("AMD ")  # not AMD64, as Windows calls them all


def embed(vit: VisionTransformer, images: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, N, D], with the patch convolution as one matrix product."""
    stem = vit.patch_embed
    if not patchwise(vit):
        return timm_vit.embed(vit, images).contiguous()
    (high, wide), (down, across) = stem.patch_size, stem.grid_size
    whole = images[..., : down * high, : across * wide]  # of a border narrower than a patch timm sees nothing
    grid = whole.unflatten(3, (across, wide)).unflatten(2, (down, high)).permute(0, 2, 4, 1, 3, 5)
    patches = grid.reshape(len(images), stem.num_patches, -1)
    rows = F.linear(patches, stem.proj.weight.flatten(1), stem.proj.bias)
    return vit.norm_pre(vit._pos_embed(stem.norm(rows))).contiguous()


def refusal(vit: VisionTransformer, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why these functions cannot run this model here; None if they can."""
    if device.type != "cpu":
        return "the model is not on a CPU"
    if torch.is_grad_enabled():
        return "gradients are on; use torch.inference_mode()"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on; convert the model instead: model.to(torch.bfloat16)"
    return plain(vit)


def attention(block: Any, layout: Layout, taps: EvidenceRequest) -> None:
    """The first residual branch, added to the layout's rows."""
    attn = block.attn
    qkv = _product(block.norm1(layout.rows), attn.qkv)
    q, k, v = qkv.unflatten(-1, (3, attn.num_heads, attn.head_dim)).unbind(-3)
    timm_vit.collect_evidence(layout, taps, q, k)
    out = layout.attend(q, k, v)
    if "halted_row" in taps.wanted:
        taps.give("halted_row", timm_vit.halted_row(block, layout, k, v))
    _add(layout, out.flatten(-2), attn.proj, block.ls1)


def mlp(block: Any, layout: Layout, taps: EvidenceRequest) -> None:
    """The second residual branch."""
    ffn = block.mlp
    hidden = _product(block.norm2(layout.rows), ffn.fc1)
    if "fc1" in taps.wanted:
        taps.give("fc1", layout.to_grid(hidden[..., taps.index].float()))
    hidden = torch.ops.aten.gelu_(hidden)
    if "gelu" in taps.wanted:
        taps.give("gelu", layout.to_grid(hidden[..., taps.index].float()))
    _add(layout, hidden, ffn.fc2, block.ls2)


def _product(x: Tensor, linear: Any) -> Tensor:
    """[R, K] -> [R, N]"""
    if BIAS_INSIDE:
        return F.linear(x, linear.weight, linear.bias)
    out = x.flatten(0, -2) @ linear.weight.t()
    if linear.bias is not None:
        out.add_(linear.bias)
    return out.unflatten(0, x.shape[:-1])


def _add(layout: Layout, x: Tensor, linear: Any, layer_scale: Any) -> None:
    """rows += scale * linear(x)"""
    rows = layout.rows.view(-1, layout.rows.shape[-1])  # a view, or an error: a copy would be lost
    if isinstance(layer_scale, LayerScale):
        rows.addcmul_(_product(x, linear).flatten(0, -2), layer_scale.gamma)
        return
    torch.addmm(rows, x.flatten(0, -2), linear.weight.t(), out=rows)
    if linear.bias is not None:
        rows.add_(linear.bias)
