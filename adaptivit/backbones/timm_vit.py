"""timm's VisionTransformer as functions on rows. Its modules, weights and state-dict keys stay as they are.

Shapes: B images, N slots, D width, H heads, d head width, F hidden width of the MLP; R rows of a layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import AttentionPoolLatent, DropPath, Mlp, PatchEmbed
from timm.layers.attention import Attention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from ..errors import UnsupportedBackbone
from ..layouts import Layout
from ..layouts.similarity import mean_key
from ..utils.batch_rng import draw


@dataclass(frozen=True)
class Shape:
    """The facts of a backbone that policies, layouts and cost need."""

    layers: int
    tokens: int  # at the nominal image size; a forward pass counts its own
    num_prefix_tokens: int  # class, distillation and register tokens
    dim: int
    heads: int
    attention_dim: int  # heads x head width
    mlp_dim: int
    patch_macs: int  # multiply-accumulates to embed one patch
    classes: int
    num_classifiers: int  # classifier heads (2 for distilled DeiT, 0 without a classifier)
    class_token: bool
    head_tokens: int  # leading slots that the head reads; `tokens` when it pools over patches
    gated: bool = False  # attention output gate (a linear layer more)
    latent_pool: bool = False  # attention pooling head
    pool_prefix: bool = False  # which pools over the prefix tokens too


def inspect(vit: nn.Module) -> Shape:
    """Check that the loop can drive this model, naming what it cannot, and describe it."""
    if type(vit) not in (VisionTransformer, VisionTransformerDistilled):
        raise UnsupportedBackbone(
            f"Expected a timm VisionTransformer, got {type(vit).__module__}.{type(vit).__name__}. "
            "Use a model such as deit_tiny_patch16_224, vit_base_patch16_224 or vit_small_patch14_dinov2."
        )
    assert isinstance(vit, VisionTransformer)
    if len(vit.blocks) == 0:
        raise UnsupportedBackbone("The VisionTransformer has no blocks.")
    for i, block in enumerate(vit.blocks):
        parts = {"block": (block, Block)}
        if isinstance(block, Block):
            parts |= {"attention": (block.attn, Attention), "MLP": (block.mlp, Mlp)}
        for what, (module, supported) in parts.items():
            if type(module) is not supported:
                raise UnsupportedBackbone(
                    f"Unsupported {what} type in block {i}: {type(module).__name__} (supported: {supported.__name__})."
                )
    if type(vit.patch_embed) is not PatchEmbed:
        raise UnsupportedBackbone(
            f"Unsupported patch embedding type: {type(vit.patch_embed).__name__} (supported: PatchEmbed)."
        )
    if not isinstance(vit.patch_drop, nn.Identity):
        raise UnsupportedBackbone("patch_drop_rate > 0 drops tokens before any policy is asked; set it to 0.")
    distilled = isinstance(vit, VisionTransformerDistilled)
    token_read = vit.global_pool == "token" and vit.attn_pool is None
    if vit.attn_pool is not None and not isinstance(vit.attn_pool, AttentionPoolLatent):
        raise UnsupportedBackbone(
            f"Unsupported pooling: {type(vit.attn_pool).__name__} (global_pool={vit.global_pool!r})."
        )
    if vit.global_pool == "":
        raise UnsupportedBackbone("global_pool='' gives no single feature per image; use 'token' or 'avg'.")
    first: Any = vit.blocks[0]
    tokens = vit.patch_embed.num_patches + vit.num_prefix_tokens
    projection = vit.patch_embed.proj
    heads_out = 0 if vit.num_classes <= 0 else 2 if distilled else 1
    return Shape(
        layers=len(vit.blocks),
        tokens=tokens,
        num_prefix_tokens=vit.num_prefix_tokens,
        dim=vit.embed_dim,
        heads=first.attn.num_heads,
        attention_dim=first.attn.attn_dim,
        mlp_dim=first.mlp.fc1.out_features,
        patch_macs=projection.weight.numel(),
        classes=vit.num_classes if heads_out else vit.embed_dim,
        num_classifiers=heads_out,
        class_token=vit.has_class_token,
        head_tokens=(2 if distilled else 1) if token_read else tokens,
        gated=first.attn.gate is not None,
        latent_pool=vit.attn_pool is not None,
        pool_prefix=vit.pool_include_prefix,
    )


def embed(vit: VisionTransformer, images: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, N, D], as timm does it."""
    return vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))


