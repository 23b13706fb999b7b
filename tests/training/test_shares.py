"""A batch in parts is the batch: losses, gradients and what is random, for every objective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adaptivit import tasks
from adaptivit.data.dataset import Loaded
from adaptivit.execution.torch import Executor
from adaptivit.training import optim
from adaptivit.training.losses import (
    Batch,
    Cost,
    Distillation,
    DistributionPrior,
    Exits,
    Expected,
    Features,
    Geometric,
    KeepRatio,
    Objective,
    Ponder,
    SelfDistillation,
    Sums,
    TargetDepth,
    TaskLoss,
)
from adaptivit.training.micro_batch import GlobalBatch, rows
from adaptivit.training.run import build_objective
from adaptivit.training.step import StepStats, Trainer
from adaptivit.utils.batch_rng import BatchSlice, draw, drawing
from tests.support.models import pictures, tiny
from tests.support.policies import PAPERS
from tests.support.training import named

AHT: dict[str, Any] = {"beta": -1.0, "straight_through": True}
AVIT: dict[str, Any] = {"gate_scale": 1.0, "gate_center": 2.0}


class Own:
    """A term of one's own that knows nothing of sums: a mean over images."""

    needs: frozenset[str] = frozenset()

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        return output.logits.float().pow(2).mean()


TERMS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "cross_entropy": ("aht", AHT, TaskLoss(0.1)),
    "distillation": ("aht", AHT, Distillation()),
    "ponder": ("aht", AHT, Ponder()),
    "target_depth": ("aht", AHT, TargetDepth()),
    "prior": ("avit", AVIT, DistributionPrior(depth=3.0)),
    "prior_reference": ("avit", AVIT, DistributionPrior("reference", 3.0)),
    "budget": ("aht", AHT, Cost(0.5)),
    "ratio": ("dynamicvit", {}, KeepRatio()),
    "features": ("dynamicvit", {}, Features()),
    "exits": ("confidence", {}, Exits()),
    "self_distill": ("confidence", {"heads": "own"}, SelfDistillation()),
    "expected": ("pondernet", {}, Expected()),
    "geometric": ("pondernet", {}, Geometric()),
    "own": ("static", {}, Own()),
}


def gradients(model: Any) -> dict[str, Tensor]:
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], bound: float = 2e-5) -> None:
    assert first.keys() == second.keys()
    scale = max(float(v.abs().max()) for v in first.values())
    for name, value in first.items():
        assert float((value - second[name]).abs().max()) <= bound * scale, name


@pytest.mark.parametrize("name", TERMS)
def test_a_loss_of_parts_is_the_loss_of_the_whole(name: str) -> None:
    """Parts of 1, 2 and 3 images, summed, have the loss and the gradient of all six."""
    policy, settings, term = TERMS[name]
    model, wanted = tiny(policy, more={"depth": 4}, **settings).train(), Objective({"it": (1.0, term)})
    images, targets = pictures(6), torch.arange(6)
    with torch.no_grad():
        taught = tiny("static", more={"depth": 4}, seed=3)(images, aux=("patches",))

    def run(chosen: list[int], whole: Any = None) -> Any:
        known = Batch(targets[chosen], taught.logits[chosen], taught.patches[chosen])
        with drawing(BatchSlice(torch.tensor(chosen), 6), 5):
            return wanted(model(images[chosen], aux=wanted.needs), known, whole)

    def learnt(parts: list[list[int]], wholes: Sequence[Any]) -> tuple[list[float], dict[str, Tensor]]:
        model.zero_grad()
        every = [run(part, whole) for part, whole in zip(parts, wholes, strict=True)]
        for losses in every:
            losses.total.backward()
        return [float(losses.total.detach()) for losses in every], gradients(model)

    parts = [[4], [0, 3], [1, 2, 5]]
    (loss,), expected = learnt([[0, 1, 2, 3, 4, 5]], [None])
    with torch.no_grad():
        found = [run(part).sums["it"] for part in parts]
    total: Sums = {"it": torch.stack(found).sum(0)}
    losses, got = learnt(parts, [GlobalBatch(1, total)] * 3)
    assert losses == pytest.approx([loss] * 3, rel=1e-5)
    assert_same(expected, got)
    if wanted.plain:  # their number is enough, and each part has its part of the loss
        losses, got = learnt(parts, [GlobalBatch(1, images=torch.tensor(6.0))] * 3)
        assert sum(losses) == pytest.approx(loss, rel=1e-5)
        assert_same(expected, got)
    _, thrice = learnt(parts, [GlobalBatch(3, total)] * 3)  # the mean over three gets it back
    assert_same({k: 3 * v for k, v in expected.items()}, thrice)
    assert any(float(v.abs().max()) > 0 for v in expected.values()), "a gradient of nothing proves nothing"


