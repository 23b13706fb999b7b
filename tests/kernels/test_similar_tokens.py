"""The kernels that find similar tokens, against float64. What is not live, or not written yet, is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adaptivit.kernels import bipartite_match, nearest_token, scores_and_keys
from adaptivit.layouts import Masked
from adaptivit.layouts.similarity import Cosines, SimilarityOnDevice
from tests.support.interpreter import DEVICE, here, on_gpu
from tests.support.kernels import NAN_WARNINGS, check_operation, dtypes, poison  # noqa: F401
from tests.support.similar_rows import CLOSE, KINDS, NONE, Rows, keys, random, some, tokens

pytestmark = [*NAN_WARNINGS, here]


def check(value: Tensor, slot: Tensor, cosine: Tensor, allowed: Tensor, wants: Tensor) -> None:
    """[n] results against cosines [n, m] in float64, of which [n, m] are allowed; slots are numbers of columns."""
    cosine = cosine.masked_fill(~(allowed & wants[:, None]), NONE)
    best, first = cosine.max(-1)
    none = best == NONE
    assert (value[none] == NONE).all()
    assert (slot[none] == -1).all()
    assert ((value - best).abs()[~none] <= CLOSE).all()
    chosen = cosine.gather(1, slot.clamp_min(0)[:, None])[:, 0]
    assert ((best - chosen)[~none] <= 2 * CLOSE).all()
    runner_up = cosine.scatter(1, first[:, None], NONE).max(-1).values
    clear = ~none & (best - runner_up > 2 * CLOSE)
    assert (slot == first)[clear].all()
    assert clear.sum() >= 0.9 * (~none).sum()


def check_nearest(rows: Rows, candidates: Tensor) -> None:
    value, slot = nearest_token.nearest(rows.units, rows.cells, rows.offsets, candidates, rows.active)
    assert (value.dtype, slot.dtype) == (torch.float32, torch.int64)
    own = torch.eye(candidates.shape[1], dtype=torch.bool, device=DEVICE)
    for image, present in enumerate(rows.active):
        allowed = (candidates[image] & present)[None, :] & ~own
        check(value[image], slot[image], rows.cosine(image), allowed, present)


@dtypes
@pytest.mark.parametrize("width", [32, 64, 80])
def test_unit_keys(width: int, dtype: torch.dtype) -> None:
    for heads, slots, kind in ((1, 5, "ragged"), (3, 37, "ragged"), (3, 37, "whole")):
        rows = Rows(tokens(kind, slots), heads, width, dtype)
        high, low = rows.units[rows.where].double().unbind(1)
        assert ((high + low) / 64 - rows.exact[rows.where]).abs().max() < 3e-7  # 2^-22 of two halves, and float32
        assert (low.abs() <= high.abs() * 2.0**-11 + 1e-9).all()
        written = rows.units.isfinite().all(-1).all(-1)
        assert torch.equal(written, rows.active.flatten())  # and nothing else is


def test_a_key_of_length_zero() -> None:
    rows = Rows(tokens("whole", 5, 1), 2, 32)
    rows.k[2] = 0.0
    units = rows.unit_keys()
    assert (units[2] == 0).all()
    value, _ = nearest_token.nearest(units, rows.cells, rows.offsets, rows.active, rows.active)
    assert value[0, 2] == 0.0


@pytest.mark.parametrize(("kind", "width"), [("ragged", 32), ("equal", 64), ("whole", 80), ("ragged", 80)])
def test_nearest(kind: str, width: int) -> None:
    rows = Rows(tokens(kind, 71), 2, width)
    check_nearest(rows, some(4, 71))
    check_nearest(rows, torch.ones_like(rows.active))
    check_nearest(rows, torch.zeros_like(rows.active))


@dtypes
def test_nearest_of_few_and_of_many(dtype: torch.dtype) -> None:
    for slots in (1, 2, 3):
        check_nearest(Rows(tokens("whole", slots, 1), 1, 32, dtype), some(1, slots, share=0.7))
    for kind in ("ragged", "whole"):
        check_nearest(Rows(tokens(kind, 300, 1), 1, 32, dtype), some(1, 300))


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_nearest_of_a_batch(kind: str) -> None:
    check_nearest(Rows(tokens(kind, 197, 64), 6, 64, torch.bfloat16), some(64, 197))


def test_rows_of_tokens_that_have_left() -> None:
    """Between two moves they keep their rows: they have no nearest token and are none."""
    rows = Rows(tokens("ragged", 40), 2, 32)
    rows.active = rows.active & some(4, 40)
    check_nearest(rows, some(4, 40, share=0.8))


def test_of_equal_ones_the_first() -> None:
    """Also where they are in different tiles. Cosines of these keys, 16 entries of 1 or -1, are exact in any order of
    summation: two tiles of equal rows may round differently otherwise, as they do in the interpreter on some CPUs."""
    rows = Rows(tokens("whole", 150, 1), 2, 32)
    few = torch.zeros(3, 1, 32)
    for i, key in enumerate(few[:, 0]):
        key[8 * i : 8 * i + 16] = torch.tensor([1.0, -1.0, 1.0, 1.0]).repeat(4)
    rows.k[:150] = few.expand(3, 2, 32).repeat(50, 1, 1).to(DEVICE)
    candidates = torch.ones_like(rows.active)
    candidates[:, :50] = False
    _, slot = nearest_token.nearest(rows.unit_keys(), rows.cells, rows.offsets, candidates, rows.active)
    expected = [51, 52, 50] * 50
    expected[50], expected[51], expected[52] = 53, 54, 55
    assert slot[0].tolist() == expected


def test_nan_is_never_nearest() -> None:
    rows = Rows(tokens("whole", 40, 1), 2, 32)
    rows.k[7] = float("nan")
    value, slot = nearest_token.nearest(rows.unit_keys(), rows.cells, rows.offsets, rows.active, rows.active)
    assert (float(value[0, 7]), int(slot[0, 7])) == (NONE, -1)
    others = torch.arange(40) != 7
    assert value[0, others].isfinite().all()
    assert (slot[0, others] != 7).all()


@pytest.mark.parametrize(("n", "width"), [(2, 32), (3, 80), (70, 64), (71, 32)])
def test_match(n: int, width: int) -> None:
    """Lists are every second of an order, as ToMe has them."""
    rows = Rows(tokens("whole", 80, 3), 2, width)
    order = torch.stack([torch.randperm(80, generator=random())[:n] for _ in range(3)]).to(DEVICE)
    a, b = order[:, ::2], order[:, 1::2]
    for first in (0, 5, 80):
        value, slot = nearest_token.match(rows.units, a, b, 80, first)
        for image in range(3):
            one, two = a[image], b[image]
            column = torch.where(slot[image] < 0, -1, (slot[image][:, None] == two).long().argmax(-1))
            assert torch.equal(torch.where(column < 0, -1, two[column.clamp_min(0)]), slot[image])
            allowed = (two >= first)[None, :].expand(len(one), -1)
            check(value[image], column, rows.cosine(image)[one][:, two], allowed, one >= first)


def order_of(n: int, slots: int, prefix: int) -> Tensor:
    """[3, n] as ToMe has it: prefix tokens first."""
    lots = [torch.randperm(slots - prefix, generator=random())[: n - prefix] + prefix for _ in range(3)]
    return torch.stack([torch.cat([torch.arange(prefix), lot]) for lot in lots]).to(DEVICE)


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
def test_bipartite_match(prefix: int) -> None:
    for n in (7, 8, 66, 197):
        order = order_of(n, n + 4, prefix)
        a, b = order[:, ::2], order[:, 1::2]
        active = torch.zeros(3, n + 4, dtype=torch.bool, device=DEVICE).scatter(1, order, True)
        best = torch.rand(a.shape, generator=random()).mul(9).round().div(9).to(DEVICE)  # many are equal
        best[a < prefix] = NONE
        draw = torch.randint(b.shape[1], a.shape, generator=random()).to(DEVICE)
        for r in sorted({1, (n - prefix) // 4, (n - prefix) // 2} - {0}):
            given = (best, b.gather(1, draw), order, active, r, prefix)
            for found, expected in zip(
                bipartite_match.bipartite_match(*given), bipartite_match.reference(*given), strict=True
            ):
                assert found.dtype == torch.int64
                assert torch.equal(found, expected)


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_bipartite_match_of_nan(prefix: int) -> None:
    """As many leave, none of them a prefix token, and the order is one of those that stay."""
    order = order_of(40, 40, prefix)
    active = torch.ones(3, 40, dtype=torch.bool, device=DEVICE)
    best = torch.rand(3, 20, generator=random()).to(DEVICE)
    best[0], best[1], best[2, ::2] = float("nan"), NONE, float("nan")
    partner = torch.where(best > 0, order[:, 1::2], -1)
    target, following = bipartite_match.bipartite_match(best, partner, order, active, 15, prefix)
    stays = target == torch.arange(40, device=DEVICE)
    assert stays[:, :prefix].all()
    for image in range(3):
        assert following[image].sort().values.tolist() == stays[image].nonzero()[:, 0].tolist()


def test_training_on_masked_takes_the_kernels_and_evaluation_does_not() -> None:
    layout = Masked(torch.zeros(3, 37, 4, device=DEVICE), 1)
    layout.alive = layout.active = some(3, 37, share=0.7)
    k = keys(3 * 37, 2, 32).unflatten(0, (3, 37))
    taught = k.clone().requires_grad_() * 1.0
    with torch.no_grad():
        plain, quick = layout.similarity(k), layout.similarity(taught)
    assert (type(plain), type(quick)) == (Cosines, SimilarityOnDevice)
    patches = some(3, 37, share=0.8)
    leaving = patches & some(3, 37)
    (value, slot), (other_value, other_slot) = plain.nearest(patches), quick.nearest(patches)
    assert torch.equal(slot, other_slot)
    assert torch.allclose(value, other_value, rtol=0, atol=2 * CLOSE)
    assert torch.equal(plain.targets(leaving, patches), quick.targets(leaving, patches))


def test_references_are_the_same_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs where there are no kernels (PackedOnDevice on a CPU)."""
    monkeypatch.setattr(nearest_token, "usable", lambda device: False)
    monkeypatch.setattr(scores_and_keys, "usable", lambda device: False)
    rows = Rows(tokens("ragged", 31), 2, 32)
    check_nearest(rows, some(4, 31))
    assert rows.units[rows.where].isfinite().all()
    layout = Masked(torch.zeros(4, 31, 4, device=DEVICE), 1)
    layout.alive = layout.active = rows.active
    k = torch.zeros(4 * 31, 2, 32, device=DEVICE).index_copy(0, rows.where, rows.k[: len(rows.where)])
    expected = layout.similarity(k.unflatten(0, (4, 31))).nearest(rows.active)
    value, slot = nearest_token.nearest(rows.units, rows.cells, rows.offsets, rows.active, rows.active)
    assert torch.equal(slot, expected[1])
    assert torch.allclose(value, expected[0], rtol=0, atol=2 * CLOSE)


def test_operations_declare_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows = Rows(tokens("whole", 9, 2), 1, 16)
    order = order_of(9, 9, 1)[:2]
    check_operation(nearest_token._nearest, rows.units, rows.cells, rows.offsets, rows.active, rows.active)
    check_operation(nearest_token._match, rows.units, order[:, ::2], order[:, 1::2], 9, 1)
    best = torch.rand(2, 5, device=DEVICE)
    check_operation(bipartite_match._bipartite_match, best, order[:, :5], order, rows.active, 2, 1)