def head(vit: VisionTransformer, leading: Tensor) -> tuple[Tensor, Tensor]:
    """[B, read, D] -> features [B, D] and logits [B, classes]."""
    x = vit.norm(leading)
    features = vit.forward_head(x, pre_logits=True)
    if isinstance(vit, VisionTransformerDistilled):
        return features, (vit.head(x[:, 0]) + vit.head_dist(x[:, 1])) / 2
    return features, vit.head(features)


@dataclass
class EvidenceRequest:
    """What a policy wants to see of a block on its way; filled while the block runs. Grid values are [B, N, ...]."""

    wanted: frozenset[str] = frozenset()
    index: int = 0  # the element of fc1 that is read
    gradient: bool = False  # whether attention that is looked at carries one
    found: dict[str, Any] | None = None

    def give(self, name: str, value: Any) -> None:
        if self.found is None:
            self.found = {}
        self.found[name] = value


# What can be asked for by Policy.evidence, and what it is. Costs are in cost.py.
EVIDENCE = {
    "fc1": "[B, N] one element of the MLP's hidden layer before its activation",
    "gelu": "[B, N] the same after the activation",
    "received": "[B, N] attention received: mean over heads and queries (A-MoD's column mean)",
    "class_row": "[B, N] the class token's attention row, mean over heads (EViT)",
    "keys": "[B, N, d] keys, mean over heads",
    "match": "layouts.Match: finds for some tokens the most similar of others, by the cosine of those keys (ToMe)",
    "similarity": "layouts.Similarity: that cosine of all tokens, which finds every token's nearest other (folding)",
    "halted_row": "[B, D] what the block makes of a zeroed, masked row (a halted token in A-ViT's public code)",
}


def collect_evidence(layout: Layout, taps: EvidenceRequest, q: Tensor, k: Tensor) -> None:
    """What a policy wants to see of the attention, from q and k [R, H, d]."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and taps.gradient):
        if "received" in taps.wanted:
            taps.give("received", layout.attention_rows(q, k, "all"))
        both = {"class_row", "similarity"} <= taps.wanted
        if both:
            row, similarity = layout.class_row_and_similarity(q, k)
            taps.give("class_row", row)
            taps.give("similarity", similarity)
        elif "class_row" in taps.wanted:
            taps.give("class_row", layout.attention_rows(q, k, "class"))
        if "keys" in taps.wanted:
            taps.give("keys", layout.to_grid(mean_key(k)))
        if "match" in taps.wanted:
            taps.give("match", layout.match(k))
        if "similarity" in taps.wanted and not both:
            taps.give("similarity", layout.similarity(k))


def attention(block: Any, layout: Layout, taps: EvidenceRequest, parts: Parts | None = None) -> None:
    """The first residual branch on the layout's rows [R, D]."""
    attn, parts = block.attn, parts or PLAIN
    y, q, k, v = parts.norm_qkv(block, layout.rows)
    collect_evidence(layout, taps, q, k)
    out = layout.attend(q, k, v, attn.attn_drop.p if attn.training else 0.0)
    if "halted_row" in taps.wanted:
        taps.give("halted_row", halted_row(block, layout, k, v))
    kept = _kept(block.drop_path1, layout)
    layout.put(parts.proj_residual(block, layout.rows, out, y, kept, layout.active_rows()))


