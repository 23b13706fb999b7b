"""A narrower static ViT out of a wide one: the papers' isoFLOP baseline by width.

The first channels are kept (of every head, of the MLP, of the embedding), so that weights are inherited rather than
drawn anew; without fine-tuning such a model is no good.
"""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from ..cost import CostModel
from ..errors import UserError
from .timm_vit import TimmViT


def narrow(vit: VisionTransformer, share: float, *, of_macs: bool = False) -> VisionTransformer:
    """`vit` with this share of its channels, or the widest one that costs at most this share of its MACs."""
    heads = TimmViT(vit).inspect().heads
    widths = [d * heads for d in range(1, vit.embed_dim // heads + 1)]
    if of_macs:
        allowed = share * _macs(vit)
        fitting = [w for w in widths if _macs(_make(vit, w, meta=True)) <= allowed]
        if not fitting:
            raise UserError(f"share: no width of this backbone costs at most {share} of it.")
        width = fitting[-1]
    else:
        width = min(widths, key=lambda w: abs(w - share * vit.embed_dim))
    if width == vit.embed_dim:
        return vit
    small = _make(vit, width, meta=False)
    small.load_state_dict(_cut(vit, small))
    return small.train(vit.training)


def _macs(vit: VisionTransformer) -> float:
    shape = TimmViT(vit).inspect()
    return CostModel(shape, shape.tokens).static


def _make(vit: VisionTransformer, width: int, meta: bool) -> VisionTransformer:
    given = TimmViT(vit).arguments() | {"embed_dim": width, "img_size": list(vit.patch_embed.img_size)}
    given |= {"num_classes": vit.num_classes}
    if rate := TimmViT(vit).drop_path_rate:
        given["drop_path_rate"] = rate
    with torch.device("meta" if meta else "cpu"):
        made = TimmViT.build(given)
    if _kinds(made) != _kinds(vit):
        odd = sorted(set(_kinds(vit)) ^ set(_kinds(made)))
        raise UserError(f"width: this backbone cannot be made narrower, its modules are unusual ({odd[0]}).")
    made.to(next(vit.parameters()).dtype)
    made.pretrained_cfg = getattr(vit, "pretrained_cfg", None)
    return made


def _kinds(vit: VisionTransformer) -> list[str]:
    return [f"{name} {type(m).__name__}" for name, m in vit.named_modules() if "drop" not in name]


def _cut(vit: VisionTransformer, small: VisionTransformer) -> dict[str, Tensor]:
    """The wide state dict cut down to the narrow one's shapes; q, k and v are cut head by head."""
    heads, wide = TimmViT(vit).inspect().heads, vit.state_dict()
    cut = {}
    for name, target in small.state_dict().items():
        value = wide[name]
        parts = 3 if ".attn.qkv." in name else 2 if "attn_pool.kv." in name else 1
        if parts > 1 or "attn_pool.q." in name or ".attn.norm." in name:
            value = value.unflatten(0, (parts, heads, -1))
            value = value[:, :, : target.shape[0] // (parts * heads)].flatten(0, 2)
        elif name.endswith((".attn.proj.weight", "attn_pool.proj.weight")):
            value = value.unflatten(1, (heads, -1))[:, :, : target.shape[1] // heads].flatten(1)
        cut[name] = value[tuple(slice(0, n) for n in target.shape)].clone()
    return cut
