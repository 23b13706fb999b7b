"""Blocks in place on a CPU: the same as timm's modules, and no other tensors change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adaptivit
from adaptivit.execution import cpu as lean
from adaptivit.execution.cpu import CpuExecutor
from adaptivit.execution.torch import Executor
from adaptivit.layouts import packed
from adaptivit.model import AdaptiveViT
from adaptivit.output import Output
from tests.support.models import TINY, assert_close, assert_same_run, pictures, randomise, tiny
from tests.support.policies import PAPERS
from tests.support.traces import random_trace

HALTING = {"gamma": 2.0, "beta": -1.5}
BACKBONES: dict[str, dict[str, Any]] = {
    "plain": {},
    "layer scale": {"init_values": 0.5},
    "no bias": {"qkv_bias": False, "proj_bias": False, "pre_norm": True},
    "distilled": {"distilled": True},
    "registers": {"reg_tokens": 2, "no_embed_class": True, "init_values": 0.5},
    "average": {"global_pool": "avg"},
    "average without a class token": {"global_pool": "avg", "class_token": False},
    "map": {"global_pool": "map", "class_token": False},
    "any size": {"dynamic_img_size": True},
    "any size without a class token": {"dynamic_img_size": True, "global_pool": "avg", "class_token": False},
    "images that are no whole patches": {"img_size": 36},
}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "static": ("static", {}),
    "aht": ("aht", HALTING),
    "aht_merge": ("aht_merge", PAPERS | HALTING),
    "avit": ("avit", {"gate_scale": 2.0, "gate_center": 0.5}),
    "tome": ("tome", {"r": 3}),
    "fold": ("fold", {"keep": 0.8}),
    "evit": ("evit", {}),
    "amod": ("amod", {"multiply": True}),
    "mod": ("mod", {}),
    "dynamicvit": ("dynamicvit", {}),
    "act": ("act", {"bias": -0.5}),
    "confidence": ("confidence", {"threshold": 0.4}),
    "similarity": ("similarity", {"threshold": 0.3}),
    "similarity of tokens": ("similarity", {"threshold": 1.5, "of": "token"}),
    "pondernet": ("pondernet", {"gate_scale": 1.0, "gate_center": 1.0}),
}
policies = pytest.mark.parametrize("case", POLICIES)
ASK = {"avit": ("raw_scores",), "aht": ("plan",)}


def make(case: str = "static", kind: str = "plain", more: dict[str, Any] | None = None) -> AdaptiveViT:
    """A model with random weights, the policy's too, but for its gate."""
    name, given = POLICIES[case]
    model: AdaptiveViT = tiny(name, more=BACKBONES[kind] | (more or {}), **given)
    gate = {k: p.detach().clone() for k, p in model.policy.named_parameters() if p.ndim == 0}
    randomise(model.policy, 1)
    model.policy.load_state_dict(gate, strict=False)
    return model


def images_of(model: AdaptiveViT, batch: int = 4, seed: int = 0) -> Tensor:
    """Unlike enough to leave at different blocks."""
    size = model.backbone.image_size[0]
    return pictures(batch, size, seed) * torch.linspace(0.3, 3.0, batch)[:, None, None, None]


