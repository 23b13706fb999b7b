"""Random sequences of answers run the same on every layout, and as a literal loop over tokens says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adaptivit import policies
from adaptivit.budget.control import RunSetting
from adaptivit.decision import AppliedDecision, Drop, Merge, Trace
from adaptivit.execution.torch import Executor
from adaptivit.forward import forward
from adaptivit.layouts import Gathered, GatheredOnDevice, Layout, Masked, Packed, PackedOnDevice
from adaptivit.output import Output
from tests.support.layouts import Still
from tests.support.models import assert_close, assert_same_run, pictures, tiny
from tests.support.traces import KINDS, literal_forward, merging, random_trace

LAYERS, SLOTS = 6, 17
RAGGED = (Masked, Packed, PackedOnDevice, Still)  # images may differ in length
EVERY = (*RAGGED, Gathered, GatheredOnDevice)
answers = st.lists(st.sampled_from(KINDS), min_size=3 * LAYERS, max_size=3 * LAYERS)


def run(model: Any, layout: type[Layout], images: Tensor) -> Output:
    return forward(Executor(model.backbone), layout, images, RunSetting(model.policy), ("tokens",))


def replayed(kind: str, trace: Trace) -> Any:
    model = tiny("static", kind)
    model.policy = policies.build("replay", model.shape, {"trace": trace})
    return model


def check_sequence(kind: str, trace: Trace, *layouts: type[Layout]) -> None:
    """The ragged layouts (or those given) and a literal loop over the tokens are one."""
    model = replayed(kind, trace)
    a, *others = (run(model, layout, pictures()) for layout in layouts or RAGGED)
    for b in others:
        assert_same_run(a, b)
        assert_close(a.tokens, b.tokens)
    readout, computed = literal_forward(model.vit, trace, pictures())
    assert torch.equal(a.trace.attended, computed)
    assert_close(a.logits, model.backbone.head(readout)[1])


@given(kinds=answers, seed=st.integers(0, 99), kind=st.sampled_from(["class", "deit3", "average"]))
@torch.no_grad()
def test_random_answers_run_the_same(kinds: list[str], seed: int, kind: str) -> None:
    check_sequence(kind, random_trace(kinds, seed, slots=16 if kind == "average" else SLOTS))


@given(kinds=answers, seed=st.integers(0, 99), kind=st.sampled_from(["class", "deit3", "average"]))
@torch.no_grad()
def test_equal_counts_run_the_same_on_gathered(kinds: list[str], seed: int, kind: str) -> None:
    trace = random_trace(kinds, seed, slots=16 if kind == "average" else SLOTS, equal=True)
    check_sequence(kind, trace, *EVERY)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", [0, 1, 2])
@torch.no_grad()
def test_every_answer_alone(kind: str, when: int) -> None:
    """Each kind of answer at each question, between layers in which others have left and sit out."""
    answers = ["none", "none", "drop"] + ["none"] * 15
    answers[6 + when], answers[9], answers[10 + when] = kind, "skip" if when == 2 else "none", kind
    check_sequence("class", random_trace(answers, 3, equal=True), *EVERY)


@pytest.mark.parametrize("kind", ["distilled", "registers", "average_with_class"])
@torch.no_grad()
def test_heads_that_read_more_than_one_slot(kind: str) -> None:
    slots = 16 + {"distilled": 2, "registers": 5}.get(kind, 1)
    for seed in range(3):
        kinds = ["none", "drop", "merge", "gate", "share", "drop_zeroed", "skip", "none", "merge_nowhere"] * 2
        trace = random_trace(kinds, seed, slots=slots, equal=True)
        check_sequence(kind, trace, *EVERY)


@torch.no_grad()
def test_sizes_survive_a_weighted_drop() -> None:
    """Merge makes sizes; a later Drop with 0/1 weights (straight-through) says who is present, not that sizes end."""
    check_sequence("class", random_trace(["keep"] * 4 + ["merge"] + ["drop_weight"] * 5 + ["keep"] * 8, 0))


@torch.no_grad()
def test_everything_dropped_before_the_first_block() -> None:
    gone = Drop(torch.ones(3, SLOTS, dtype=torch.bool))
    trace = random_trace(["none"] * 3 * LAYERS, 0)
    trace = Trace(trace.attended, trace.updated, 1, (AppliedDecision(0, "before", gone),))
    check_sequence("class", trace, *EVERY)


@torch.no_grad()
def test_a_leaking_dead_key_is_caught() -> None:
    """The comparison has teeth: a masked layout that lets dropped tokens be seen does not pass it."""

    class Leaky(Masked):
        def _key_weight(self) -> None:
            return None

    trace = random_trace(["none", "none", "drop"] + ["none"] * 15, 1)
    check_sequence("class", trace)
    with pytest.raises(AssertionError, match="not close"):
        check_sequence("class", trace, Leaky, Packed)


class Forgets(Gathered):
    """Takes the live rows of the wrong slots."""

    def _select(self, stay: Tensor, count: int | None) -> Tensor:
        return super()._select(stay.roll(1, 1), count)


class Sizeless(Gathered):
    """Does not know that merged tokens weigh more."""

    def _row_weight(self) -> None:
        return None


@pytest.mark.parametrize(("broken", "kind"), [(Forgets, "drop"), (Forgets, "merge"), (Sizeless, "merge")])
@torch.no_grad()
def test_a_broken_gathered_layout_is_caught(broken: type[Layout], kind: str) -> None:
    trace = random_trace(["none", kind, "none"] + ["none"] * 15, 1, equal=True)
    check_sequence("class", trace, Masked, Gathered)
    with pytest.raises(AssertionError, match=r"not close|other tokens"):
        check_sequence("class", trace, Masked, broken)


@pytest.mark.parametrize("own", [True, False])
def test_the_gradient_of_a_merge_reaches_its_weight(own: bool) -> None:
    """A folded token is told that it was needed: d out_i / d w_j = size_j exp(s_ij) / Z_i (v_j - out_i)."""
    g = torch.Generator().manual_seed(0)
    decision = merging(5, torch.ones(3, 5, dtype=torch.bool))
    stays = decision.target == torch.arange(5)
    weight = stays.float().requires_grad_()
    layout = Masked(torch.randn(3, 5, 6, generator=g), 5)
    layout.apply(
        Merge(decision.target, decision.source_weight, decision.size, key_weight=weight, self_key_grad=own), "between"
    )
    q, k, v, up = (torch.randn(3, 5, 2, 3, generator=g) / 2 for _ in range(4))
    out = layout.attend(q, k, v)
    (grad,) = torch.autograd.grad((out * up).sum(), weight)
    size = decision.size
    assert size is not None
    for b in range(3):
        for j in range(5):
            total = 0.0
            for h in range(2):
                for i in range(5):
                    e = [float(size[b, n]) * math.exp(float(q[b, i, h] @ k[b, n, h]) / 3**0.5) for n in range(5)]
                    z = sum(e[n] for n in range(5) if stays[b, n])
                    literal = sum(e[n] / z * v[b, n, h] for n in range(5) if stays[b, n])
                    assert_close(out[b, i, h].detach(), literal)
                    held = min(e[j] / float(size[b, j]) / z, 1.0)  # an absent key's share is held at 1
                    part = e[j] / z if stays[b, j] else held * float(size[b, j])
                    total += 0.0 if i == j and not own else float(part * (v[b, j, h] - literal) @ up[b, i, h])
            assert float(grad[b, j]) == pytest.approx(total, abs=1e-4)
