"""Each policy means the same on every layout, for every image by itself, in bfloat16, and when everything halts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

import adaptivit
from adaptivit import policies
from adaptivit.output import Output
from adaptivit.training.losses import (
    Batch,
    Cost,
    Distillation,
    DistributionPrior,
    Objective,
    Ponder,
    TargetDepth,
    TaskLoss,
)
from tests.support.models import LAYOUTS, SIDES, TINY, assert_close, assert_same_run, pictures, tiny
from tests.support.policies import PAPERS
from tests.support.traces import random_trace

# (policy, settings): wild enough that depths differ between tokens of every backbone in SIDES
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "static": ("static", {}),
    "aht": ("aht", {"beta": -0.5}),
    "aht straight_through": ("aht", {"beta": -0.5, "straight_through": True}),
    "aht index": ("aht", {"index": 5, "beta": -1.0, "eps": 0.0}),
    "aht low threshold": ("aht", {"threshold": 0.5, "beta": -1.5, "gamma": 2.0, "planner_blocks": (2, 5)}),
    "aht_merge": ("aht_merge", {"feature": "received", "gamma": 2.0, "beta": -1.0}),
    "aht_merge residual": ("aht_merge", PAPERS | {"feature": "residual", "index": 3, "beta": -1.0, "removal": "drop"}),
    "aht high threshold": ("aht", {"threshold": 2.5, "gamma": 2.0, "beta": 0.0}),
    "avit": ("avit", {"gate_scale": 3.0, "gate_center": 2.0}),
    "avit finish_with_class": ("avit", {"gate_scale": 3.0, "gate_center": 2.0, "finish_with_class": True}),
}
HALTING = [name for name in POLICIES if name != "static"]
FIRST_LAYER = {  # everything that may halt does so in layer 1
    "avit": ("avit", {"gate_center": -200.0}),
    "aht": ("aht", {"gamma": 0.0, "beta": 50.0}),
    "aht straight_through": ("aht", {"gamma": 0.0, "beta": 50.0, "straight_through": True}),
}
TERMS: dict[str, Any] = {
    "cross_entropy": TaskLoss(),
    "smoothed": TaskLoss(0.1),
    "distillation": Distillation(),
    "ponder": Ponder(),
    "prior": DistributionPrior(depth=4.0),
    "budget": Cost(0.6),
    **{
        f"{form} {way}": TargetDepth(form=form, direction=way)  # type: ignore[arg-type]
        for form in ("act", "hazard", "crossing")
        for way in ("actual_target", "target_actual")
    },
}


def make(name: str, kind: str = "class", **more: Any) -> Any:
    policy, given = POLICIES[name]
    return tiny(policy, kind, **given, **more)


def replay(model: Any, output: Output) -> Any:
    """The same backbone, told what to do by a recorded trace."""
    model.policy = policies.build("replay", model.shape, {"trace": output.trace})
    return model


@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_layouts_agree(name: str, kind: str) -> None:
    if (name, kind) == ("avit finish_with_class", "average"):
        with pytest.raises(adaptivit.UserError, match="finish_with_class"):
            make(name, kind)
        return
    model = make(name, kind)
    ask = ("plan", "raw_scores", "tokens")
    a, b = (model(pictures(5), layout=layout, aux=ask) for layout in LAYOUTS)
    assert_same_run(a, b, 2e-5)
    assert torch.equal(a.trace.depth, b.trace.depth)
    assert torch.equal(a.trace.live, b.trace.live)
    assert a.trace.facts.keys() == b.trace.facts.keys()
    for fact, value in a.trace.facts.items():
        assert_close(value, b.trace.facts[fact], 2e-5)
    assert_close(a.tokens, b.tokens, 2e-5)
    if name in HALTING:
        assert len(a.trace.depth.unique()) > 2, "this proof wants tokens of different depths"
        patches = a.trace.fact("halts")
        assert torch.equal(a.trace.depth[patches], a.trace.fact("halt")[patches])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_an_image_alone_is_the_image_in_a_batch(name: str, layout: str) -> None:
    model, images = make(name), pictures(4)
    together = model(images, layout=layout)
    for i in range(4):
        alone = model(images[i : i + 1], layout=layout)
        assert torch.equal(alone.trace.attended[:, 0], together.trace.attended[:, i])
        assert_close(alone.logits[0], together.logits[i], 2e-5)
        assert float(alone.macs) == float(together.macs[i])


@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("name", ["aht straight_through", "avit"])
def test_replay_of_a_training_pass(name: str, kind: str, tmp_path: Path) -> None:
    """What training decided, noise of stochastic depth included, runs the same on every layout, from a file too."""
    model = make(name, kind, drop_path_rate=0.4)
    torch.manual_seed(0)
    recorded = model.train()(pictures(4), layout="masked")
    assert recorded.logits.requires_grad
    adaptivit.save_trace(recorded.trace, tmp_path / "trace.safetensors")
    loaded = adaptivit.load_trace(tmp_path / "trace.safetensors")
    assert torch.equal(loaded.attended, recorded.trace.attended)
    assert torch.equal(loaded.updated, recorded.trace.updated)
    assert loaded.num_prefix_tokens == recorded.trace.num_prefix_tokens
    for one, other in zip(recorded.trace.steps, loaded.steps, strict=True):
        assert (one.layer, one.when, type(one.decision)) == (other.layer, other.when, type(other.decision))
        for field in dataclasses.fields(one.decision):
            a, b = getattr(one.decision, field.name), getattr(other.decision, field.name)
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    replay(model.eval(), dataclasses.replace(recorded, trace=loaded))
    with torch.no_grad():
        a, b = (model(pictures(4), layout=layout) for layout in LAYOUTS)
    assert torch.equal(a.trace.attended, recorded.trace.attended)
    assert_same_run(a, b, 2e-5)


@pytest.mark.parametrize("seed", range(3))
def test_stochastic_depth_is_the_same_on_both_layouts(seed: int) -> None:
    """The noise is drawn per image, so one seed means one pass however rows are stored."""
    model = replay(tiny(drop_path_rate=0.5).train(), dataclasses.replace(_any(), trace=_some_trace(seed)))
    outs = []
    for layout in LAYOUTS:
        torch.manual_seed(seed)
        outs.append(model(pictures(), layout=layout))
    assert_same_run(*outs)


def _some_trace(seed: int) -> adaptivit.Trace:
    return random_trace(["keep", "drop", "none", "gate", "none", "merge"] * 3, seed)


def _any() -> Output:
    with torch.no_grad():
        return tiny()(pictures(1))


def test_trace_files_keep_every_kind_of_answer(tmp_path: Path) -> None:
    trace = _some_trace(3)
    adaptivit.save_trace(trace, tmp_path / "a.safetensors")
    for place in (str(tmp_path / "a.safetensors"), tmp_path / "a.safetensors"):
        model = adaptivit.create(TINY, "replay", trace=place)
        for one, other in zip(trace.steps, [model.policy.answers[(s.layer, s.when)] for s in trace.steps], strict=True):
            for field in dataclasses.fields(one.decision):
                a, b = getattr(one.decision, field.name), getattr(other, field.name)
                assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("name", HALTING)
@torch.no_grad()
def test_finite_at_batch_one(name: str) -> None:
    for layout in LAYOUTS:
        out = make(name)(pictures(1), layout=layout)
        assert out.logits.shape == (1, 10)
        assert out.logits.isfinite().all()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("name", FIRST_LAYER)
def test_everything_halting_in_layer_one_is_finite(name: str, kind: str, batch: int) -> None:
    policy, given = FIRST_LAYER[name]
    model = tiny(policy, kind, **given)
    terms = {n: (1.0, t) for n, t in TERMS.items() if policy == "aht" or not isinstance(t, TargetDepth)}
    if policy == "avit":
        terms["reference"] = (1.0, DistributionPrior("reference", depth=4.0))
    objective = Objective(terms)
    known = Batch(torch.arange(batch), torch.randn(batch, 10, generator=torch.Generator().manual_seed(0)))
    for layout in LAYOUTS:
        model.zero_grad()
        out = model(pictures(batch), layout=layout, aux=objective.needs)
        assert (out.trace.depth[out.trace.fact("halts")] == 1).all()
        losses = objective(out, known)
        losses.check_finite(0)
        losses.total.backward()  # a NaN of one term does not vanish in their sum
        for parameter, p in model.named_parameters():
            assert p.grad is None or p.grad.isfinite().all(), f"gradient of {parameter} on {layout}"
        if policy == "aht":
            later = out.trace.fact("planned")[out.trace.fact("stages") > 1]
            assert not later.any(), "no patch is left at the later stages"


@pytest.mark.parametrize("name", ["aht", "avit", "avit finish_with_class"])
@torch.no_grad()
def test_bfloat16_under_replay(name: str) -> None:
    """With the decisions given, layouts differ only by rounding: 8 bits of mantissa over 6 layers."""
    model = make(name)
    recorded = model(pictures(4))
    replay(model, recorded)
    full = model(pictures(4), layout="masked").logits
    model.to(torch.bfloat16)
    a, b = (model(pictures(4).bfloat16(), layout=layout) for layout in LAYOUTS)
    assert a.logits.dtype == torch.bfloat16
    assert torch.equal(a.trace.attended, b.trace.attended)
    assert_close(a.logits.float(), b.logits.float(), 4e-2)
    assert_close(a.logits.float(), full, 1e-1)


def flip_rate(model: Any, images: Tensor) -> float:
    """Share of (layer, token) decisions that bfloat16 takes otherwise than float32."""
    before = model(images).trace.attended
    after = model.to(torch.bfloat16)(images.bfloat16()).trace.attended
    model.float()
    return float((before != after).float().mean())


@pytest.mark.parametrize("name", ["aht", "avit"])
@torch.no_grad()
def test_rate_of_decisions_flipped_by_bfloat16(name: str) -> None:
    rate = flip_rate(make(name), pictures(16))
    print(f"{name}: {rate:.4%} of decisions flip in bfloat16")
    assert 0 <= rate <= 1


@pytest.mark.parametrize("straight_through", [True, False])
def test_task_gradient_reaches_the_gate_only_straight_through(straight_through: bool) -> None:
    model = tiny("aht", beta=-0.5, straight_through=straight_through)
    loss = TaskLoss()(model(pictures(), layout="masked"), Batch(torch.arange(3)))
    gamma, beta = torch.autograd.grad(loss, [model.policy.gamma, model.policy.beta], allow_unused=True)
    for grad in (gamma, beta):
        assert (grad is not None and float(grad) != 0) == straight_through
    # and the forward pass does not know the difference
    other = tiny("aht", beta=-0.5, straight_through=not straight_through)
    assert_same_run(model(pictures(), layout="masked"), other(pictures(), layout="masked"))


@torch.no_grad()
def test_finishing_with_the_class_token_keeps_the_logits() -> None:
    for kind in ("class", "distilled", "registers"):
        a, b = (make(name, kind)(pictures(6)) for name in ("avit", "avit finish_with_class"))
        assert_close(a.logits, b.logits)
        ends = a.trace.depth[:, : 2 if kind == "distilled" else 1].amax(-1, keepdim=True)
        assert torch.equal(b.trace.depth, torch.minimum(a.trace.depth, ends))


@pytest.mark.parametrize("damage", ["cut", "no steps", "no tensors", "unknown answer"])
def test_damaged_traces_are_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    steps = [[0, "before", "Vanish", {}]] if damage == "unknown answer" else []
    meta = {"format": "adaptivit-trace-1", "prefix": "1", "steps": json.dumps(steps)}
    tensors = {"attended": torch.zeros(6, 3, 17), "updated": torch.zeros(6, 3, 17)}
    if damage == "no steps":
        del meta["steps"]
    data = to_bytes({} if damage == "no tensors" else tensors, metadata=meta)
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    with pytest.raises(adaptivit.UserError, match=r"bad\.safetensors"):
        adaptivit.load_trace(path)
