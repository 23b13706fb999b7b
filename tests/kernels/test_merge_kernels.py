"""The kernels of selecting, merging and coming back against float64. Whatever is not live, or not written, is NaN."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from adaptivit.kernels import launch, merge, pack_index, topk, unskip
from tests.support.interpreter import DEVICE, ON_GPU, here
from tests.support.kernels import _poison as _poison
from tests.support.kernels import assert_near, count, noise, staying

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
NAN, INF = float("nan"), float("inf")
# half a last digit, and a little; the interpreter cuts bfloat16 off
ROUNDING = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3 if ON_GPU else 8e-3}
dtypes = pytest.mark.parametrize("dtype", ROUNDING, ids=lambda d: str(d).removeprefix("torch."))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- the best tokens -----------------------------------------------------------------------------------------
def literal_top(score: Tensor, among: Tensor, wanted: int) -> Tensor:
    out = torch.zeros_like(among)
    for b, (values, candidates) in enumerate(zip(score.tolist(), among.tolist(), strict=True)):
        rank = sorted((v == v, -v if v == v else 0.0, i) for i, v in enumerate(values) if candidates[i])
        for _, _, i in rank[:wanted]:
            out[b, i] = True
    return out


@here
@pytest.mark.parametrize(("batch", "slots"), [(1, 1), (3, 17), (2, 197), (1, 1025)])
def test_top(batch: int, slots: int) -> None:
    plain, g = noise(batch, slots, seed=slots), generator(slots)
    ties = (3 * plain).round() / 3
    odd = ties.clone()
    odd[:, ::5], odd[:, 1::7], odd[:, 2::11] = NAN, INF, -INF
    few = (torch.rand(batch, slots, generator=g) < 0.6).to(DEVICE)
    small = slots < 100
    for score in (plain, ties, odd, odd.half()) if small else (odd,):
        for among in (few, torch.ones_like(few), torch.zeros_like(few)) if small else (few,):
            for wanted in sorted({0, 1, slots // 3, slots} if small else {slots // 3}):
                chosen = topk.top(score, among, wanted)
                assert chosen.dtype == torch.bool
                assert torch.equal(chosen, literal_top(score, among, wanted))
                assert torch.equal(chosen, topk.reference(score, among, wanted))
                rest = among & ~chosen
                assert torch.equal(topk.top(score, among, wanted, rest=True), rest)
                assert torch.equal(topk.reference(score, among, wanted, rest=True), rest)
                assert torch.equal(chosen.sum(-1), among.sum(-1).clamp_max(wanted))


@here
def test_top_of_strided_scores() -> None:
    """As DynamicViT has them: every second number of its log-probabilities, with a gradient in training."""
    log_p, among = noise(3, 17, 2).requires_grad_(), staying("some", 3, 17)
    for score in (log_p[..., 0], log_p[..., 0].detach().double(), log_p[:, :1, 0].expand(3, 17)):
        assert torch.equal(topk.top(score, among, 5), literal_top(score, among, 5))
    wide = staying("most", 3, 40)
    assert torch.equal(topk.top(log_p[..., 1], wide[:, 3:20], 5), literal_top(log_p[..., 1], wide[:, 3:20], 5))


# -- equal order ---------------------------------------------------------------------------------------------
def equally(batch: int, slots: int, kept: int, seed: int) -> Tensor:
    rank = torch.rand(batch, slots, generator=generator(seed)).argsort(-1).argsort(-1)
    return (rank < kept).to(DEVICE)


@here
@pytest.mark.parametrize(("batch", "slots", "kept"), [(1, 1, 1), (5, 7, 3), (5, 7, 0), (5, 7, 7), (33, 300, 211)])
def test_order_of_equally_many(batch: int, slots: int, kept: int) -> None:
    first = torch.arange(batch * slots, dtype=torch.int32, device=DEVICE)
    stay = equally(batch, slots, kept, 1)
    found, known = pack_index.order(stay, first, kept), pack_index.reference(stay, first, kept)
    whole = pack_index.order(stay, first)  # and as without a count, less the room
    for one, two, three in zip(found, known, whole, strict=True):
        assert one.dtype == torch.int32
        assert torch.equal(one, two)
        assert torch.equal(one, three[: len(one)])
    assert len(found[1]) == len(found[3]) == batch * kept
    if kept > 1:
        fewer = stay & (torch.arange(slots, device=DEVICE) != stay.long().argmax(-1)[:, None])
        for one, two in zip(
            pack_index.order(fewer, found[0], kept - 1), pack_index.reference(fewer, found[0], kept - 1), strict=True
        ):
            assert torch.equal(one, two)


# -- rows that meet ------------------------------------------------------------------------------------------
def meeting(live: Tensor, kept: int | None, kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """into and scale [B, N]: of every image `kept` live tokens stay (any number without), the others join some."""
    g, live = generator(seed), live.cpu()
    into = torch.where(live, torch.arange(live.shape[1]), -1)
    for b, there in enumerate(live):
        order = there.nonzero()[:, 0]
        order = order[torch.randperm(len(order), generator=g)]
        stays = kept if kept is not None else int(torch.randint(len(order) + 1, (1,), generator=g))
        stay, leave = order[:stays], order[stays:]
        at = torch.randint(max(stays, 1), (len(leave),), generator=g) if kind != "all join one" else leave * 0
        into[b, leave] = stay[at] if stays else -1
        if kind == "some join nobody":
            into[b, leave[::3]] = -1
        if kind == "nobody joins":
            into[b, leave] = -1
        if kind == "some join who leaves":
            into[b, leave[::3]] = leave[1] if len(leave) > 1 else -1
    scale = torch.rand(live.shape, generator=g) * torch.tensor([1e-6, 1.0])[torch.arange(live.shape[1]) % 2]
    scale[~live] = NAN
    return into.to(DEVICE), scale.to(DEVICE)


KINDS = ("plain", "all join one", "some join nobody", "nobody joins", "some join who leaves")
CASES = [  # images, slots, width, live at first, stay
    *((1, 1, 48, 1, 1), (1, 9, 48, 1, 1), (2, 17, 192, 17, 1), (2, 17, 48, 17, 17), (2, 17, 48, 9, 5)),
    *((3, 70, 48, 61, 20), (1, 197, 384, 197, 150), (3, 7, 40, 7, 0)),
]


def check_merge(
    case: tuple[int, int, int, int, int], equal: bool, kind: str, dtype: torch.dtype, seed: int = 0
) -> None:
    batch, slots, width, before, after = case
    live = equally(batch, slots, before, seed) if equal else staying("most", batch, slots, seed)
    into, scale = meeting(live, after if equal else None, kind, seed + 1)
    number = int(live.sum())
    place, cells, _, _ = pack_index.reference(live, torch.arange(live.numel(), dtype=torch.int32, device=DEVICE))
    rows = noise(number + 5, width, seed=seed + 2, dtype=dtype, live=number)
    room = after if equal else None
    found, *nothing = merge.merge(rows, live, into, scale, place, room)
    assert nothing == [None]
    expected = merge.reference(rows.double(), live, into, scale.double(), place, room)
    # and by a loop over the tokens
    stays, sums, cell_list = [], [], cells[:number].tolist()
    where = {cell: row for row, cell in enumerate(cell_list)}
    for cell in cell_list:
        b, j = divmod(cell, slots)
        if int(into[b, j]) == j:
            met = [i for i in range(slots) if b * slots + i in where and int(into[b, i]) == j]
            parts = [scale[b, i].double() * rows[where[b * slots + i]].double() for i in met]
            stays.append(cell)
            sums.append(torch.stack(parts).sum(0))
    assert found[0].dtype == dtype
    assert found[3][: len(stays)].tolist() == stays
    assert len(found[0]) == batch * (slots if room is None else room)
    for one, two in zip(found[1:], expected[1:], strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    if stays:
        assert_near(found[0][: len(stays)], torch.stack(sums), ROUNDING[dtype])
        assert_near(expected[0][: len(stays)], torch.stack(sums), 1e-12)
    size = 1 + noise(batch, slots, seed=seed + 3).abs()
    left = found[1].sum(-1).int() if seed % 2 else None  # known beforehand, or not
    again, weight = merge.merge(rows, live, into, scale, place, room, size, left)
    assert weight is not None
    assert_near(weight[: len(stays)], size.flatten()[found[3][: len(stays)].long()].double().log2(), 1e-6)
    for one, two in zip(again, found, strict=True):
        assert torch.equal(one[: len(stays)] if one is again[0] else one, two[: len(stays)] if two is found[0] else two)


@here
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_merge(case: tuple[int, int, int, int, int], kind: str) -> None:
    check_merge(case, True, kind, torch.float32)
    check_merge(case, False, kind, torch.float32, seed=3)


@here
@dtypes
def test_merge_rounds_once(dtype: torch.dtype) -> None:
    """Sums of many, whose scales no half number holds: as near as the last digit."""
    check_merge((2, 70, 192, 70, 5), True, "plain", dtype)
    check_merge((2, 70, 192, 70, 5), False, "all join one", dtype)


@here
def test_merge_of_more_images_than_find_their_order_in_it() -> None:
    assert not merge.tile_for(9).orders
    check_merge((9, 40, 48, 40, 20), True, "plain", torch.float32)
    check_merge((9, 40, 48, 40, 20), False, "some join who leaves", torch.float32, seed=3)


@here
def test_merge_of_many_slots() -> None:
    check_merge((1, 1025, 16, 1025, 800), True, "some join nobody", torch.float16)


@here
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("stay", [25, 12])  # so that those that join are one tile of them, or two
def test_a_bad_row_reaches_only_those_that_it_joins(stay: int, equal: bool, bad: float) -> None:
    live = torch.ones(3, 40, dtype=torch.bool, device=DEVICE)
    into, scale = meeting(live, stay, "plain", 1)
    joins = into != torch.arange(40, device=DEVICE)
    assert (joins.sum(-1) > merge.tile_for(3).joining).all() == (stay == 12)
    last = [(b, int(joins[b].nonzero()[-1])) for b in range(3)]
    place = torch.arange(120, dtype=torch.int32, device=DEVICE)
    clean = noise(120, 80)
    before = merge.merge(clean, live, into, scale, place, stay if equal else None)[0]
    for b, i in ((0, 3), (1, 17), (1, 18), (2, 39), *last):
        rows = clean.clone()
        rows[b * 40 + i, 70] = bad
        found = merge.merge(rows, live, into, scale, place, stay if equal else None)[0]
        target = int(before[2][b * 40 + int(into[b, i])])
        same = torch.ones(3 * stay, 80, dtype=torch.bool, device=DEVICE)
        same[target, 70] = False
        assert not found[0][target, 70].isfinite()
        assert torch.equal(found[0][: 3 * stay][same], before[0][: 3 * stay][same])


# -- what they say -------------------------------------------------------------------------------------------
@here
@pytest.mark.parametrize(("batch", "slots"), [(1, 1), (3, 17), (2, 197), (1, 1025)])
@pytest.mark.parametrize("says", [False, True])
def test_join(batch: int, slots: int, says: bool) -> None:
    present = staying("most", batch, slots, 1)
    present[0, 0] = True
    into, _ = meeting(present, None, "some join nobody", 2)
    size = 1 + (torch.rand(batch, slots, generator=generator(3)) * 4).floor().to(DEVICE)
    say = size * torch.rand(batch, slots, generator=generator(4)).to(DEVICE) if says else None
    if say is not None:
        say[~present] = NAN
    with torch.no_grad():
        scale, after = merge.join(into, size, present, say)
    wanted, sizes = merge.reference_join(into, size.double(), present, None if say is None else say.double())
    assert scale.dtype == after.dtype == torch.float32
    assert_near(scale, wanted, 1e-6)
    assert torch.equal(after.double(), sizes)  # whole numbers
    for b, i in present.nonzero().tolist()[:200]:
        j = int(into[b, i])
        if j >= 0:
            met = ((into[b] == j) & present[b]).nonzero()[:, 0]
            weight = (size if say is None else say)[b].double()
            assert float(scale[b, i]) == pytest.approx(float(weight[i] / weight[met].sum()), rel=1e-5)
            assert into[b, j] != j or float(after[b, j]) == float(size[b, met].sum())


@here
def test_join_of_those_without_any_say() -> None:
    into = torch.tensor([[1, 1, 2, -1]], device=DEVICE)
    size, say = torch.ones(1, 4, device=DEVICE), torch.zeros(1, 4, device=DEVICE)
    present = torch.tensor([[True, True, True, True]], device=DEVICE)
    with torch.no_grad():
        scale, after = merge.join(into, size, present, say)
    assert scale.tolist() == [[0.0, 0.0, 0.0, 0.0]]
    assert after.tolist() == [[1.0, 2.0, 1.0, 1.0]]


# -- back from a block ---------------------------------------------------------------------------------------
@here
@dtypes
@pytest.mark.parametrize("width", [24, 48, 192])
def test_back(width: int, dtype: torch.dtype) -> None:
    for batch, slots, counted in ((1, 1, False), (5, 7, False), (5, 7, True), (3, 50, True)):
        live = staying("most", batch, slots, 1)
        took_part = live & staying("some", batch, slots, 2)
        first = torch.arange(live.numel(), dtype=torch.int32, device=DEVICE)
        _, cells, _, _ = pack_index.reference(live, first)
        place, _, offsets, _ = pack_index.reference(took_part, first)
        number = int(live.sum())
        rows = noise(live.numel() if counted else number, width, seed=3, dtype=dtype, live=number)
        moved = noise(live.numel(), width, seed=4, dtype=dtype, live=int(offsets[-1]))
        cells = cells[: len(rows)]
        for gate in (None, noise(batch, slots, seed=5), noise(slots, batch, seed=5).T):
            found = unskip.back(rows, cells, moved, place, gate, count(number) if counted else None)
            assert found.dtype == dtype
            wide = None if gate is None else gate.double()
            expected = unskip.reference(rows.double(), cells, moved.double(), place, wide, count(number))
            assert_near(found[:number], expected[:number], ROUNDING[dtype])
            if gate is None:
                assert torch.equal(found[:number].double(), expected[:number])


# -- what torch wants of an operation ------------------------------------------------------------------------
@here
def test_operations_say_what_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    live, first = torch.ones(2, 5, dtype=torch.bool, device=DEVICE), torch.arange(10, dtype=torch.int32, device=DEVICE)
    into, scale = meeting(live, 3, "plain", 1)
    check(topk._top, (noise(2, 5), live, 3, False))
    check(pack_index._order, (equally(2, 5, 3, 1), first, 3))
    for measures in (False, True):
        check(merge._merge, (noise(10, 80), live, into, scale, first, 3, scale if measures else None, None, measures))
        check(unskip._back, (noise(10, 16), first, noise(10, 16), first, None, None, measures))
    check(merge._join, (into, scale, live, None))
    check(merge._join, (into, scale, live, scale))
    for gate in (None, noise(2, 5)):
        check(unskip._back, (noise(10, 16), first, noise(10, 16), first, gate, None, False))


def test_without_kernels_the_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if launch.usable(torch.device(DEVICE)):
        pytest.skip("the kernels run")
    live, first = torch.ones(2, 5, dtype=torch.bool), torch.arange(10, dtype=torch.int32)
    into, scale = meeting(live, 3, "plain", 1)
    rows = noise(10, 16)
    assert torch.equal(topk.top(scale, live, 2), literal_top(scale, live, 2))
    assert torch.equal(
        merge.merge(rows, live, into, scale, first)[0][0], merge.reference(rows, live, into, scale, first)[0]
    )
    size = scale.clone().requires_grad_()
    merge.join(into, size, live)[0].sum().backward()
    assert size.grad is not None
