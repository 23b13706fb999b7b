"""The kernels that find who is most alike, against float64. Whatever is not live, or not written yet, is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adaptivit.kernels import bipartite_match, merge_score, nearest_token
from adaptivit.layouts import Masked
from adaptivit.layouts.similarity import Cosines, SimilarityOnDevice
from tests.support.interpreter import DEVICE, here, on_gpu
from tests.support.kernels import NAN_WARNINGS, _poison  # noqa: F401  (applies to this file)
from tests.support.similar_rows import CLOSE, KINDS, NOBODY, Rows, dtypes, qkv, random, some, tokens

pytestmark = NAN_WARNINGS
widths = pytest.mark.parametrize("width", [32, 64, 80])


def check(value: Tensor, slot: Tensor, cosine: Tensor, allowed: Tensor, asks: Tensor) -> None:
    """[n] answers against cosines [n, m] in float64, of which [n, m] are allowed; slots are numbers of columns."""
    cosine = cosine.masked_fill(~(allowed & asks[:, None]), NOBODY)
    best, first = cosine.max(-1)
    nobody = best == NOBODY
    assert (value[nobody] == NOBODY).all()
    assert (slot[nobody] == -1).all()
    assert ((value - best).abs()[~nobody] <= CLOSE).all()
    chosen = cosine.gather(1, slot.clamp_min(0)[:, None])[:, 0]
    assert ((best - chosen)[~nobody] <= 2 * CLOSE).all()
    runner_up = cosine.scatter(1, first[:, None], NOBODY).max(-1).values
    clear = ~nobody & (best - runner_up > 2 * CLOSE)
    assert (slot == first)[clear].all()
    assert clear.sum() >= 0.9 * (~nobody).sum()


def check_nearest(rows: Rows, among: Tensor) -> None:
    value, slot = nearest_token.nearest(rows.units, rows.index, rows.offsets, among, rows.active)
    assert (value.dtype, slot.dtype) == (torch.float32, torch.int64)
    own = torch.eye(among.shape[1], dtype=torch.bool, device=DEVICE)
    for image, there in enumerate(rows.active):
        allowed = (among[image] & there)[None, :] & ~own
        check(value[image], slot[image], rows.cosine(image), allowed, there)


@here
@dtypes
@widths
@pytest.mark.parametrize("kind", KINDS)
def test_units(kind: str, width: int, dtype: torch.dtype) -> None:
    for heads, slots in ((1, 5), (3, 37)):
        rows = Rows(tokens(kind, slots), heads, width, dtype, kind)
        assert rows.units.dtype == torch.float16
        high, low = rows.units[rows.cells].double().unbind(1)
        assert ((high + low) / 64 - rows.exact[rows.cells]).abs().max() < 3e-7  # 2^-22 of two halves, and float32
        assert (low.abs() <= high.abs() * 2.0**-11 + 1e-9).all()
        written = rows.units.isfinite().all(-1).all(-1)
        assert torch.equal(written, rows.active.flatten())  # and nothing else is


@here
def test_a_key_of_length_zero() -> None:
    rows = Rows(tokens("whole", 5, 1), 2, 32, torch.float32, "whole")
    rows.k[2] = 0.0
    units = nearest_token.units(rows.k, rows.index, None, 1, 5)
    assert (units[2] == 0).all()
    value, _ = nearest_token.nearest(units, rows.index, None, rows.active, rows.active)
    assert value[0, 2] == 0.0


@here
@widths
@pytest.mark.parametrize("kind", KINDS)
def test_nearest(kind: str, width: int) -> None:
    rows = Rows(tokens(kind, 71), 2, width, torch.float32, kind)
    check_nearest(rows, some(4, 71))
    check_nearest(rows, torch.ones_like(rows.active))
    check_nearest(rows, torch.zeros_like(rows.active))


@here
@dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_nearest_of_few(kind: str, dtype: torch.dtype) -> None:
    for slots in (1, 2, 3):
        there = torch.ones(1, slots, dtype=torch.bool, device=DEVICE)
        check_nearest(Rows(there, 1, 32, dtype, kind), some(1, slots, share=0.7))


@here
@pytest.mark.parametrize("kind", ["ragged", "whole"])
def test_nearest_of_many(kind: str) -> None:
    check_nearest(Rows(tokens(kind, 1025, 1), 1, 32, torch.float32, kind), some(1, 1025))


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_nearest_of_a_batch(kind: str) -> None:
    check_nearest(Rows(tokens(kind, 197, 64), 6, 64, torch.bfloat16, kind), some(64, 197))


@here
def test_rows_of_tokens_that_have_left() -> None:
    """Between two moves they keep their rows: they neither ask nor are asked for."""
    rows = Rows(tokens("ragged", 40), 2, 32, torch.float32, "ragged")
    rows.active = rows.active & some(4, 40)
    check_nearest(rows, some(4, 40, share=0.8))


@here
def test_of_equals_the_first() -> None:
    """Also where they are in different tiles. Cosines of these keys, 16 entries of 1 or -1, are exact in any order of
    summation: two tiles of equal rows may round differently otherwise, as they do in the interpreter on some CPUs."""
    rows = Rows(tokens("whole", 150, 1), 2, 32, torch.float32, "whole")
    keys = torch.zeros(3, 1, 32)
    for i, key in enumerate(keys[:, 0]):
        key[8 * i : 8 * i + 16] = torch.tensor([1.0, -1.0, 1.0, 1.0]).repeat(4)
    rows.k[:] = keys.expand(3, 2, 32).repeat(50, 1, 1).to(DEVICE)
    units = nearest_token.units(rows.k, rows.index, None, 1, 150)
    among = torch.ones_like(rows.active)
    among[:, :50] = False
    _, slot = nearest_token.nearest(units, rows.index, None, among, rows.active)
    expected = [51, 52, 50] * 50
    expected[50], expected[51], expected[52] = 53, 54, 55
    assert slot[0].tolist() == expected


@here
def test_nan_is_like_nobody() -> None:
    rows = Rows(tokens("whole", 40, 1), 2, 32, torch.float32, "whole")
    rows.k[7] = float("nan")
    units = nearest_token.units(rows.k, rows.index, None, 1, 40)
    value, slot = nearest_token.nearest(units, rows.index, None, rows.active, rows.active)
    assert (float(value[0, 7]), int(slot[0, 7])) == (NOBODY, -1)
    others = torch.arange(40) != 7
    assert value[0, others].isfinite().all()
    assert (slot[0, others] != 7).all()


@here
@widths
@pytest.mark.parametrize("n", [2, 3, 70, 71])
def test_match(n: int, width: int) -> None:
    """Lists are every second of an order, as ToMe has them."""
    rows = Rows(tokens("whole", 80, 3), 2, width, torch.float32, "whole")
    order = torch.stack([torch.randperm(80, generator=random())[:n] for _ in range(3)]).to(DEVICE)
    a, b = order[:, ::2], order[:, 1::2]
    for least in (0, 1, 5, 80):
        value, slot = nearest_token.match(rows.units, a, b, 80, least)
        for image in range(3):
            one, two = a[image], b[image]
            column = torch.where(slot[image] < 0, -1, (slot[image][:, None] == two).long().argmax(-1))
            assert torch.equal(torch.where(column < 0, -1, two[column.clamp_min(0)]), slot[image])
            allowed = (two >= least)[None, :].expand(len(one), -1)
            check(value[image], column, rows.cosine(image)[one][:, two], allowed, one >= least)


def standing(n: int, slots: int, prefix: int) -> Tensor:
    """[3, n] an order as ToMe has it: prefix tokens first."""
    lots = [torch.randperm(slots - prefix, generator=random())[: n - prefix] + prefix for _ in range(3)]
    return torch.stack([torch.cat([torch.arange(prefix), lot]) for lot in lots]).to(DEVICE)


@here
@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("n", [7, 8, 66, 197])
def test_pairs(n: int, prefix: int) -> None:
    order = standing(n, n + 4, prefix)
    a, b = order[:, ::2], order[:, 1::2]
    present = torch.zeros(3, n + 4, dtype=torch.bool, device=DEVICE).scatter(1, order, True)
    best = torch.rand(a.shape, generator=random()).mul(9).round().div(9).to(DEVICE)  # many are equal
    best[a < prefix] = NOBODY
    draw = torch.randint(b.shape[1], a.shape, generator=random()).to(DEVICE)
    for r in sorted({1, (n - prefix) // 4, (n - prefix) // 2} - {0}):
        given = (best, b.gather(1, draw), order, present, r, prefix)
        for found, expected in zip(bipartite_match.pairs(*given), bipartite_match.reference(*given), strict=True):
            assert found.dtype == torch.int64
            assert torch.equal(found, expected)


@here
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_pairs_of_nan(prefix: int) -> None:
    """As many leave, of whom none is a prefix token, and the order is one of those that stay."""
    order = standing(40, 40, prefix)
    present = torch.ones(3, 40, dtype=torch.bool, device=DEVICE)
    best = torch.rand(3, 20, generator=random()).to(DEVICE)
    best[0], best[1], best[2, ::2] = float("nan"), NOBODY, float("nan")
    partner = torch.where(best > 0, order[:, 1::2], -1)
    into, following = bipartite_match.pairs(best, partner, order, present, 15, prefix)
    stays = into == torch.arange(40, device=DEVICE)
    assert stays[:, :prefix].all()
    for image in range(3):
        assert following[image].sort().values.tolist() == stays[image].nonzero()[:, 0].tolist()


@here
@torch.inference_mode()
def test_worth() -> None:
    seen, size = (torch.rand(3, 201, generator=random()).to(DEVICE) for _ in range(2))
    alike = torch.rand(3, 201, generator=random()).mul(2.4).sub(1.2).to(DEVICE)
    alike[0, 0], alike[0, 1], seen[0, 2] = NOBODY, 1.0, 0.0
    for power, value in ((0.5, 0.5), (1.0, 0.0), (0.3, 2.0), (0.0, 1.0)):
        given = [seen, alike if power else None, size]
        exact = [t if t is None else t.double() for t in given]
        found, expected = merge_score.worth(*given, power, value), merge_score.reference(*exact, power, value)  # type: ignore[arg-type]
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == torch.float32
            assert ((one - other).abs() <= 1e-6 * other.abs() + 1e-12).all()


@here
def test_training_on_masked_takes_the_kernels_and_evaluation_does_not() -> None:
    layout = Masked(torch.zeros(3, 37, 4, device=DEVICE), 1)
    layout.alive = layout.active = some(3, 37, share=0.7)
    k = qkv(3 * 37, 2, 32).unflatten(0, (3, 37))
    taught = k.clone().requires_grad_() * 1.0
    with torch.no_grad():
        plain, quick = layout.similarity(k), layout.similarity(taught)
    assert (type(plain), type(quick)) == (Cosines, SimilarityOnDevice)
    assert not quick.unit.requires_grad
    patches = some(3, 37, share=0.8)
    leaving = patches & some(3, 37)
    (value, slot), (other_value, other_slot) = plain.nearest(patches), quick.nearest(patches)
    assert torch.equal(slot, other_slot)
    assert torch.allclose(value, other_value, rtol=0, atol=2 * CLOSE)
    assert torch.equal(plain.targets(leaving, patches), quick.targets(leaving, patches))


def test_references_are_the_same_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs where there are no kernels (PackedOnDevice on a CPU)."""
    monkeypatch.setattr(nearest_token, "usable", lambda device: False)
    for kind in KINDS:
        rows = Rows(tokens(kind, 31), 2, 32, torch.float32, kind)
        check_nearest(rows, some(4, 31))
