"""The analytic count is what runs: equal to torch's own counter on the packed path, for every policy, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers.attention import Attention
from timm.models.vision_transformer import VisionTransformer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import adaptivit
from adaptivit import policies
from adaptivit.cost import CostModel
from adaptivit.decision import Decision, Drop
from adaptivit.output import Output
from tests.support.models import BACKBONES, TINY, pictures, randomise, tiny
from tests.support.traces import KINDS, random_trace


def counted(model: Any, images: torch.Tensor, aux: tuple[str, ...] = ()) -> tuple[int, Output]:
    """MACs by torch's counter. The MATH backend, because fused CPU attention is counted as zero in some releases."""
    model.requires_grad_(False)  # not no_grad: the counter's own hooks fail there on a pooling head's latent query
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        out = model(images, layout="packed", aux=aux)
    return counter.get_total_flops() // 2, out


def check(model: Any, batch: int = 3, size: int = 32, aux: tuple[str, ...] = ()) -> Output:
    ran, out = counted(model, pictures(batch, size), aux)
    assert ran == int(out.macs_ran.sum()), {k: int(v.sum()) for k, v in out.parts.items()}
    assert torch.equal(out.macs, out.macs_deployed + out.parts["asked"])
    assert (out.macs_blocks <= out.macs).all()
    return out


@pytest.mark.parametrize(
    ("name", "expected"),
    [("deit_tiny_patch16_224", 1.254), ("deit_small_patch16_224", 4.599), ("deit_base_patch16_224", 17.564)],
)
def test_published_gmacs(name: str, expected: float) -> None:
    with torch.device("meta"):
        shape = adaptivit.create(name, "static").shape
    assert round(CostModel(shape, shape.tokens).static / 1e9, 3) == expected


@pytest.mark.parametrize("kind", BACKBONES)
def test_static(kind: str) -> None:
    out = check(tiny(kind=kind))
    assert out.macs.tolist() == [out.costs.static] * 3


def test_another_image_size() -> None:
    out = check(tiny(more={"dynamic_img_size": True}), size=48)
    assert float(out.macs[0]) == out.costs.static


def test_gated_attention_and_wide_heads() -> None:
    vit = VisionTransformer(**TINY).eval()
    for block in vit.blocks:
        block.attn = Attention(24, 3, attn_head_dim=6, gated=True, qkv_bias=True)
    randomise(vit)
    check(adaptivit.create(vit, "avit", gate_center=1.0), aux=("raw_scores",))


@pytest.mark.parametrize(
    ("policy", "given", "aux"),
    [
        ("aht", {"beta": -0.5}, ()),
        ("aht", {"beta": -0.5}, ("plan",)),
        ("aht", {"beta": 20.0, "straight_through": True}, ("plan",)),
        ("avit", {"gate": "network"}, ()),
        ("avit", {"gate_center": 3.0}, ()),
        ("avit", {"gate_center": 3.0}, ("raw_scores",)),
        ("avit", {"gate_center": -50.0}, ("raw_scores",)),
    ],
)
@pytest.mark.parametrize("kind", ["class", "average"])
def test_policies(policy: str, given: dict[str, Any], aux: tuple[str, ...], kind: str) -> None:
    out = check(tiny(policy, kind, **given), aux=aux)
    halts = given.get("gate") != "network"
    assert not halts or (out.macs_blocks < out.costs.static).all(), "this test wants tokens that halt"
    assert bool(out.parts["asked"].any()) == (bool(aux))
    assert bool(out.parts["policy"].any()) == (not halts)
    assert not out.parts["evidence"].any()


@pytest.mark.parametrize("kind", ["distilled", "registers", "map", "qk_norm"])
def test_other_backbones(kind: str) -> None:
    check(tiny("aht", kind, beta=-0.5), aux=("plan",))
    check(tiny("avit", kind, gate_center=3.0), aux=("raw_scores",))


def test_finish_with_class_is_cheaper() -> None:
    full = check(tiny("avit", gate_center=2.0))
    ended = check(tiny("avit", gate_center=2.0, finish_with_class=True))
    assert (ended.macs <= full.macs).all()
    assert (ended.macs < full.macs).any()


@settings(max_examples=8)
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=18, max_size=18), seed=st.integers(0, 99))
def test_random_answers(kinds: list[str], seed: int) -> None:
    model = tiny()
    model.policy = policies.build("replay", model.shape, {"trace": random_trace(kinds, seed)})
    check(model)


class Curious(adaptivit.Policy):
    """Looks at everything that can be looked at, and asks the head after every block."""

    def evidence(self, layer: int, aux: frozenset[str]) -> frozenset[str]:
        return frozenset({"received", "class_row", "keys", "similarity", "halted_row", "fc1"})

    def after(self, ctx: Any, state: None) -> Decision | None:
        ctx.logits()
        received, share = ctx.evidence["received"], ctx.evidence["class_row"]
        if ctx.layer == 2:  # an early exit of the second image, and the least attended of the others
            exit_second = torch.tensor([False, True, False])[:, None]
            leaving = (received < received.mean(-1, keepdim=True)) & (share < 0.05)
            leaving[:, : self.shape.num_prefix_tokens] = False
            return Drop(leaving | exit_second)
        return None


@pytest.mark.parametrize("kind", ["class", "distilled"])
def test_evidence_and_exits_are_counted(kind: str) -> None:
    """Exactly, and an exit is neither run nor charged for an image that has left."""
    model = tiny(kind=kind)
    model.policy = Curious(None, model.shape)
    ran, out = counted(model, pictures())
    assert ran == int(out.macs.sum())
    assert float(out.parts["evidence"][0]) > 0
