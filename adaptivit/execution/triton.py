"""timm's blocks through the fused kernels, for inference: the same functions as in backbone.py, in fewer passes.

Shapes: B images, N slots, D width, H heads, d head width; R rows of a layout.

A block is seven kernels: norm (which also carries out a pending move), qkv, attention, projection + residual, norm
(which also reads the supervisor's element of fc1), fc1 + GELU, fc2 + residual; five with few rows, where a norm and its
product are one. Attributes are read from the timm modules at every call, so weights may change between calls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerScale
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..backbones import timm_vit
from ..backbones.timm_vit import EvidenceRequest
from ..kernels.launch import usable
from ..kernels.linear import linear
from ..kernels.norm import norm
from ..kernels.norm_linear import norm_linear, split
from ..kernels.patch_embed import patches
from ..layouts import PackedOnDevice
from ..layouts.base import KernelRows

FEW_ROWS = 1024  # up to here a norm is computed with the product behind it (benchmarks/LOG.md)


def refusal(vit: VisionTransformer, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why these kernels cannot run this model here; None if they can."""
    if not usable(device):
        return "Triton is not installed" if device.type == "cuda" else "there is no GPU"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on; convert the model instead: model.to(torch.bfloat16)"
    if torch.is_grad_enabled():
        return "gradients are on; use torch.inference_mode()"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the weights are {dtype}"
    if vit.embed_dim % 16:
        return f"the width {vit.embed_dim} is no multiple of 16"
    if any(block.attn.proj.in_features % 8 or block.mlp.fc1.out_features % 8 for block in vit.blocks):
        return "a width inside its blocks is no multiple of 8"
    return plain(vit)


def plain(vit: VisionTransformer) -> str | None:
    """What keeps the blocks from being norm, attention, norm, MLP and nothing else; None if they are."""
    for block in vit.blocks:
        attn, ffn = block.attn, block.mlp
        for product in (attn.qkv, attn.proj, ffn.fc1, ffn.fc2):
            if type(product) is not nn.Linear or product._forward_hooks or product._forward_pre_hooks:
                return "its linear layers have been replaced, or have hooks"
        inside: list[Any] = [attn.q_norm, attn.k_norm, attn.norm, ffn.norm]
        if not all(isinstance(m, nn.Identity) for m in inside) or attn.gate is not None:
            return "its blocks have norms or gates inside attention or MLP"
        norms = (block.norm1, block.norm2)
        if not all(isinstance(m, nn.LayerNorm) and m.weight is not None and m.bias is not None for m in norms):
            return f"its norms are {type(block.norm1).__name__}, not LayerNorm with weight and bias"
        if not isinstance(ffn.act, nn.GELU) or ffn.act.approximate != "none":
            return f"its activation is {type(ffn.act).__name__}, not GELU"
    return None


def patchwise(vit: VisionTransformer) -> bool:
    """Whether the stem is one product of every patch, at one image size."""
    stem, proj = vit.patch_embed, vit.patch_embed.proj
    alone = proj.kernel_size == proj.stride and not any(proj.padding) and proj.groups == 1
    return bool(alone and stem.flatten and not vit.dynamic_img_size and not stem.dynamic_img_pad)


def embed(vit: VisionTransformer, images: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, N, D], with the patch convolution as one matrix product."""
    stem, proj, position = vit.patch_embed, vit.patch_embed.proj, vit.pos_embed
    bare = isinstance(stem.norm, nn.Identity) and position is not None and images.is_contiguous()
    if not patchwise(vit) or not bare:
        return timm_vit.embed(vit, images)
    tokens = [vit.cls_token, getattr(vit, "dist_token", None), vit.reg_token]
    lead = [token[0] for token in tokens if token is not None]
    joined = torch.cat(lead) if len(lead) > 1 else lead[0] if lead else position[0, :0]
    patches_at = position[0, -stem.num_patches :]
    if not vit.no_embed_class and lead:
        joined = joined + position[0, : -stem.num_patches]
    rows = patches(images, proj.weight.flatten(1), proj.bias, patches_at, joined, *stem.patch_size)
    return vit.norm_pre(rows)


def attention(block: Any, layout: PackedOnDevice, taps: EvidenceRequest) -> None:
    """The first residual branch, in place of the layout's rows."""
    attn, stream = block.attn, layout.kernel_rows()
    qkv, kept, _ = _normed(stream, block.norm1, attn.qkv, _space(block))
    count, expected = stream.count, stream.expected
    layout.put(kept)
    del stream  # what it holds is not needed any more, nor is qkv further down: memory is reused
    q, k, v = qkv.view(len(qkv), 3, attn.num_heads, attn.head_dim).unbind(-3)
    timm_vit.collect_evidence(layout, taps, q, k)
    out = layout.attend(q, k, v).reshape(len(qkv), attn.num_heads * attn.head_dim)
    if "halted_row" in taps.wanted:
        taps.give("halted_row", timm_vit.halted_row(block, layout, k, v))
    del q, k, v, qkv
    layout.put(_added(out, attn.proj, kept, block.ls1, count, expected))


def mlp(block: Any, layout: PackedOnDevice, taps: EvidenceRequest) -> None:
    """The second residual branch."""
    ffn, stream = block.mlp, layout.kernel_rows()
    wanted = not taps.wanted.isdisjoint(("fc1", "gelu"))
    probe = taps.index if wanted else -1
    hidden, kept, seen = _normed(stream, block.norm2, ffn.fc1, _space(block), gelu=True, probe=probe)
    count, expected = stream.count, stream.expected
    layout.put(kept)
    del stream
    if seen is not None:
        if "fc1" in taps.wanted:
            taps.give("fc1", layout.to_grid(seen))
        if "gelu" in taps.wanted:
            taps.give("gelu", layout.to_grid(F.gelu(seen)))
    layout.put(_added(hidden, ffn.fc2, kept, block.ls2, count, expected))


def _few(stream: KernelRows) -> bool:
    """Whether a norm and the product behind it are one kernel."""
    return stream.expected <= FEW_ROWS and split(stream.rows.shape[1]) is not None


def _space(block: Any) -> int:
    """The widest of a block's rows: qkv and the hidden layer, which are never there together, take one place."""
    return max(block.attn.qkv.out_features, block.mlp.fc1.out_features)


def _normed(
    stream: KernelRows,
    norm1: Any,
    product: Any,
    space: int,
    *,
    gelu: bool = False,
    probe: int = -1,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Norm and product: out [R, N], the rows themselves at their new place [R, D], an element of the product [R]."""
    gain, offset, eps = norm1.weight, norm1.bias, norm1.eps
    if _few(stream):
        rest = (stream.index, stream.count, probe, gelu, stream.expected, space)
        return norm_linear(stream.rows, gain, offset, eps, product.weight, product.bias, *rest)
    row = None if probe < 0 else product.weight[probe]
    shift = None if probe < 0 or product.bias is None else product.bias[probe : probe + 1]
    y, kept, seen = norm(stream.rows, gain, offset, eps, stream.index, stream.count, row, shift)
    out = linear(y, product.weight, product.bias, None, None, stream.count, gelu, stream.expected, space)
    return out, kept, seen


def _added(
    rows: Tensor, product: Any, residual: Tensor, layer_scale: nn.Module, count: Tensor | None, expected: int
) -> Tensor:
    """residual + scale * product(rows) [R, D]"""
    scale = layer_scale.gamma if isinstance(layer_scale, LayerScale) else None
    return linear(rows, product.weight, product.bias, residual, scale, count, False, expected)
