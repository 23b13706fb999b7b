"""Where the head reads a class token alone, patches are left out of the last MLP: nothing reads them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivit.decision import AppliedDecision, Drop, Merge, Trace
from adaptivit.evaluation import halting_profiles
from adaptivit.execution.cpu import CpuExecutor
from adaptivit.execution.torch import Executor
from adaptivit.model import AdaptiveViT
from adaptivit.policies.aht import AHT
from adaptivit.policies.static import Static
from tests.support.models import assert_close, pictures, tiny

ASKED = {"tokens", "patches"}
QUIET: dict[str, tuple[str, dict[str, Any]]] = {
    "static": ("static", {}),
    "aht": ("aht", {"gamma": 2.0, "beta": -3.5}),
    "aht_merge": ("aht_merge", {"gamma": 2.0, "beta": -1.0}),
    "evit": ("evit", {}),
    "dynamicvit": ("dynamicvit", {}),
    "spvit": ("spvit", {}),
    "tome": ("tome", {"r": 2}),
    "fold": ("fold", {"keep": 0.8}),
    "amod, last block dense": ("amod", {"blocks": (1,)}),
}
LOUD: dict[str, tuple[str, dict[str, Any]]] = {
    "avit": ("avit", {"gate_scale": 2.0, "gate_center": 0.5}),
    "act": ("act", {"bias": -0.5}),
    "confidence": ("confidence", {"threshold": 0.9}),
    "static, cut": ("static", {"depth": 3}),
    "mod": ("mod", {}),
}


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every MLP that ran."""
    rows: list[int] = []
    for owner in (Executor, CpuExecutor):
        inner = owner.mlp

        def run(self: Any, block: Any, layout: Any, *rest: Any, inner: Any = inner) -> None:
            rows.append(layout.rows.flatten(0, -2).shape[0])
            inner(self, block, layout, *rest)

        monkeypatch.setattr(owner, "mlp", run)
    return rows


def compact(model: AdaptiveViT) -> tuple[str, ...]:
    return ("packed", "gathered") if model.policy.traits.fixed_counts else ("packed",)


def run(model: AdaptiveViT, images: Tensor, layout: str, fed: list[int], aux: Collection[str] = ()) -> Any:
    fed.clear()
    with torch.inference_mode():
        return model(images, layout=layout, aux=aux)


@pytest.mark.parametrize("kind", ["class", "distilled"])
@pytest.mark.parametrize("case", QUIET)
def test_the_last_mlp_takes_what_is_read(case: str, kind: str, fed: list[int]) -> None:
    name, settings = QUIET[case]
    model, images = tiny(name, kind, **settings), pictures(3)
    whole = run(model, images, "masked", fed)
    assert not whole.prefix_only_mlp
    assert torch.equal(whole.macs_ran, whole.macs)
    for layout in compact(model):
        found = run(model, images, layout, fed)
        assert fed[-1] == 3 * model.shape.head_tokens
        assert found.prefix_only_mlp
        assert found.layout == layout
        assert_close(found.logits, whole.logits)
        assert_close(found.features, whole.features)
        assert torch.equal(found.macs, whole.macs)
        assert (found.macs_ran < found.macs).any()
        assert torch.equal(found.trace.updated, whole.trace.updated)


@pytest.mark.parametrize("asked", sorted(ASKED))
@pytest.mark.parametrize("case", QUIET)
def test_whoever_asks_gets_the_whole_block(case: str, asked: str, fed: list[int]) -> None:
    name, settings = QUIET[case]
    model, images = tiny(name, **settings), pictures(3)
    whole = run(model, images, "masked", fed, {asked})
    for layout in compact(model):
        found = run(model, images, layout, fed, {asked})
        assert fed[-1] == int(found.trace.live_mlp[-1].sum())
        assert not found.prefix_only_mlp
        assert_close(getattr(found, asked), getattr(whole, asked))


def test_it_can_be_switched_off(fed: list[int]) -> None:
    model = tiny()
    model.full_last_mlp = True
    assert not run(model, pictures(2), "packed", fed).prefix_only_mlp
    assert fed[-1] == 2 * model.shape.tokens


@pytest.mark.parametrize("case", LOUD)
def test_what_is_read_at_the_end_is_computed(case: str, fed: list[int]) -> None:
    name, settings = LOUD[case]
    model, images = tiny(name, **settings), pictures(3)
    whole = run(model, images, "masked", fed)
    for layout in compact(model):
        found = run(model, images, layout, fed)
        assert not found.prefix_only_mlp
        assert torch.equal(found.macs_ran, found.macs)
        assert_close(found.logits, whole.logits)
        for fact, value in whole.trace.facts.items():
            assert_close(found.trace.facts[fact], value)


def test_a_head_that_pools_reads_them_all(fed: list[int]) -> None:
    model = tiny("static", "average")
    assert not run(model, pictures(2), "packed", fed).prefix_only_mlp
    assert fed[-1] == 2 * model.shape.tokens


@pytest.mark.parametrize("batch", [1, 3, 40])
def test_replays_leave_them_out_too(batch: int, fed: list[int]) -> None:
    trace = halting_profiles.drawn_trace([1.0, 0.9, 0.8, 0.6, 0.4, 0.3], batch, 17, seed=batch)
    model = AdaptiveViT(tiny().vit, "replay", {"trace": trace}).eval()
    whole = run(model, pictures(batch), "masked", fed)
    found = run(model, pictures(batch), "packed", fed)
    assert found.prefix_only_mlp
    assert fed[-1] == batch
    assert_close(found.logits, whole.logits)


