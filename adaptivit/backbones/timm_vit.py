"""timm's VisionTransformer and distilled DeiT. Modules, weights and state-dict keys stay as they are.

Shapes: B images, N slots, D width, H heads, d head width, F hidden width of the MLP; R rows of a layout.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from timm.layers import AttentionPoolLatent, DropPath, LayerScale, Mlp, PatchEmbed
from timm.layers.attention import Attention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from ..cost import Shape
from ..errors import UnsupportedBackbone, UserError
from .protocol import AttentionWeights, Backbone, MlpWeights, Rates, Stem
from .stored import Arguments


class TimmViT(Backbone):
    family = "timm_vit"
    stored = Arguments
    head_keys: ClassVar[tuple[str, ...]] = (*Backbone.head_keys, "head_dist.weight", "head_dist.bias")
    module: VisionTransformer

    @classmethod
    def drives(cls, module: nn.Module) -> bool:
        return type(module) in (VisionTransformer, VisionTransformerDistilled)

    def inspect(self) -> Shape:
        vit = self.module
        self._check_supported()
        first: Any = vit.blocks[0]
        tokens = vit.patch_embed.num_patches + vit.num_prefix_tokens
        distilled = isinstance(vit, VisionTransformerDistilled)
        token_read = vit.global_pool == "token" and vit.attn_pool is None
        num_classifiers = 0 if vit.num_classes <= 0 else 2 if distilled else 1
        return Shape(
            layers=len(vit.blocks),
            tokens=tokens,
            num_prefix_tokens=vit.num_prefix_tokens,
            dim=vit.embed_dim,
            heads=first.attn.num_heads,
            attention_dim=first.attn.attn_dim,
            mlp_dim=first.mlp.fc1.out_features,
            patch_macs=vit.patch_embed.proj.weight.numel(),
            classes=vit.num_classes if num_classifiers else vit.embed_dim,
            num_classifiers=num_classifiers,
            class_token=vit.has_class_token,
            head_tokens=(2 if distilled else 1) if token_read else tokens,
            gated=first.attn.gate is not None,
            latent_pool=vit.attn_pool is not None,
            pool_prefix=vit.pool_include_prefix,
        )

    def _check_supported(self) -> None:
        vit = self.module
        if len(vit.blocks) == 0:
            raise UnsupportedBackbone("The VisionTransformer has no blocks.")
        for i, block in enumerate(vit.blocks):
            parts: dict[str, tuple[Any, type]] = {"block": (block, Block)}
            if isinstance(block, Block):
                parts |= {"attention": (block.attn, Attention), "MLP": (block.mlp, Mlp)}
            for what, (module, supported) in parts.items():
                if type(module) is not supported:
                    raise UnsupportedBackbone(
                        f"Unsupported {what} type in block {i}: {type(module).__name__} "
                        f"(supported: {supported.__name__})."
                    )
        if type(vit.patch_embed) is not PatchEmbed:
            raise UnsupportedBackbone(
                f"Unsupported patch embedding type: {type(vit.patch_embed).__name__} (supported: PatchEmbed)."
            )
        if not isinstance(vit.patch_drop, nn.Identity):
            raise UnsupportedBackbone("patch_drop_rate > 0 drops tokens before any policy is asked; set it to 0.")
        if vit.attn_pool is not None and not isinstance(vit.attn_pool, AttentionPoolLatent):
            raise UnsupportedBackbone(
                f"Unsupported pooling: {type(vit.attn_pool).__name__} (global_pool={vit.global_pool!r})."
            )
        if vit.global_pool == "":
            raise UnsupportedBackbone("global_pool='' gives no single feature per image; use 'token' or 'avg'.")

    @property
    def blocks(self) -> Sequence[Any]:
        return self.module.blocks

    @property
    def in_chans(self) -> int:
        return self.module.in_chans

    @property
    def image_size(self) -> tuple[int, int]:
        return tuple(self.module.patch_embed.img_size)

    @property
    def patch_size(self) -> tuple[int, int]:
        return self.module.patch_embed.patch_size

    @property
    def drop_path_rate(self) -> float:
        return float(getattr(self.blocks[-1].drop_path1, "drop_prob", 0.0) or 0.0)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        embed = self.module.patch_embed
        return embed.dynamic_feat_size((height, width)) if self.module.dynamic_img_size else embed.grid_size

    def check_size(self, height: int, width: int) -> None:
        patch = self.patch_size
        if not self.module.dynamic_img_size:
            super().check_size(height, width)
        elif not self.module.patch_embed.dynamic_img_pad and (height % patch[0] or width % patch[1]):
            raise UserError(
                f"Expected sides that are multiples of the {patch[0]} x {patch[1]} px patch, got {height} x {width}."
            )

    # -- making it -------------------------------------------------------------------------------------------
    @classmethod
    def build(cls, arguments: Mapping[str, Any]) -> VisionTransformer:
        """Arguments of timm's VisionTransformer; `distilled` and `norm_eps` beside them."""
        given = dict(arguments)
        kind = VisionTransformerDistilled if given.pop("distilled", False) else VisionTransformer
        norm = functools.partial(nn.LayerNorm, eps=given.pop("norm_eps", 1e-6))
        try:
            return kind(norm_layer=norm, **given)
        except (TypeError, AssertionError) as error:
            raise UserError(f"backbone: these are not arguments of timm's VisionTransformer ({error}).") from None

    def arguments(self) -> dict[str, Any]:
        vit = self.module
        block: Any = vit.blocks[0]
        return {
            "distilled": isinstance(vit, VisionTransformerDistilled),
            "norm_eps": block.norm1.eps,
            "patch_size": list(vit.patch_embed.patch_size),
            "in_chans": vit.in_chans,
            "embed_dim": vit.embed_dim,
            "depth": len(vit.blocks),
            "num_heads": block.attn.num_heads,
            "mlp_ratio": block.mlp.fc1.out_features / vit.embed_dim,
            "qkv_bias": block.attn.qkv.bias is not None,
            "proj_bias": block.attn.proj.bias is not None,
            "qk_norm": not isinstance(block.attn.q_norm, nn.Identity),
            "scale_attn_norm": not isinstance(block.attn.norm, nn.Identity),
            "scale_mlp_norm": not isinstance(block.mlp.norm, nn.Identity),
            "init_values": getattr(block.ls1, "init_values", None),
            "global_pool": vit.global_pool,
            "class_token": vit.has_class_token,
            "reg_tokens": vit.num_reg_tokens,
            "no_embed_class": vit.no_embed_class,
            "pos_embed": "none" if vit.pos_embed is None else "learn",
            "pre_norm": not isinstance(vit.norm_pre, nn.Identity),
            "final_norm": not (isinstance(vit.norm, nn.Identity) and isinstance(vit.fc_norm, nn.Identity)),
            "fc_norm": not isinstance(vit.fc_norm, nn.Identity),
            "pool_include_prefix": vit.pool_include_prefix,
            "dynamic_img_size": vit.dynamic_img_size,
            "dynamic_img_pad": vit.patch_embed.dynamic_img_pad,
        }

    def adapt(self, num_classes: int | None, img_size: tuple[int, int] | None) -> None:
        if num_classes is not None:
            self.module.reset_classifier(num_classes)
        if img_size is not None:
            self.module.set_input_size(img_size=img_size)

    def no_weight_decay(self) -> Collection[str]:
        return self.module.no_weight_decay()

    # -- images to rows, rows to logits ----------------------------------------------------------------------
    def embed(self, images: Tensor) -> Tensor:
        vit = self.module
        return vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))

    def norm(self, rows: Tensor) -> Tensor:
        return self.module.norm(rows)

    def head(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        vit = self.module
        x = vit.norm(rows)
        features = vit.forward_head(x, pre_logits=True)
        if isinstance(vit, VisionTransformerDistilled):
            return features, (vit.head(x[:, 0]) + vit.head_dist(x[:, 1])) / 2
        return features, vit.head(features)

    # -- a block, row by row ---------------------------------------------------------------------------------
    @staticmethod
    def norm1(block: Any, rows: Tensor) -> Tensor:
        return block.norm1(rows)

    @staticmethod
    def qkv(block: Any, y: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        attn = block.attn
        q, k, v = attn.qkv(y).unflatten(-1, (3, attn.num_heads, attn.head_dim)).unbind(-3)
        return attn.q_norm(q), attn.k_norm(k), v

    @staticmethod
    def project(block: Any, out: Tensor, y: Tensor) -> Tensor:
        attn = block.attn
        out = attn.norm(out.flatten(-2))
        if attn.gate is not None:
            out = out * attn.gate(y).sigmoid()
        return block.ls1(attn.proj_drop(attn.proj(out)))

    @staticmethod
    def norm2(block: Any, rows: Tensor) -> Tensor:
        return block.norm2(rows)

    @staticmethod
    def mlp_hidden(block: Any, y: Tensor) -> Tensor:
        return block.mlp.fc1(y)

    @staticmethod
    def mlp_out(block: Any, hidden: Tensor) -> Tensor:
        ffn = block.mlp
        return block.ls2(ffn.drop2(ffn.fc2(ffn.norm(ffn.drop1(ffn.act(hidden))))))

    @staticmethod
    def rates(block: Any) -> Rates:
        attn, branches = block.attn, (block.drop_path1, block.drop_path2)
        paths = [b.drop_prob if isinstance(b, DropPath) and b.training else 0.0 for b in branches]
        return Rates(attn.attn_drop.p if attn.training else 0.0, *paths)

    # -- for fused kernels -----------------------------------------------------------------------------------
    def fusion_refusal(self) -> str | None:
        for block in self.blocks:
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

    @staticmethod
    def attention_weights(block: Any) -> AttentionWeights:
        attn = block.attn
        return AttentionWeights(block.norm1, attn.qkv, attn.proj, _gamma(block.ls1), attn.num_heads, attn.head_dim)

    @staticmethod
    def mlp_weights(block: Any) -> MlpWeights:
        return MlpWeights(block.norm2, block.mlp.fc1, block.mlp.fc2, _gamma(block.ls2))

    def stem(self) -> Stem | None:
        embed, proj = self.module.patch_embed, self.module.patch_embed.proj
        alone = proj.kernel_size == proj.stride and not any(proj.padding) and proj.groups == 1
        if not (alone and embed.flatten and not self.module.dynamic_img_size and not embed.dynamic_img_pad):
            return None
        return Stem(proj.weight.flatten(1), proj.bias, embed.patch_size, embed.grid_size)

    def finish_embedding(self, patches: Tensor) -> Tensor:
        vit = self.module
        return vit.norm_pre(vit._pos_embed(vit.patch_embed.norm(patches)))

    def added_to_patches(self) -> tuple[Tensor, Tensor] | None:
        vit, position = self.module, self.module.pos_embed
        if not isinstance(vit.patch_embed.norm, nn.Identity) or position is None:
            return None
        patches = vit.patch_embed.num_patches
        tokens = [vit.cls_token, getattr(vit, "dist_token", None), vit.reg_token]
        lead = [token[0] for token in tokens if token is not None]
        prefix = torch.cat(lead) if len(lead) > 1 else lead[0] if lead else position[0, :0]
        if not vit.no_embed_class and lead:
            prefix = prefix + position[0, :-patches]
        return prefix, position[0, -patches:]

    def embedding_norm(self, rows: Tensor) -> Tensor:
        return self.module.norm_pre(rows)


def _gamma(scale: nn.Module) -> Tensor | None:
    return scale.gamma if isinstance(scale, LayerScale) else None
