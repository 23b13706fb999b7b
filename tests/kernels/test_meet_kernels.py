"""The kernel that says whom those that leave join, and what comes of it, against float64. What is not live is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivit.errors import UserError
from adaptivit.kernels import attention_scores, launch, merge, merge_assign, nearest_token, scores_and_keys, topk
from adaptivit.kernels.merge_score import MergeScore
from adaptivit.layouts import triton as device
from adaptivit.layouts.similarity import Cosines, SimilarityOnDevice
from tests.support.fused import images_of, make, run
from tests.support.interpreter import DEVICE, here
from tests.support.kernels import NAN_WARNINGS, _poison  # noqa: F401  (applies to this file)
from tests.support.similar_rows import CLOSE, KINDS, NOBODY, Rows, dtypes, random, some, tokens

pytestmark = NAN_WARNINGS
kinds = pytest.mark.parametrize("kind", KINDS)


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, generator=random()).add(0.1).to(DEVICE)


def alike(rows: Rows) -> SimilarityOnDevice:
    return SimilarityOnDevice(rows.k, rows.index, rows.offsets, rows.active)


def check_into(rows: Rows, leaving: Tensor, patches: Tensor, into: Tensor) -> None:
    own = torch.arange(into.shape[1], device=DEVICE)
    for image, there in enumerate(rows.active):
        may = patches[image] & there
        cosine = rows.cosine(image).masked_fill(~(may & ~leaving[image]), NOBODY)
        best, first = cosine.max(-1)
        expected = torch.where((best == NOBODY) | ~may, -1, first)
        expected = torch.where(leaving[image], expected, own)
        runner_up = cosine.scatter(1, first[:, None], NOBODY).max(-1).values
        clear = (best == NOBODY) | (best - runner_up > 2 * CLOSE)
        assert torch.equal(into[image][clear], expected[clear])
        close = (best - cosine.gather(1, into[image].clamp_min(0)[:, None])[:, 0])[~clear & leaving[image] & may]
        assert (close <= 2 * CLOSE).all()


def check(
    rows: Rows, patches: Tensor, leaving: Tensor, says: bool, score: Tensor | None = None, count: int = 0
) -> None:
    size, say = numbers(*leaving.shape).mul(9).round(), numbers(*leaving.shape)
    given = None if score is not None else leaving
    into, scale, after, left = alike(rows).assign(
        patches, size, say if says else None, leaving=given, score=score, count=count
    )
    assert (left is None) == (not merge_assign.usable(torch.device(DEVICE)))
    assert left is None or left[0] is rows.active
    assert left is None or torch.equal(
        left[1], (rows.active & (into == torch.arange(into.shape[1], device=DEVICE))).sum(-1).int()
    )
    assert (into.dtype, scale.dtype, after.dtype) == (torch.int64, torch.float32, torch.float32)
    check_into(rows, leaving, patches, into)
    expected = merge.reference_join(into, size.double(), rows.active, say.double() if says else None)
    for found, exact in zip((scale, after), expected, strict=True):
        assert found.isfinite().all()
        assert (found - exact).abs().max() <= 2e-6 * exact.abs().max().clamp_min(1.0)


@here
@torch.inference_mode()
@kinds
@pytest.mark.parametrize("slots", [5, 70, 197, 300])
def test_meet(kind: str, slots: int) -> None:
    """Nobody leaves, some do, more than a tile has room for, everybody; also such as are no patches, or not here."""
    rows = Rows(tokens(kind, slots, 3), 2, 32, torch.float32, kind)
    patches = torch.arange(slots, device=DEVICE).expand(3, -1) > 0
    for share, says in ((0.0, True), (0.1, False), (0.6, True), (1.0, True)):
        check(rows, patches & rows.active, some(3, slots, share=share), says)
    check(rows, patches, patches & some(3, slots, share=0.2), True)
    check(rows, some(3, slots), some(3, slots), False)


@here
@torch.inference_mode()
@pytest.mark.parametrize("width", [16, 64, 80])
def test_heads_of_any_width(width: int) -> None:
    rows = Rows(tokens("ragged", 71), 2, width, torch.float32, "ragged")
    check(rows, rows.active, some(4, 71, share=0.3), True)


@here
@torch.inference_mode()
@pytest.mark.parametrize("slots", [5, 197, 300])
def test_odd_scores_are_ranked(slots: int) -> None:
    """NaN is above all numbers, 0 and -0 are equal, of equals the first is above."""
    rows = Rows(tokens("ragged", slots, 3), 2, 32, torch.float32, "ragged")
    patches = (torch.arange(slots, device=DEVICE).expand(3, -1) > 0) & some(3, slots, share=0.8)
    few = torch.tensor([0.0, -0.0, 1.5, -1.5, float("inf"), -float("inf"), float("nan"), 1e-42, -1e-42, -float("nan")])
    score = few[torch.randint(len(few), (3, slots), generator=random())].to(DEVICE)
    score[1] = float("nan")
    for count in (0, 1, slots // 2, slots):
        check(rows, patches, topk.reference(score, patches, count, rest=True), True, score, count)


@here
@torch.inference_mode()
@kinds
def test_by_rank(kind: str) -> None:
    """All but the best leave, of equals the last, and NaN is above all."""
    rows = Rows(tokens(kind, 70), 2, 32, torch.float32, kind)
    patches = rows.active & (torch.arange(70, device=DEVICE) > 0)
    score = torch.rand(4, 70, generator=random()).mul(12).round().to(DEVICE)
    score[:, 5::11] = float("nan")
    for count in (0, 1, 20, 69, 100):
        check(rows, patches, topk.reference(score, patches, count, rest=True), True, score, count)


@here
@dtypes
@pytest.mark.parametrize("width", [32, 80])
@pytest.mark.parametrize("weights", ["none", "bool", "sizes", "logarithms"])
@torch.inference_mode()
def test_what_folding_looks_at(weights: str, width: int, dtype: torch.dtype) -> None:
    """Both in one launch are what they are apart; an image has no row, another one."""
    rows = Rows(tokens("ragged", 70), 3, width, dtype, "ragged")
    assert rows.offsets is not None
    q = torch.randn(rows.k.shape, generator=random()).to(DEVICE, dtype)
    size = 1 + 9 * torch.rand(len(q), generator=random()).to(DEVICE)
    live = int(rows.offsets[-1])
    size[live:] = float("nan")
    weight = {"none": None, "bool": size > 3, "sizes": size, "logarithms": launch.Log2(size.log2())}[weights]
    plain = size if isinstance(weight, launch.Log2) else weight
    row, units = scores_and_keys.looks(q, rows.k, rows.index, rows.offsets, 70, weight, 70)
    apart = attention_scores.class_row(*launch.alike(q, rows.k), rows.offsets, 70, plain)
    assert torch.equal(row[:live], apart[:live])
    assert torch.equal(units[rows.cells], rows.units[rows.cells])
    exact = attention_scores.reference(q, rows.k, rows.offsets, plain, "class")
    assert (row[:live] - exact[:live]).abs().max() <= (2e-6 if dtype == torch.float32 else 2e-3)


@here
@torch.inference_mode()
@pytest.mark.parametrize(("power", "value"), [(0.5, 0.5), (1.0, 0.0), (0.3, 0.7), (0.5, 1.0), (1.0, 0.5)])
@pytest.mark.parametrize("likeness", [True, False])
def test_by_worth(likeness: bool, power: float, value: float) -> None:
    """Found on the way, it is what its own kernel says."""
    rows = Rows(tokens("ragged", 70), 2, 32, torch.float32, "ragged")
    patches = rows.active & (torch.arange(70, device=DEVICE) > 0)
    seen, size = numbers(4, 70), numbers(4, 70).mul(9).round()
    alike_ = 2 * torch.rand(4, 70, generator=random()).to(DEVICE) - 1 if likeness else None
    given = MergeScore(seen, alike_, power, value)
    score, say = given.numbers(size)
    for count in (0, 20, 69):
        found = alike(rows).assign(patches, size, score=given, count=count)
        expected = alike(rows).assign(patches, size, say, score=score, count=count)
        assert torch.equal(found[0], expected[0])
        assert found.left_counts is not None
        assert expected.left_counts is not None
        assert torch.equal(found.left_counts[1], expected.left_counts[1])
        for one, two in zip(found[1:3], expected[1:3], strict=True):
            assert one.isfinite().all()
            assert (one - two).abs().max() <= 1e-6 * two.abs().max()


@here
@torch.inference_mode()
def test_nan_is_joined_by_nobody() -> None:
    rows = Rows(tokens("whole", 40, 1), 2, 32, torch.float32, "whole")
    rows.k[7] = float("nan")
    leaving = torch.zeros_like(rows.active)
    leaving[0, [3, 20]] = True
    into, *_ = alike(rows).assign(rows.active, numbers(1, 40), leaving=leaving)
    assert (into[leaving] >= 0).all()
    assert (into[leaving] != 7).all()
    leaving[0, 7] = True
    assert int(alike(rows).targets(leaving, rows.active)[0, 7]) == -1


@here
@kinds
def test_a_gradient_reaches_what_is_said(kind: str) -> None:
    """In training the kernel finds whom, and torch computes the rest."""
    rows = Rows(tokens(kind, 40), 2, 32, torch.float32, kind)
    size, say, score = numbers(4, 40), numbers(4, 40).requires_grad_(), numbers(4, 40)
    patches = rows.active & (torch.arange(40, device=DEVICE) > 0)
    for leaving, ranked in ((some(4, 40, share=0.3), None), (None, score)):
        into, scale, _, left = alike(rows).assign(patches, size, say, leaving=leaving, score=ranked, count=10)
        assert left is None
        gone = topk.reference(score, patches, 10, rest=True) if leaving is None else leaving
        check_into(rows, gone, patches, into)
        (found,) = torch.autograd.grad(scale.square().sum(), say)
        exact = merge.reference_join(into, size, rows.active, say)[0]
        (expected,) = torch.autograd.grad(exact.square().sum(), say)
        assert torch.equal(found, expected)


@here
def test_the_operation_says_what_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    there, numbers_ = torch.ones(2, 5, dtype=torch.bool, device=DEVICE), numbers(2, 5)
    units = nearest_token.units(numbers(10, 2, 16), torch.arange(5, device=DEVICE).expand(2, 5), None, 2, 5)
    for more in (
        (there, None, 0, None, None),
        (there, None, 0, numbers_, None),
        (None, numbers_, 2, numbers_, numbers_),
        (None, numbers_, 2, numbers_, None, numbers_, 0.3, 0.7),
    ):
        torch.library.opcheck(
            merge_assign._meet, (units, there, there, *more), test_utils=("test_schema", "test_faketensor")
        )
    rows = Rows(tokens("ragged", 70), 3, 32, torch.float32, "ragged")
    given = (rows.k.contiguous(), rows.k.contiguous(), rows.index, rows.offsets, 70, None, 70)
    torch.library.opcheck(scores_and_keys._looks, given, test_utils=("test_schema", "test_faketensor"))


@here
@torch.inference_mode()
@pytest.mark.parametrize("case", ["fold", "aht_merge"])
def test_folding_looks_once_a_block(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    calls, both = [], device.looks

    def counted(*args: Any) -> Any:
        calls.append(args)
        return both(*args)

    monkeypatch.setattr(device, "looks", counted)
    monkeypatch.setattr(launch, "on_cpu", True)
    model = make(case)
    run(model, images_of(), "packed", True)
    asked = [model.policy.evidence(layer, frozenset()) for layer in range(len(model.vit.blocks))]
    assert len(calls) == sum({"class_row", "similarity"} <= wanted for wanted in asked) > 0


def test_nonsense_is_said() -> None:
    there = torch.ones(1, 3, dtype=torch.bool)
    similarity, size = Cosines([(torch.ones(1, 3, 4), torch.arange(3)[None])], there), torch.ones(1, 3)
    with pytest.raises(UserError, match="leaving, or score and count; got neither"):
        similarity.assign(there, size)
    with pytest.raises(UserError, match="got both"):
        similarity.assign(there, size, leaving=there, score=size)
    with pytest.raises(UserError, match="a Worth has a say of its own"):
        similarity.assign(there, size, size, score=MergeScore(size, None, 0.5, 0.5))


@torch.inference_mode()
def test_references_are_the_same_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_assign, "usable", lambda device: False)
    monkeypatch.setattr(nearest_token, "usable", lambda device: False)
    rows = Rows(tokens("ragged", 31), 2, 32, torch.float32, "ragged")
    score = numbers(4, 31)
    check(rows, rows.active, topk.reference(score, rows.active, 5, rest=True), True, score, 5)
    check(rows, rows.active, some(4, 31), False)