def test_most_losses_of_parts_are_not_means_of_means() -> None:
    """What the sums are for: the mean of the parts' own losses is another number."""
    model = tiny("aht", more={"depth": 4}, **AHT).train()
    images = pictures(6)
    for term in (TargetDepth(), Cost(0.5)):
        whole, first, second = (
            float(term(model(x, aux=term.needs), Batch()).detach()) for x in (images, images[:2], images[2:])
        )
        assert abs(whole - (2 * first + 4 * second) / 6) > 1e-4 * whole


# -- a step in parts ------------------------------------------------------------------------------------------------
STEPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # policy, its settings, the configuration's
    "plain": ("static", {}, {"drop_path": 0.3, "label_smoothing": 0.1}),
    "aht": ("aht", AHT, {"target_depth": 0.1, "cost": 10.0, "ponder": 0.01, "prior": 0.1, "prior_depth": 3.0}),
    "mixed": ("dynamicvit", {}, {"ratio": 2.0, "mixup": 0.8, "cutmix": 1.0, "drop_path": 0.2}),
    "folding": (
        "aht_merge",
        PAPERS | AHT | {"halting_blocks": (0, 1, 2)},
        {"target_depth": 0.1, "cost": 10.0, "drop_path": 0.3},
    ),
    "reference": ("avit", AVIT, {"prior": 0.1, "prior_form": "reference", "prior_depth": 3.0}),
    "routed": ("mod", {}, {"drop_path": 0.2}),
}


def trainer(name: str, **changes: Any) -> Trainer:
    policy, settings, given = STEPS[name]
    config = named(device="cpu", lr=1e-3, warmup_epochs=0, **given | changes)
    torch.manual_seed(0)  # the policy draws its own weights
    model = tiny(policy, more={"depth": 4, "drop_path_rate": config.optim.drop_path}, **settings)
    model.recompute = config.run.checkpoint_activations
    mixing = tasks.get(config.task).mixing(config.augment, 10)
    optimizer = optim.adamw(model, config)
    return Trainer(model, build_objective(config), optimizer, config, Accelerator(cpu=True), model, mixing=mixing)


def batch(count: int = 8, seed: int = 0) -> Loaded:
    return Loaded(pictures(count, seed=seed), torch.arange(count), torch.arange(count), [])


def reordered(whole: Loaded, parts: int, pairs: bool) -> Loaded:
    """As the plan of an epoch hands it to a process that takes it in parts."""
    at = [i for k in range(parts) for i in rows(len(whole.labels), k, parts, pairs)]
    return Loaded(whole.images[at], whole.labels[at], whole.indices[at], [])


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_steps_are_those_of_the_whole_batch(name: str, parts: int) -> None:
    one, several = trainer(name), trainer(name, accumulate=parts)
    for number in range(2):
        seen = StepStats("accuracy"), StepStats("accuracy")
        losses, _ = one.step(batch(seed=number), number, 4, (), seen[0])
        given = reordered(batch(seed=number), parts, one.mixing is not None)
        other, output = several.step(given, number, 4, (), seen[1])
        assert len(output.logits) == 8 // parts
        assert float(other.total.detach()) == pytest.approx(float(losses.total.detach()), rel=1e-4)
        assert {k: float(v) for k, v in other.terms.items()} == pytest.approx(
            {k: float(v) for k, v in losses.terms.items()}, rel=1e-4, abs=1e-6
        )
        assert_same(gradients(one.model), gradients(several.model), 1e-3)
        first, second = (s.figures() for s in seen)
        assert second == pytest.approx({**first, "live": pytest.approx(first["live"])})
        several.model.load_state_dict(one.model.state_dict())  # AdamW's first steps blow up what rounding left


