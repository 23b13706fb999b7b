"""What a checkpoint says of its backbone: types and ranges. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

from ..utils.coerce import Check, up_to
from .preprocessing import Side


class Arguments(TypedDict, total=False):
    """Arguments of a checkpoint's VisionTransformer."""

    distilled: bool
    norm_eps: Annotated[float, Check(lambda v: 0 <= v <= 1, "a number in 0..1")]
    patch_size: tuple[Side, Side]
    in_chans: Annotated[int, up_to(4096)]
    embed_dim: Annotated[int, up_to(2**16)]
    depth: Annotated[int, up_to(1024)]
    num_heads: Annotated[int, up_to(2**12)]
    mlp_ratio: Annotated[float, Check(lambda v: 0 < v <= 1024, "a number in 0..1024")]
    qkv_bias: bool
    proj_bias: bool
    qk_norm: bool
    scale_attn_norm: bool
    scale_mlp_norm: bool
    init_values: float | None
    global_pool: Literal["token", "avg", "avgmax", "max", "map"]
    class_token: bool
    reg_tokens: Annotated[int, up_to(4096, 0)]
    no_embed_class: bool
    pos_embed: Literal["none", "learn"]
    pre_norm: bool
    final_norm: bool
    fc_norm: bool
    pool_include_prefix: bool
    dynamic_img_size: bool
    dynamic_img_pad: bool


def sizes(arguments: Mapping[str, Any]) -> dict[str, list[int]]:
    """Shapes of some weights that these arguments mean, as far as they are given; timm makes the others of its own."""
    width, patch = arguments.get("embed_dim"), arguments.get("patch_size")
    if width is None or patch is None or not {"in_chans", "depth", "mlp_ratio"} <= set(arguments):
        return {}
    return {
        "patch_embed.proj.weight": [width, arguments["in_chans"], *patch],
        f"blocks.{arguments['depth'] - 1}.mlp.fc1.weight": [int(width * arguments["mlp_ratio"]), width],
    }
