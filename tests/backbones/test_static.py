"""`static` is timm: the same numbers on every kind of backbone and every layout; what cannot be driven is named."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.layers import PatchEmbed, SwiGLU
from timm.layers.attention import Attention, AttentionRope
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, ResPostBlock, VisionTransformer
from torch import nn

import adaptivit
from adaptivit.errors import UnsupportedBackbone, UserError
from tests.support.models import (
    ALL_LAYOUTS,
    BACKBONES,
    LAYOUTS,
    TINY,
    assert_close,
    assert_same_run,
    pictures,
    randomise,
    tiny,
)
from tests.support.traces import random_trace


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("kind", BACKBONES)
@torch.no_grad()
def test_static_is_timm(kind: str, layout: str) -> None:
    model = tiny(kind=kind)
    out = model(pictures(), layout=layout)
    assert_close(out.logits, model.vit(pictures()), 1e-6 if layout == "masked" else 1e-5)
    expected = model.vit.forward_head(model.vit.forward_features(pictures()), pre_logits=True)
    assert_close(out.features, expected)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize(("kind", "size"), [("class", 48), ("class", (24, 40)), ("average", 40), ("map", 16)])
@torch.no_grad()
def test_static_is_timm_at_another_image_size(kind: str, size: int | tuple[int, int], layout: str) -> None:
    model = tiny(kind=kind, more={"dynamic_img_size": True})
    height, width = (size, size) if isinstance(size, int) else size
    images = pictures(2, 64)[:, :, :height, :width]
    out = model(images, layout=layout)
    assert_close(out.logits, model.vit(images))
    assert out.trace.attended.shape[-1] == (height // 8) * (width // 8) + model.shape.num_prefix_tokens
    assert out.costs.tokens == out.trace.attended.shape[-1]


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@torch.no_grad()
def test_gated_attention_and_wide_heads(layout: str) -> None:
    vit = VisionTransformer(**TINY).eval()
    for block in vit.blocks:
        block.attn = Attention(24, 3, attn_head_dim=6, gated=True, qkv_bias=True).eval()
    randomise(vit)
    assert_close(adaptivit.create(vit, "static")(pictures(), layout=layout).logits, vit(pictures()))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("test_vit", 64),
        ("deit_tiny_patch16_224", 64),
        ("deit3_small_patch16_224", 64),
        ("deit_tiny_distilled_patch16_224", 64),
        ("vit_small_patch14_reg4_dinov2", 56),
    ],
)
@torch.no_grad()
def test_static_is_timm_for_real_names(name: str, size: int) -> None:
    with torch.device("meta"):  # timm's careful initialisation would cost more than everything else here
        model = adaptivit.create(name, "static", img_size=size, num_classes=5)
        again = timm.create_model(name, img_size=size, num_classes=5)
    assert list(model.vit.state_dict()) == list(again.state_dict())  # timm's keys, untouched
    for one in (model.vit, again):
        one.to_empty(device="cpu").eval()
        randomise(one)
    expected = again(pictures(2, size))
    for layout in ALL_LAYOUTS:
        assert_close(model(pictures(2, size), layout=layout).logits, expected, 2e-5)


@pytest.mark.parametrize("kind", ["class", "registers", "average", "distilled", "map"])
@torch.no_grad()
def test_unreachable_threshold_is_static(kind: str) -> None:
    static = tiny(kind=kind)
    aht = tiny("aht", kind, threshold=1e6, straight_through=True)
    for layout in LAYOUTS:
        a, b = static(pictures(), layout=layout), aht(pictures(), layout=layout)
        assert_same_run(a, b)
        assert (b.trace.depth == 6).all()
        assert b.macs.tolist() == [a.costs.static] * 3


@torch.no_grad()
def test_masked_static_is_bitwise_timm() -> None:
    model = tiny()
    assert torch.equal(model(pictures(), layout="masked").logits, model.vit(pictures()))


def test_logits_are_one_tensor_even_while_distilling() -> None:
    """timm's own switch makes its head answer with a pair in training; ours promises logits [B, classes]."""
    model = tiny(kind="distilled").train()
    model.vit.set_distilled_training(True)
    assert model(pictures()).logits.shape == (3, 10)


@pytest.mark.parametrize("block", [ParallelScalingBlock, ParallelThingsBlock, ResPostBlock])
def test_other_blocks_are_named(block: type) -> None:
    with pytest.raises(UnsupportedBackbone, match=rf"block 0: {block.__name__} "):
        adaptivit.create(VisionTransformer(**TINY, block_fn=block), "static")


def test_other_parts_are_named() -> None:
    with pytest.raises(UnsupportedBackbone, match="AttentionRope"):
        adaptivit.create(VisionTransformer(**TINY, attn_layer=AttentionRope), "static")
    with pytest.raises(UnsupportedBackbone, match="SwiGLU"):
        adaptivit.create(VisionTransformer(**TINY, mlp_layer=SwiGLU), "static")
    with pytest.raises(UnsupportedBackbone, match="patch_drop"):
        adaptivit.create(VisionTransformer(**TINY, patch_drop_rate=0.1), "static")
    with pytest.raises(UnsupportedBackbone, match="AttentionPoolPrr"):
        adaptivit.create(VisionTransformer(**TINY, global_pool="prr"), "static")
    with pytest.raises(UnsupportedBackbone, match="global_pool"):
        adaptivit.create(VisionTransformer(**TINY, global_pool=""), "static")

    class Stem(PatchEmbed):
        pass

    with pytest.raises(UnsupportedBackbone, match="Stem"):
        adaptivit.create(VisionTransformer(**TINY, embed_layer=Stem), "static")


@pytest.mark.parametrize("given", [{}, {"num_classes": 5}, {"img_size": 64}])
def test_other_models_are_named(given: dict[str, int]) -> None:
    with pytest.raises(UnsupportedBackbone, match=r"ResNet|resnet18"):
        adaptivit.create("resnet18", "static", **given)
    with pytest.raises(UnsupportedBackbone, match="ResNet"):
        adaptivit.create(timm.create_model("resnet18"), "static", **given)
    with pytest.raises(UnsupportedBackbone, match="Linear"):
        adaptivit.create(nn.Linear(3, 3), "static", **given)


def test_wrong_images_are_explained() -> None:
    model = tiny()
    for images, message in [
        (pictures(2, 40), "32 x 32 px, got 40 x 40"),
        (pictures()[:, :2], "3 channels, got 2"),
        (pictures()[0], "float tensor"),
        (pictures().to(torch.uint8), "float tensor.*uint8"),
        (pictures()[:0], "empty batch"),
        ([1, 2], "list"),
    ]:
        with pytest.raises(UserError, match=message):
            model(images)
    with pytest.raises(UserError, match="Did you mean 'masked'"):
        model(pictures(), layout="maskd")
    with pytest.raises(UserError, match="3 images of 17"):
        adaptivit.create(TINY, "replay", trace=random_trace(["keep"] * 18, 0))(pictures(2))


def test_wrong_backbones_are_explained() -> None:
    with pytest.raises(UserError, match=r"deit_tiny_patch16_224"):
        adaptivit.create("deit_tiny_patch16_225", "static")
    with pytest.raises(UserError, match="widht"):
        adaptivit.create(TINY | {"widht": 3}, "static")


def test_no_whole_number_of_patches_is_explained() -> None:
    with pytest.raises(UserError, match="33"):
        tiny(more={"dynamic_img_size": True})(pictures(1, 33))