@pytest.mark.parametrize("name", STEPS)
def test_blocks_computed_again_have_the_same_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, again = trainer(name), trainer(name, checkpoint_activations=True)
    ran, mlp = 0, Executor.mlp

    def counted(*arguments: Any) -> None:
        nonlocal ran
        ran += 1
        mlp(*arguments)

    monkeypatch.setattr(Executor, "mlp", counted)
    losses, _ = kept.step(batch(), 0, 4)
    assert ran == 4, "a block once"
    ran = 0
    other, _ = again.step(batch(), 0, 4)
    assert ran == 8, "and once more in the backward pass"
    assert torch.equal(losses.total, other.total)
    assert_same(gradients(kept.model), gradients(again.model), 1e-6)


def test_blocks_computed_again_keep_less(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    for flag in (False, True):
        model = tiny("aht", **AHT).train()
        model.recompute, sizes = flag, []

        def pack(value: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(value.numel())
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            model(pictures(2), aux=("plan",))
        held.append(sum(sizes))
    assert held[1] < 0.5 * held[0], held


# -- images that could not be read ----------------------------------------------------------------------------------
def test_missing_images_leave_the_others_what_is_random() -> None:
    """The draws of an image do not depend on which others could be read."""
    with drawing(BatchSlice(torch.tensor([0, 1, 2, 3]), 4), 7):
        every = draw(4, lambda n: torch.rand(n, 2))
    with drawing(BatchSlice(torch.tensor([1, 3]), 4), 7):
        assert torch.equal(draw(2, lambda n: torch.rand(n, 2)), every[[1, 3]])
    with drawing(None, 7):
        assert torch.equal(draw(4, lambda n: torch.rand(n, 2)), every), "a whole batch draws as it always did"


@pytest.mark.parametrize("parts", [1, 2])
def test_a_share_without_any_image_counts_for_nothing(parts: int) -> None:
    """Its process still takes the step that the others wait for."""
    one = trainer("aht", accumulate=parts, weight_decay=0.0)
    before = {k: v.clone() for k, v in one.model.state_dict().items()}
    seen = StepStats("accuracy")
    nothing = Loaded(torch.empty(0), torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long), [0, 1, 2, 3])
    losses, _ = one.step(nothing, 0, 4, [0, 1, 2, 3], seen)
    assert float(losses.terms["task"]) == 0
    assert float(seen.sums["images"]) == 0
    # the budget of no image is a number all the same, but nothing learns from it
    assert all(torch.equal(v, before[k]) for k, v in one.model.state_dict().items())


def test_a_part_without_any_image_changes_nothing() -> None:
    whole, other = trainer("aht", accumulate=2), trainer("aht")
    some = batch(8)
    half = Loaded(some.images[:4], some.labels[:4], some.indices[:4], [4, 5, 6, 7])
    losses, _ = whole.step(half, 0, 4, [4, 5, 6, 7])
    alone, _ = other.step(half, 0, 4)
    assert float(losses.total.detach()) == pytest.approx(float(alone.total.detach()), rel=1e-5)
    assert_same(gradients(other.model), gradients(whole.model), 1e-4)


# -- which rows are whose -------------------------------------------------------------------------------------------
@given(st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_parts_are_all_of_a_batch_once_and_equally_large(parts: int, each: int, pairs: bool) -> None:
    batch = parts * each * (2 if pairs else 1)
    found = [rows(batch, part, parts, pairs) for part in range(parts)]
    assert sorted(i for part in found for i in part) == list(range(batch))
    assert len({len(part) for part in found}) == 1
    if pairs:
        for part in found:
            assert [batch - 1 - i for i in part] == part[::-1], "row i meets row B - 1 - i in its own part"