def test_a_replay_that_answers_at_the_end_is_carried_out(fed: list[int]) -> None:
    leaving = torch.zeros(2, 17, dtype=torch.bool)
    leaving[:, 5:] = True
    every = torch.ones(6, 2, 17, dtype=torch.bool)
    trace = Trace(every, every, 1, (AppliedDecision(5, "after", Drop(leaving)),))
    model = AdaptiveViT(tiny().vit, "replay", {"trace": trace}).eval()
    assert not run(model, pictures(2), "packed", fed).prefix_only_mlp


def test_gradients_are_the_same() -> None:
    model = tiny("fold", keep=0.8).eval()
    grads = []
    for layout in ("masked", "gathered"):
        model.zero_grad()
        model(pictures(3), layout=layout).logits.pow(2).sum().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, value in grads[0].items():
        assert_close(grads[1][name], value)


def test_a_backbone_in_training_goes_all_the_way() -> None:
    for name, given in (("fold", {"keep": 0.8}), ("static", {})):
        model = tiny(name, more={"drop_path_rate": 0.2}, **given).train()
        model.policy.eval()
        assert not model(pictures(2), layout="gathered").prefix_only_mlp


def test_one_graph_of_gathered() -> None:
    torch._dynamo.reset()
    for name in ("static", "fold"):
        model = tiny(name, more={"depth": 3}).eval()
        with torch.no_grad():
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            assert_close(compiled(pictures(3), layout="gathered").logits, model(pictures(3), layout="masked").logits)
    torch._dynamo.reset()


def test_budgets_that_cut_some_images() -> None:
    model, images = tiny().eval(), pictures(4)
    model.calibrate(images)
    with torch.inference_mode():
        alone = {b: model(images[:1], layout="packed", budget=b).macs_ran[0] for b in ("none", "-50%")}
        for budgets in (["none", "-50%"] * 2, ["-50%", "none"] * 2):
            found = model(images, layout="packed", budget=budgets)
            assert torch.equal(found.macs_ran, torch.stack([alone[b] for b in budgets]))
            assert (found.macs_ran <= found.macs).all()


class Watching(Static):
    """Keeps what it sees, which an executor in place may write to, and reads a patch at the end."""

    def init_state(self, ctx: Any) -> Any:
        return []

    def after(self, ctx: Any, state: Any) -> None:
        state.append(ctx.image())
        ctx.channel(0)

    def facts(self, state: Any) -> dict[str, Tensor]:
        return {"seen": torch.stack(state)}


@pytest.mark.parametrize("batch", [1, 3])
def test_what_a_policy_keeps_stays_as_it_was(batch: int, fed: list[int]) -> None:
    model, images = tiny(), pictures(batch)
    model.policy = Watching(model.policy.settings, model.shape)
    model.policy.traits = replace(model.policy.traits, ignores_last_mlp_patches=False)
    model.eval()
    whole = run(model, images, "masked", fed)
    for layout in ("packed", "gathered"):
        found = run(model, images, layout, fed)
        assert not found.prefix_only_mlp
        assert_close(found.trace.facts["seen"], whole.trace.facts["seen"])


class DropsAtTheEnd(Static):
    def after(self, ctx: Any, state: Any) -> Any:
        return Drop(torch.zeros_like(ctx.present)) if ctx.last else None


class DropsThePrefix(Static):
    def after(self, ctx: Any, state: Any) -> Any:
        return Drop(torch.arange(ctx.present.shape[1]).expand(ctx.present.shape) < 1) if ctx.layer == 1 else None


class MergesThePrefix(Static):
    def between(self, ctx: Any, state: Any) -> Any:
        target = torch.arange(ctx.present.shape[1]).expand(ctx.present.shape).clamp_min(1)
        return Merge(target, torch.ones(target.shape)) if ctx.layer == 1 else None


class AsksEarly(AHT):
    def between(self, ctx: Any, state: Any) -> None:
        ctx.over_limit(ctx.present, torch.zeros(ctx.present.shape))


@pytest.mark.parametrize(
    ("policy", "trait"),
    [
        (Watching, "ignores_last_mlp_patches"),
        (DropsAtTheEnd, "ignores_last_mlp_patches"),
        (DropsThePrefix, "keeps_prefix"),
        (MergesThePrefix, "keeps_prefix"),
        (AsksEarly, "decides_before_mlp"),
    ],
)
def test_a_wrong_trait_is_an_error(policy: Any, trait: str) -> None:
    model = tiny("aht" if policy is AsksEarly else "static")
    model.policy = policy(model.policy.settings, model.shape)
    model.eval()
    limit = "-20%" if policy is AsksEarly else None
    with torch.inference_mode(), pytest.raises(ValueError, match=trait):
        model(pictures(2), layout="packed", max_macs=limit)


def test_a_replay_for_more_prefix_tokens_than_its_trace(fed: list[int]) -> None:
    leaving = torch.zeros(2, 18, dtype=torch.bool)
    leaving[:, 1] = True  # the distillation token, which the head reads
    here = torch.ones(6, 2, 18, dtype=torch.bool)
    here[3:, :, 1] = False
    trace = Trace(here, here, 1, (AppliedDecision(2, "after", Drop(leaving)),))
    model = AdaptiveViT(tiny(kind="distilled").vit, "replay", {"trace": trace}).eval()
    assert_close(run(model, pictures(2), "packed", fed).logits, run(model, pictures(2), "masked", fed).logits)
