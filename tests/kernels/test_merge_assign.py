"""The kernel that assigns leaving patches to staying ones, against float64. What is not live is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivit.errors import UserError
from adaptivit.kernels import launch, merge, merge_assign, nearest_token, scores_and_keys, topk
from adaptivit.kernels.merge_score import MergeScore
from adaptivit.layouts.similarity import Cosines
from tests.support.fused import images_of, make, run
from tests.support.interpreter import DEVICE, here
from tests.support.kernels import NAN_WARNINGS, check_operation, dtypes, poison  # noqa: F401
from tests.support.similar_rows import CLOSE, NONE, Rows, random, some, tokens

pytestmark = NAN_WARNINGS


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, generator=random()).add(0.1).to(DEVICE)


def check_target(rows: Rows, leaving: Tensor, patches: Tensor, target: Tensor) -> None:
    own = torch.arange(target.shape[1], device=DEVICE)
    for image, active in enumerate(rows.active):
        may = patches[image] & active
        cosine = rows.cosine(image).masked_fill(~(may & ~leaving[image]), NONE)
        best, first = cosine.max(-1)
        expected = torch.where((best == NONE) | ~may, -1, first)
        expected = torch.where(leaving[image], expected, own)
        runner_up = cosine.scatter(1, first[:, None], NONE).max(-1).values
        clear = (best == NONE) | (best - runner_up > 2 * CLOSE)
        assert torch.equal(target[image][clear], expected[clear])
        close = (best - cosine.gather(1, target[image].clamp_min(0)[:, None])[:, 0])[~clear & leaving[image] & may]
        assert (close <= 2 * CLOSE).all()


def check(
    rows: Rows,
    patches: Tensor,
    leaving: Tensor,
    weighted: bool = True,
    score: MergeScore | None = None,
    count: int = 0,
) -> None:
    size = numbers(*leaving.shape).mul(9).round()
    weight = numbers(*leaving.shape) if weighted and score is None else None
    given = {"leaving": leaving} if score is None else {"score": score, "count": count}
    target, source_weight, after, left = rows.similarity().assign(patches, size, weight, **given)  # type: ignore[arg-type]
    assert (left is None) == (not merge_assign.usable(torch.device(DEVICE)))
    if left is not None:
        assert left[0] is rows.active
        stays = rows.active & (target == torch.arange(target.shape[1], device=DEVICE))
        assert torch.equal(left[1], stays.sum(-1).int())
    assert (target.dtype, source_weight.dtype, after.dtype) == (torch.int64, torch.float32, torch.float32)
    check_target(rows, leaving, patches, target)
    if score is not None:
        exact = MergeScore(score.attention.double(), None, score.power, score.value)
        weight = exact.numbers(size.double())[1]
    expected = merge.mean_weights_reference(
        target, size.double(), rows.active, None if weight is None else weight.double()
    )
    for found, one in zip((source_weight, after), expected, strict=True):
        assert found.isfinite().all()
        assert (found - one).abs().max() <= 2e-6 * one.abs().max().clamp_min(1.0)


@here
@torch.inference_mode()
@pytest.mark.parametrize(("kind", "slots"), [("ragged", 5), ("equal", 70), ("ragged", 197), ("whole", 300)])
def test_patches_that_leave(kind: str, slots: int) -> None:
    """None, some, more than a tile has room for, all; also tokens that are no patches, or not active."""
    rows = Rows(tokens(kind, slots, 3), 2, 32)
    patches = torch.arange(slots, device=DEVICE).expand(3, -1) > 0
    for share, weighted in ((0.0, True), (0.1, False), (0.6, True), (1.0, True)):
        check(rows, patches & rows.active, some(3, slots, share=share), weighted)
    check(rows, patches, patches & some(3, slots, share=0.2))
    check(rows, some(3, slots), some(3, slots), False)


@here
@torch.inference_mode()
@pytest.mark.parametrize("width", [16, 64, 80])
def test_heads_of_any_width(width: int) -> None:
    rows = Rows(tokens("ragged", 71), 2, width)
    check(rows, rows.active, some(4, 71, share=0.3))


@here
@torch.inference_mode()
@pytest.mark.parametrize("slots", [5, 197, 300])
def test_odd_scores_are_ranked(slots: int) -> None:
    """NaN is above all numbers, 0 and -0 are equal, of equal ones the first is above."""
    rows = Rows(tokens("ragged", slots, 3), 2, 32)
    patches = (torch.arange(slots, device=DEVICE).expand(3, -1) > 0) & some(3, slots, share=0.8)
    few = torch.tensor([0.0, -0.0, 1.5, -1.5, float("inf"), -float("inf"), float("nan"), 1e-42, -1e-42, -float("nan")])
    score = few[torch.randint(len(few), (3, slots), generator=random())].to(DEVICE)
    score[1] = float("nan")
    for count in (0, 1, slots // 2, slots):
        leaving = topk.reference(score, patches, count, rest=True)
        found = rows.similarity().assign(
            patches, numbers(3, slots), score=MergeScore(score, None, 0.0, 0.0), count=count
        )
        check_target(rows, leaving, patches, found.target)


@here
@torch.inference_mode()
@pytest.mark.parametrize("kind", ["ragged", "equal"])
def test_by_rank(kind: str) -> None:
    """All but the best leave, of equal ones the last."""
    rows = Rows(tokens(kind, 70), 2, 32)
    patches = rows.active & (torch.arange(70, device=DEVICE) > 0)
    score = torch.rand(4, 70, generator=random()).mul(12).round().to(DEVICE)
    for count in (1, 20, 100):
        check(
            rows,
            patches,
            topk.reference(score, patches, count, rest=True),
            True,
            MergeScore(score, None, 0, 0.5),
            count,
        )


@here
@dtypes
@pytest.mark.parametrize("weights", ["none", "bool", "sizes", "logarithms"])
@torch.inference_mode()
def test_class_row_and_unit_keys_in_one_launch(weights: str, dtype: torch.dtype) -> None:
    """They are what they are apart; an image has no row, another one."""
    for width in (32, 80):
        rows = Rows(tokens("ragged", 70), 3, width, dtype)
        q = torch.randn(rows.k.shape, generator=random()).to(DEVICE, dtype)
        size = 1 + 9 * torch.rand(len(q), generator=random()).to(DEVICE)
        live = int(rows.offsets[-1])
        size[live:] = float("nan")
        weight = {"none": None, "bool": size > 3, "sizes": size, "logarithms": launch.Log2(size.log2())}[weights]
        plain = size if isinstance(weight, launch.Log2) else weight
        row, units = scores_and_keys.class_row_and_unit_keys(q, rows.k, rows.cells, rows.offsets, 70, weight, 70)
        apart = scores_and_keys.class_row(q, rows.k, rows.offsets, 70, plain)
        assert torch.equal(row[:live], apart[:live])
        assert torch.equal(units[rows.where], rows.units[rows.where])
        exact = scores_and_keys.class_row_reference(q, rows.k, rows.offsets, plain)
        assert (row[:live] - exact[:live]).abs().max() <= (2e-6 if dtype == torch.float32 else 2e-3)


@here
@torch.inference_mode()
@pytest.mark.parametrize(("power", "value"), [(0.5, 0.5), (1.0, 0.0), (0.3, 0.7)])
def test_by_merge_score(power: float, value: float) -> None:
    """Computed in the kernel, score and weight are those of PyTorch."""
    rows = Rows(tokens("ragged", 70), 2, 32)
    patches = rows.active & (torch.arange(70, device=DEVICE) > 0)
    attention, size = numbers(4, 70), numbers(4, 70).mul(9).round()
    cosine = torch.rand(4, 70, generator=random()).mul(2.4).sub(1.2).to(DEVICE)
    cosine[0, 0], cosine[0, 1], attention[0, 2] = NONE, 1.0, 0.0
    for count, near in ((0, cosine), (20, cosine), (20, None), (69, None)):
        given = MergeScore(attention, near, power, value)
        score, weight = given.numbers(size)
        found = rows.similarity().assign(patches, size, score=given, count=count)
        leaving = topk.reference(score, patches, count, rest=True)
        expected = rows.similarity().assign(patches, size, weight, leaving=leaving)
        assert torch.equal(found.target, expected.target)
        assert found.left_counts is not None
        assert expected.left_counts is not None
        assert torch.equal(found.left_counts[1], expected.left_counts[1])
        for one, two in zip(found[1:3], expected[1:3], strict=True):
            assert one.isfinite().all()
            assert (one - two).abs().max() <= 1e-6 * two.abs().max()


@here
@torch.inference_mode()
def test_nothing_joins_nan() -> None:
    rows = Rows(tokens("whole", 40, 1), 2, 32)
    rows.k[7] = float("nan")
    leaving = torch.zeros_like(rows.active)
    leaving[0, [3, 20]] = True
    target = rows.similarity().assign(rows.active, numbers(1, 40), leaving=leaving).target
    assert (target[leaving] >= 0).all()
    assert (target[leaving] != 7).all()
    leaving[0, 7] = True
    for target in (
        rows.similarity().targets(leaving, rows.active),
        rows.similarity().assign(rows.active, numbers(1, 40), leaving=leaving).target,
    ):
        assert int(target[0, 7]) == -1


@here
@pytest.mark.parametrize("kind", ["ragged", "whole"])
def test_a_gradient_reaches_the_weights(kind: str) -> None:
    """In training the kernel finds targets, and torch computes the rest."""
    rows = Rows(tokens(kind, 40), 2, 32)
    size, weight = numbers(4, 40), numbers(4, 40).requires_grad_()
    patches = rows.active & (torch.arange(40, device=DEVICE) > 0)
    leaving = some(4, 40, share=0.3)
    target, source_weight, _, left = rows.similarity().assign(patches, size, weight, leaving=leaving)
    assert left is None
    check_target(rows, leaving, patches, target)
    (found,) = torch.autograd.grad(source_weight.square().sum(), weight)
    exact = merge.mean_weights_reference(target, size, rows.active, weight)[0]
    (expected,) = torch.autograd.grad(exact.square().sum(), weight)
    assert torch.equal(found, expected)


@here
@torch.inference_mode()
@pytest.mark.parametrize("case", ["fold", "aht_merge"])
def test_one_launch_finds_both(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    calls, both = [], scores_and_keys.class_row_and_unit_keys

    def counted(*args: Any) -> Any:
        calls.append(args)
        return both(*args)

    monkeypatch.setattr(scores_and_keys, "class_row_and_unit_keys", counted)
    monkeypatch.setattr(launch, "on_cpu", True)
    model = make(case)
    run(model, images_of(), "packed", True)
    asked = [model.policy.evidence(layer, frozenset()) for layer in range(len(model.vit.blocks))]
    assert len(calls) == sum({"class_row", "similarity"} <= wanted for wanted in asked) > 0


def test_contradictions_are_refused() -> None:
    active = torch.ones(1, 3, dtype=torch.bool)
    similarity, size = Cosines([(torch.ones(1, 3, 4), torch.arange(3)[None])], active), torch.ones(1, 3)
    score = MergeScore(size, None, 0.5, 0.5)
    with pytest.raises(UserError, match="leaving, or score and count; got neither"):
        similarity.assign(active, size)
    with pytest.raises(UserError, match="got both"):
        similarity.assign(active, size, leaving=active, score=score)
    with pytest.raises(UserError, match="a MergeScore has a merge_weight of its own"):
        similarity.assign(active, size, size, score=score)


@torch.inference_mode()
def test_references_are_the_same_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (merge_assign, nearest_token, scores_and_keys):
        monkeypatch.setattr(module, "usable", lambda device: False)
    rows = Rows(tokens("ragged", 31), 2, 32)
    score = MergeScore(numbers(4, 31), None, 0.0, 0.5)
    check(rows, rows.active, topk.reference(score.attention, rows.active, 5, rest=True), True, score, 5)
    check(rows, rows.active, some(4, 31), False)


@here
def test_the_operation_declares_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows, size = Rows(tokens("whole", 5, 2), 2, 16), numbers(2, 5)
    given = (rows.units, rows.active, rows.active)
    check_operation(merge_assign._merge_assign, *given, rows.active, None, None, size, None, 0, 0.0, 0.0)
    check_operation(merge_assign._merge_assign, *given, rows.active, None, None, size, size, 0, 0.0, 0.0)
    check_operation(merge_assign._merge_assign, *given, None, size, size, size, None, 2, 0.3, 0.7)