def compact(model: AdaptiveViT) -> tuple[str, ...]:
    return ("packed", "gathered") if model.policy.traits.fixed_counts else ("packed",)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """Which functions ran since it was last asked."""
    seen: set[str] = set()

    def noted(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def run(*given: Any) -> Any:
            seen.add(owner.__name__)
            return inner(*given)

        monkeypatch.setattr(owner, name, run)

    for owner in (CpuExecutor, Executor):
        for name in ("attention", "mlp"):
            noted(owner, name)

    def asked() -> set[str]:
        found = set(seen)
        seen.clear()
        return found

    return asked


def check(model: AdaptiveViT, images: Tensor, ran: Callable[[], set[str]], ask: tuple[str, ...] = ()) -> Output:
    """In place on every compact layout, as timm's modules on `masked`."""
    with torch.inference_mode():
        expected: Output = model(images, layout="masked", aux=ask)
        assert ran() == {"Executor"}
        for layout in compact(model):
            found = model(images, layout=layout, aux=ask)
            assert ran() == {"CpuExecutor"}
            assert found.layout == layout
            assert_same_run(found, expected)
            assert set(found.trace.facts) == set(expected.trace.facts)
            for name, fact in expected.trace.facts.items():
                assert_close(found.trace.facts[name], fact)
            if expected.tokens is not None:
                assert_close(found.tokens, expected.tokens)
    return expected


# -- the same -------------------------------------------------------------------------------------------------------
@policies
@pytest.mark.parametrize("kind", ["plain", "layer scale"])
@pytest.mark.parametrize("inside", [True, False])
def test_policies(
    case: str, kind: str, inside: bool, ran: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With either place for a bias, whatever this processor takes."""
    monkeypatch.setattr(lean, "BIAS_INSIDE", inside)
    model = make(case, kind)
    output = check(model, images_of(model), ran, ASK.get(case, ()))
    assert output.trace.attended.all() == (case == "static")


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("case", ["static", "avit", "tome", "amod"])
@pytest.mark.parametrize("inside", [True, False])
def test_backbones(
    case: str, kind: str, inside: bool, ran: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean, "BIAS_INSIDE", inside)
    model = make(case, kind)
    check(model, images_of(model), ran, ("tokens",))


@pytest.mark.parametrize("form", ["channels last", "a ctx"])
def test_images_in_another_order(form: str, ran: Callable[[], set[str]]) -> None:
    model = make("aht")
    images = images_of(model)
    other = images.to(memory_format=torch.channels_last) if form == "channels last" else images.mT.contiguous().mT
    assert not other.is_contiguous()
    check(model, other, ran)
    with torch.inference_mode():
        assert_same_run(model(other), model(images))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = make("aht", "layer scale").to(dtype)
    images = images_of(model).to(dtype)
    with torch.inference_mode():
        found = model(images, layout="packed")
        replay = AdaptiveViT(copy.deepcopy(model.vit).double(), "replay", {"trace": found.trace}).eval()
        expected = replay(images.double(), layout="masked")
    assert found.logits.dtype == dtype
    assert_close(found.logits.double(), expected.logits, 1e-9 if dtype == torch.float64 else 5e-2)


# -- in place, but only its own -------------------------------------------------------------------------------------
def tensors(output: Output) -> list[Tensor]:
    """Everything that an answer holds."""
    trace = output.trace
    found = [output.logits, output.features, trace.attended, trace.updated, *trace.facts.values()]
    found += [s.present for s in output.added_macs]
    found += [t for t in (output.tokens, output.patches) if t is not None]
    return found + [t for step in trace.steps for t in vars(step.decision).values() if isinstance(t, Tensor)]


@policies
@pytest.mark.parametrize("kind", ["plain", "average"])
def test_nothing_else_is_modified(case: str, kind: str) -> None:
    model = make(case, kind)
    first, second = images_of(model), images_of(model, seed=1)
    ask = (*ASK.get(case, ()), "tokens", "patches")
    given = [first, second, *model.state_dict().values()]
    before = [t.clone() for t in given]
    with torch.inference_mode():
        for layout in compact(model):
            output = model(first, layout=layout, aux=ask)
            kept = [t.clone() for t in tensors(output)]
            other = model(second, layout=layout, aux=ask)
            assert not torch.equal(other.logits, output.logits)
            again = model(first, layout=layout, aux=ask)
            for now, then, repeated in zip(tensors(output), kept, tensors(again), strict=True):
                assert torch.equal(now, then)
                assert torch.equal(repeated, then)
    for now, then in zip(given, before, strict=True):
        assert torch.equal(now, then)


# -- when it does not run -------------------------------------------------------------------------------------------
def test_gradients_keep_timms_modules(ran: Callable[[], set[str]]) -> None:
    """And the answer is the same with, without and beyond them."""
    for case in ("avit", "tome", "amod"):
        model = make(case, "layer scale")
        images = images_of(model)
        for layout in compact(model):
            with torch.inference_mode():
                expected = model(images, layout=layout)
            assert ran() == {"CpuExecutor"}
            with torch.no_grad():
                assert_same_run(model(images, layout=layout), expected)
            assert ran() == {"CpuExecutor"}
            with torch.enable_grad():
                found = model(images, layout=layout)
            assert ran() == {"Executor"}
            assert_same_run(found, expected)
            found.logits.sum().backward()
            assert model.vit.blocks[0].attn.qkv.weight.grad is not None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "norms of q and k": ({"qk_norm": True}, "norms or gates inside"),
    "a norm in the MLP": ({"scale_mlp_norm": True}, "norms or gates inside"),
    "another activation": ({"act_layer": "relu"}, "activation is ReLU"),
    "another GELU": ({"act_layer": "gelu_tanh"}, "activation is"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_models_run_without(what: str, ran: Callable[[], set[str]]) -> None:
    change, reason = REFUSED[what]
    model = make("aht", more=change)
    images = images_of(model)
    with torch.inference_mode():
        assert reason in str(lean.refusal(model.backbone, torch.device("cpu")))
        found = model(images, layout="packed")
        assert ran() == {"Executor"}
        assert_same_run(found, model(images, layout="masked"))
    assert "packed on cpu with PyTorch modules" in model.explain_layout()


def test_the_layout_is_explained() -> None:
    model = make("static")
    assert "gathered on cpu with products in place" in model.explain_layout()
    assert "masked on cpu with PyTorch modules" in model.explain_layout("masked")
    assert "PyTorch modules" in model.train().explain_layout("packed")


def test_refusals_that_are_not_the_models(ran: Callable[[], set[str]]) -> None:
    model, cpu = make("aht"), torch.device("cpu")
    backbone, images = model.backbone, images_of(model)
    assert "gradients are on" in str(lean.refusal(backbone, cpu))
    with torch.inference_mode():
        assert lean.refusal(backbone, cpu) is None
        assert "not on a CPU" in str(lean.refusal(backbone, torch.device("cuda")))
        with torch.autocast("cpu", torch.bfloat16):
            assert "autocast is on" in str(lean.refusal(backbone, cpu))
            assert model(images, layout="packed").logits.isfinite().all()
        assert ran() == {"Executor"}
        expected = model(images)
        assert ran() == {"CpuExecutor"}
        assert_same_run(model.train()(images, layout="packed"), expected)  # dropout may be on
        assert ran() == {"Executor"}


def test_norms_that_are_no_layer_norms(ran: Callable[[], set[str]]) -> None:
    model = adaptivit.create(TINY, "static")
    model.vit.blocks[2].norm2 = nn.LayerNorm(24, elementwise_affine=False)
    with torch.inference_mode():
        assert "its norms are" in str(lean.refusal(model.backbone, torch.device("cpu")))
        model(pictures(2))
    assert ran() == {"Executor"}


# -- packed: images in their order, or in that of their length ------------------------------------------------------
TRACES = {
    "drop": ["none", "drop", "none", "none", "none", "drop_zeroed", *["none"] * 6, "drop_all", *["none"] * 5],
    "skip": ["skip", "none", "none", "gate", "none", "drop", "gate", "none", "none", "skip_all", *["none"] * 8],
    "merge": ["none", "merge", "none", "none", "none", "merge_nowhere", "skip", "none", "merge_unsized", *["none"] * 9],
}
both = pytest.mark.parametrize("few", [1, 100], ids=["sorted", "as they come"])


@both
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("seed", range(3))
def test_replays_in_either_order(name: str, few: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "FEW", few)
    model = AdaptiveViT(make("static").vit, "replay", {"trace": random_trace(TRACES[name], seed, 5)}).eval()
    images = pictures(5)
    with torch.inference_mode():
        found, expected = (model(images, layout=layout, aux=("tokens",)) for layout in ("packed", "masked"))
    assert len(set(expected.trace.live[-1].tolist())) > 1 or name == "skip"
    assert_same_run(found, expected)
    assert_close(found.tokens, expected.tokens)


@both
@pytest.mark.parametrize("case", ["aht", "aht_merge", "avit", "fold", "amod", "confidence"])
def test_policies_in_either_order(
    case: str, few: int, monkeypatch: pytest.MonkeyPatch, ran: Callable[[], set[str]]
) -> None:
    monkeypatch.setattr(packed, "FEW", few)
    model = make(case)
    check(model, images_of(model, 7), ran, (*ASK.get(case, ()), "tokens"))


@pytest.mark.parametrize("case", ["avit", "tome", "amod"])
def test_many_images_are_their_parts(case: str) -> None:
    model = make(case)
    images = images_of(model, packed.FEW + 8)
    with torch.inference_mode():
        whole = model(images, layout="packed")
        parts = [model(part, layout="packed") for part in images.split(20)]
    assert_close(whole.logits, torch.cat([part.logits for part in parts]))
    assert torch.equal(whole.trace.attended, torch.cat([part.trace.attended for part in parts], 1))


class Louder(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


def test_replaced_and_hooked_layers_are_called() -> None:
    replaced, hooked = make(), make()
    ffn: Any = replaced.vit.blocks[1].mlp
    louder = Louder(ffn.fc1.in_features, ffn.fc1.out_features)
    ffn.fc1 = louder
    hooked.vit.blocks[0].attn.qkv.register_forward_hook(lambda module, given, out: 2.0 * out)
    for model in (replaced, hooked):
        images = images_of(model)
        with torch.inference_mode():
            assert "replaced" in (lean.refusal(model.backbone, torch.device("cpu")) or "")
            assert_close(model(images, layout="packed").logits, model(images, layout="masked").logits)
