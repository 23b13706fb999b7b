"""Against numbers that others computed: A-ViT's public code, and timm on real weights. Skipped without ../shared."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

import adaptivit
from adaptivit.training.losses import Batch, DistributionPrior, Ponder, TaskLoss
from tests.support.models import LAYOUTS, assert_close, pictures, shared


def golden() -> dict[str, Any]:
    return torch.load(shared("golden/avit.pt"), weights_only=True)


def avit(data: dict[str, Any], case: dict[str, Any], **given: Any) -> Any:
    scale, center = case["gate"]
    model = adaptivit.create(dict(data["kwargs"]), "avit", gate_scale=scale, gate_center=center, **given)
    model.vit.load_state_dict(data["state_dict"])
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_avit_is_the_public_code(layout: str) -> None:
    data = golden()
    assert data["cases"]
    for case in data["cases"].values():
        model = avit(data, case)
        out = model(data["input"], layout=layout, aux=("raw_scores",))
        assert_close(out.logits, case["logits"], 1e-5)
        assert torch.equal(out.trace.depth, case["counter_token"].to(torch.long))
        assert torch.equal(out.trace.fact("halt"), out.trace.depth)
        ponder = Ponder()(out, Batch())
        assert_close(ponder, case["ponder"].to(ponder), 1e-5)
        rho = out.trace.fact("halt") + out.trace.fact("remainder")
        assert_close(rho, case["rho_token"].to(rho), 1e-5)
        assert_close(out.trace.fact("raw_scores").transpose(0, 1), case["h"], 1e-5)
        loss = TaskLoss()(out, Batch(case["target"])) + 5e-4 * ponder
        assert_close(loss, case["loss"].to(loss), 1e-5)
        loss.backward()
        for name, p in model.vit.named_parameters():
            assert_close(p.grad, case["grads"][name], 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_prior_in_its_reference_form(layout: str) -> None:
    """The public code's mean leaves the first image out; ours on the others is the same number."""
    data, prior = golden(), DistributionPrior("reference")
    for case in data["cases"].values():
        out = avit(data, case)(data["input"][1:], layout=layout, aux=prior.needs)
        loss = prior(out, Batch())
        assert_close(loss, case["distr_loss"].to(loss), 1e-5)
        assert_close(prior.reference_target(12).float(), case["distr_target"].float(), 1e-5)
        share = out.trace.fact("raw_scores").mean((1, 2))
        assert_close((share / share.sum()).clamp(0.01, 0.99), case["H_norm_clamped"].to(share), 1e-5)


@torch.no_grad()
def test_finishing_with_the_class_token_is_exact() -> None:
    data = golden()
    for case in data["cases"].values():
        out = avit(data, case, finish_with_class=True)(data["input"])
        assert_close(out.logits, case["logits"], 1e-5)
        ends = case["counter_token"][:, :1]
        assert torch.equal(out.trace.depth, torch.minimum(case["counter_token"], ends).to(torch.long))


@torch.no_grad()
def test_real_deit_tiny_is_timm() -> None:
    path = shared("weights/deit_tiny_patch16_224.safetensors")
    with torch.device("meta"):
        vit = timm.create_model("deit_tiny_patch16_224")
        mine = timm.create_model("deit_tiny_patch16_224")
    vit.load_state_dict({k: v.float() for k, v in load_file(path).items()}, assign=True)  # stored in float16
    mine.to_empty(device="cpu")
    model = adaptivit.create(mine, "static", weights=path)
    expected = vit.eval()(pictures(2, 224))
    for layout in LAYOUTS:
        assert_close(model(pictures(2, 224), layout=layout).logits, expected, 1e-5)
    halting = adaptivit.create(mine, "aht", weights=path, beta=-1.0)
    outs = [halting(pictures(2, 224), layout=layout) for layout in LAYOUTS]
    assert len(outs[0].trace.depth.unique()) > 2
    assert torch.equal(outs[0].trace.depth, outs[1].trace.depth)
    assert_close(outs[0].logits, outs[1].logits, 2e-5)