def mlp(block: Any, layout: Layout, taps: EvidenceRequest, parts: Parts | None = None) -> None:
    """The second residual branch."""
    kept, read = _kept(block.drop_path2, layout), tuple(name in taps.wanted for name in ("fc1", "gelu"))
    rows, *found = (parts or PLAIN).mlp_residual(block, layout.rows, kept, layout.active_rows(), taps.index, *read)
    for name, element in zip(("fc1", "gelu"), found, strict=True):
        if element is not None:
            taps.give(name, layout.to_grid(element))
    layout.put(rows)


def norm_qkv(block: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[R, D] -> what attention reads: the rows after their norm, queries, keys and values."""
    y = block.norm1(rows)
    return y, *_qkv(block.attn, y)


def proj_residual(
    block: Any, rows: Tensor, out: Tensor, y: Tensor, kept: Tensor | None, active_rows: Tensor | None
) -> Tensor:
    """What attention found [R, H, d], projected and added to the rows."""
    return added(rows, block.ls1(_project(block.attn, out, y)), kept, active_rows)


def mlp_residual(
    block: Any,
    rows: Tensor,
    kept: Tensor | None,
    active_rows: Tensor | None,
    index: int = 0,
    before: bool = False,
    after: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The MLP added to the rows, and one element of its hidden layer [R] before and after the activation, if wanted."""
    ffn = block.mlp
    hidden = ffn.fc1(block.norm2(rows))
    active = ffn.act(hidden)
    early = hidden[..., index].float() if before else None
    late = active[..., index].float() if after else None
    out = ffn.drop2(ffn.fc2(ffn.norm(ffn.drop1(active))))
    return added(rows, block.ls2(out), kept, active_rows), early, late


@dataclass(frozen=True)
class Parts:
    """What a block computes on rows alone, between what the layout and the policy do: as it stands here, or compiled
    (regional.py)."""

    norm_qkv: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = norm_qkv
    proj_residual: Callable[..., Tensor] = proj_residual
    mlp_residual: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = mlp_residual


PLAIN = Parts()


def added(rows: Tensor, delta: Tensor, kept: Tensor | None, active_rows: Tensor | None) -> Tensor:
    """[R, D] the rows with what a branch adds to those that take part."""
    moved = rows + (delta if kept is None else delta * kept[..., None].to(delta.dtype))
    return moved if active_rows is None else torch.where(active_rows[..., None], moved, rows)


def _qkv(attn: Any, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[R, D] -> three [R, H, d], normalised where the model does it."""
    q, k, v = attn.qkv(y).unflatten(-1, (3, attn.num_heads, attn.head_dim)).unbind(-3)
    return attn.q_norm(q), attn.k_norm(k), v


def _project(attn: Any, out: Tensor, y: Tensor) -> Tensor:
    out = attn.norm(out.flatten(-2))
    if attn.gate is not None:
        out = out * attn.gate(y).sigmoid()
    return attn.proj_drop(attn.proj(out))


def halted_row(block: Any, layout: Layout, k: Tensor, v: Tensor) -> Tensor:
    """[B, D] a zero row with zeroed norms through the block: it still collects values and biases on its way."""
    attn, ffn = block.attn, block.mlp
    zero = layout.rows.new_zeros(layout.batch, layout.rows.shape[-1])
    q0, _, v0 = _qkv(attn, zero)
    collected = layout.query(q0, k, v, v0[0])
    after_attention = block.ls1(_project(attn, collected, zero))
    return after_attention + block.ls2(ffn.fc2(ffn.norm(ffn.act(ffn.fc1(zero)))))


def _kept(module: nn.Module, layout: Layout) -> Tensor | None:
    """[R] what stochastic depth multiplies a branch with: it drops it for a whole image, however its rows are stored;
    None without it."""
    if not isinstance(module, DropPath) or not module.training or module.drop_prob == 0.0:
        return None
    keep = 1.0 - module.drop_prob
    kept = draw(layout.batch, lambda n: torch.empty(n, device=layout.alive.device).bernoulli_(keep))
    return layout.expand(kept / keep if module.scale_by_keep else kept)
