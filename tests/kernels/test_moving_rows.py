"""Kernels that select, pack, merge and put back rows, against float64. What is not live, or not written, is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adaptivit.kernels import launch, merge, pack_index, topk, unskip
from tests.support.interpreter import DEVICE, ON_GPU, here
from tests.support.kernels import (
    NAN_WARNINGS,
    assert_near,
    check_operation,
    count,
    noise,
    poison,  # noqa: F401  (applies to this file)
    staying,
)

pytestmark = NAN_WARNINGS
NAN, INF = float("nan"), float("inf")
# half a last digit, and a little; the interpreter cuts bfloat16 off
ROUNDING = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3 if ON_GPU else 8e-3}
dtypes = pytest.mark.parametrize("dtype", ROUNDING, ids=lambda d: str(d).removeprefix("torch."))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cells_of(mask: Tensor) -> Tensor:
    return torch.arange(mask.numel(), dtype=torch.int32, device=DEVICE)


# -- the highest-scoring tokens --------------------------------------------------------------------------------------
def literal_topk(score: Tensor, candidates: Tensor, wanted: int) -> Tensor:
    out = torch.zeros_like(candidates)
    for b, (values, allowed) in enumerate(zip(score.tolist(), candidates.tolist(), strict=True)):
        rank = sorted((v == v, -v if v == v else 0.0, i) for i, v in enumerate(values) if allowed[i])
        for _, _, i in rank[:wanted]:
            out[b, i] = True
    return out


@here
@pytest.mark.parametrize(("batch", "slots"), [(1, 1), (3, 17), (2, 197), (1, 1025)])
def test_topk(batch: int, slots: int) -> None:
    plain = noise(batch, slots, seed=slots)
    odd = (3 * plain).round() / 3  # ties
    odd[:, ::5], odd[:, 1::7], odd[:, 2::11] = NAN, INF, -INF
    few = (torch.rand(batch, slots, generator=generator(slots)) < 0.6).to(DEVICE)
    cases = [(plain, few, slots // 3), (odd, few, slots // 3), (odd.half(), few, slots)]
    cases += [(odd, torch.ones_like(few), 1), (plain, torch.zeros_like(few), slots), (odd, few, 0)]
    for score, candidates, wanted in cases if slots < 1000 else [(odd, few, 300)]:
        chosen = topk.topk(score, candidates, wanted)
        assert torch.equal(chosen, literal_topk(score, candidates, wanted))
        assert torch.equal(chosen, topk.reference(score, candidates, wanted))
        rest = candidates & ~chosen
        assert torch.equal(topk.topk(score, candidates, wanted, rest=True), rest)
        assert torch.equal(topk.reference(score, candidates, wanted, rest=True), rest)


@here
def test_topk_of_strided_scores() -> None:
    """As DynamicViT has them: every second number of its log-probabilities, with a gradient in training."""
    log_p, some = noise(3, 17, 2).requires_grad_(), staying("some", 3, 17)
    for score in (log_p[..., 0], log_p[..., 0].detach().double(), log_p[:, :1, 0].expand(3, 17)):
        assert torch.equal(topk.topk(score, some, 5), literal_topk(score, some, 5))
    wide = staying("most", 3, 40)[:, 3:20]
    assert torch.equal(topk.topk(log_p[..., 1], wide, 5), literal_topk(log_p[..., 1], wide, 5))


# -- packed rows ------------------------------------------------------------------------------------------------------
SIZES = {"few": (5, 7), "one": (1, 1), "many images": (33, 300), "many slots": (3, 4100)}


@here
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_pack_index(size: tuple[int, int]) -> None:
    for kind in ("none", "all", "some"):
        stay = staying(kind, *size)
        place, cells, offsets, index = pack_index.pack_index(stay, cells_of(stay))
        live = int(stay.sum())
        assert torch.equal(cells[:live].long(), stay.flatten().nonzero()[:, 0])
        assert torch.equal(place[cells[:live].long()].long(), torch.arange(live, device=DEVICE))
        assert (place[~stay.flatten()] == -1).all()
        assert not cells[live:].any()
        assert torch.equal(offsets.diff().long(), stay.sum(1))
        assert int(offsets[0]) == 0
        assert torch.equal(index, cells)
        for found, expected in zip(
            (place, cells, offsets, index), pack_index.reference(stay, cells_of(stay)), strict=True
        ):
            assert torch.equal(found, expected)
            assert found.dtype == torch.int32


@here
def test_rows_that_move_twice() -> None:
    """They are where the second order says."""
    for size in ((5, 7), (33, 300)):
        stay = torch.ones(size, dtype=torch.bool, device=DEVICE)
        rows, place = cells_of(stay), cells_of(stay)
        for seed in (1, 2):
            stay = stay & staying("most", *size, seed=seed)
            order = pack_index.pack_index(stay, place)
            for found, expected in zip(order, pack_index.reference(stay, place), strict=True):
                assert torch.equal(found, expected)
            place, cells, offsets, index = order
            rows = rows[index.long()]
            assert torch.equal(rows[: offsets[-1]], cells[: offsets[-1]])


def test_the_sizes_take_both_branches() -> None:
    tiles = [launch.power_of_two(slots) * launch.power_of_two(batch, 1) for batch, slots in SIZES.values()]
    assert [tile > 16384 for tile in tiles] == [False, False, True, True]


def equally(batch: int, slots: int, kept: int, seed: int) -> Tensor:
    rank = torch.rand(batch, slots, generator=generator(seed)).argsort(-1).argsort(-1)
    return (rank < kept).to(DEVICE)


@here
@pytest.mark.parametrize(("batch", "slots", "kept"), [(1, 1, 1), (5, 7, 3), (5, 7, 0), (33, 300, 211)])
def test_pack_index_of_equally_many(batch: int, slots: int, kept: int) -> None:
    stay = equally(batch, slots, kept, 1)
    found = pack_index.pack_index(stay, cells_of(stay), kept)
    expected = pack_index.reference(stay, cells_of(stay), kept)
    whole = pack_index.pack_index(stay, cells_of(stay))  # and as without a count, less the room
    for one, two, three in zip(found, expected, whole, strict=True):
        assert one.dtype == torch.int32
        assert torch.equal(one, two)
        assert torch.equal(one, three[: len(one)])
    assert len(found[1]) == len(found[3]) == batch * kept
    if kept > 1:
        fewer = stay & (torch.arange(slots, device=DEVICE) != stay.long().argmax(-1)[:, None])
        again = pack_index.pack_index(fewer, found[0], kept - 1)
        for one, two in zip(again, pack_index.reference(fewer, found[0], kept - 1), strict=True):
            assert torch.equal(one, two)


# -- merges ------------------------------------------------------------------------------------------------------------
def merging(alive: Tensor, kept: int | None, kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """target and source_weight [B, N]: of every image `kept` alive tokens stay (any number without), others join."""
    g, alive = generator(seed), alive.cpu()
    target = torch.where(alive, torch.arange(alive.shape[1]), -1)
    for b, present in enumerate(alive):
        order = present.nonzero()[:, 0]
        order = order[torch.randperm(len(order), generator=g)]
        stays = kept if kept is not None else int(torch.randint(len(order) + 1, (1,), generator=g))
        stay, leave = order[:stays], order[stays:]
        at = torch.randint(max(stays, 1), (len(leave),), generator=g) if kind != "all join one" else leave * 0
        target[b, leave] = stay[at] if stays else -1
        if kind == "some join none":
            target[b, leave[::3]] = -1
        if kind == "none joins":
            target[b, leave] = -1
        if kind == "some join a leaving one":
            target[b, leave[::3]] = leave[1] if len(leave) > 1 else -1
    weight = torch.rand(alive.shape, generator=g) * torch.tensor([1e-6, 1.0])[torch.arange(alive.shape[1]) % 2]
    weight[~alive] = NAN
    return target.to(DEVICE), weight.to(DEVICE)


KINDS = ("plain", "all join one", "some join none", "none joins", "some join a leaving one")


def check_merge(
    case: tuple[int, int, int, int, int], equal: bool, kind: str, dtype: torch.dtype = torch.float32, seed: int = 0
) -> None:
    """case: images, slots, width, alive at first, tokens that stay."""
    batch, slots, width, before, after = case
    alive = equally(batch, slots, before, seed) if equal else staying("most", batch, slots, seed)
    target, weight = merging(alive, after if equal else None, kind, seed + 1)
    number = int(alive.sum())
    place, cells, _, _ = pack_index.reference(alive, cells_of(alive))
    rows = noise(number + 5, width, seed=seed + 2, dtype=dtype, live=number)
    room = after if equal else None
    found, nothing = merge.merge(rows, alive, target, weight, place, room)
    assert nothing is None
    expected = merge.reference(rows.double(), alive, target, weight.double(), place, room)
    # and by a loop over the tokens
    stays, sums, cell_list = [], [], cells[:number].tolist()
    where = {cell: row for row, cell in enumerate(cell_list)}
    for cell in cell_list:
        b, j = divmod(cell, slots)
        if int(target[b, j]) == j:
            joined = [i for i in range(slots) if b * slots + i in where and int(target[b, i]) == j]
            parts = [weight[b, i].double() * rows[where[b * slots + i]].double() for i in joined]
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
    again, log_size = merge.merge(rows, alive, target, weight, place, room, size, left)
    assert log_size is not None
    assert_near(log_size[: len(stays)], size.flatten()[found[3][: len(stays)].long()].double().log2(), 1e-6)
    for one, two in zip(again, found, strict=True):
        assert torch.equal(one[: len(stays)] if one is again[0] else one, two[: len(stays)] if two is found[0] else two)


@here
@pytest.mark.parametrize(
    "case",
    [(1, 1, 48, 1, 1), (2, 17, 192, 17, 1), (2, 17, 48, 17, 17), (3, 70, 48, 61, 20), (3, 7, 40, 7, 0)],
    ids=str,
)
def test_merge(case: tuple[int, int, int, int, int]) -> None:
    for number, kind in enumerate(KINDS if case[1] > 1 else KINDS[:1]):
        check_merge(case, True, kind, seed=number)
        check_merge(case, False, kind, seed=3 + number)


@here
@dtypes
def test_merge_rounds_once(dtype: torch.dtype) -> None:
    """Sums of many, whose weights no half number holds: as near as the last digit."""
    check_merge((2, 70, 192, 70, 5), True, "plain", dtype)
    check_merge((2, 70, 192, 70, 5), False, "all join one", dtype)


@here
def test_merge_of_more_images_than_are_packed_by_it() -> None:
    assert not merge.tile_for(9).packs
    check_merge((9, 40, 48, 40, 20), True, "plain")
    check_merge((9, 40, 48, 40, 20), False, "some join a leaving one", seed=3)


@here
def test_merge_of_many_slots() -> None:
    check_merge((1, 1025, 16, 1025, 1000), True, "some join none", torch.float16)


@here
def test_a_merge_of_more_tokens_than_one_program_counts() -> None:
    alive = torch.ones(33, 300, dtype=torch.bool, device=DEVICE)
    target, weight = merging(alive, None, "plain", 1)
    rows, stays = noise(alive.numel(), 16), target == torch.arange(300, device=DEVICE)
    expected = merge.reference(rows, alive, target, weight, cells_of(alive))
    for left in (None, stays.sum(-1).int()):
        found = merge.merge(rows, alive, target, weight, cells_of(alive), left=left)[0]
        assert_near(found[0][: int(stays.sum())], expected[0][: int(stays.sum())], 1e-6)
        for one, two in zip(found[1:], expected[1:], strict=True):
            assert torch.equal(one, two)


@here
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("stay", [25, 12])  # so that the rows that join are one tile, or two
def test_a_bad_row_reaches_only_what_it_joins(stay: int, equal: bool) -> None:
    alive = torch.ones(3, 40, dtype=torch.bool, device=DEVICE)
    target, weight = merging(alive, stay, "plain", 1)
    joins = target != torch.arange(40, device=DEVICE)
    assert (joins.sum(-1) > merge.tile_for(3).joining).all() == (stay == 12)
    last = [(b, int(joins[b].nonzero()[-1])) for b in range(3)]
    clean, room = noise(120, 80), stay if equal else None
    before = merge.merge(clean, alive, target, weight, cells_of(alive), room)[0]
    for (b, i), bad in zip(((0, 3), (1, 17), *last), (NAN, INF, NAN, INF, NAN), strict=True):
        rows = clean.clone()
        rows[b * 40 + i, 70] = bad
        found = merge.merge(rows, alive, target, weight, cells_of(alive), room)[0]
        reached = int(before[2][b * 40 + int(target[b, i])])
        same = torch.ones(3 * stay, 80, dtype=torch.bool, device=DEVICE)
        same[reached, 70] = False
        assert not found[0][reached, 70].isfinite()
        assert torch.equal(found[0][: 3 * stay][same], before[0][: 3 * stay][same])


# -- weights of size-weighted means ------------------------------------------------------------------------------------
@here
@pytest.mark.parametrize(("batch", "slots"), [(1, 1), (3, 17), (1, 1025)])
@pytest.mark.parametrize("weighted", [False, True])
def test_mean_weights(batch: int, slots: int, weighted: bool) -> None:
    alive = staying("most", batch, slots, 1)
    alive[0, 0] = True
    target, _ = merging(alive, None, "some join none", 2)
    size = 1 + (torch.rand(batch, slots, generator=generator(3)) * 4).floor().to(DEVICE)
    weight = size * torch.rand(batch, slots, generator=generator(4)).to(DEVICE) if weighted else None
    if weight is not None:
        weight[~alive] = NAN
    with torch.no_grad():
        source_weight, after = merge.mean_weights(target, size, alive, weight)
    exact = None if weight is None else weight.double()
    wanted, sizes = merge.mean_weights_reference(target, size.double(), alive, exact)
    assert source_weight.dtype == after.dtype == torch.float32
    assert_near(source_weight, wanted, 1e-6)
    assert torch.equal(after.double(), sizes)  # whole numbers
    for b, i in alive.nonzero().tolist()[:100]:
        j = int(target[b, i])
        if j >= 0:
            joined = ((target[b] == j) & alive[b]).nonzero()[:, 0]
            parts = (size if weight is None else weight)[b].double()
            assert float(source_weight[b, i]) == pytest.approx(float(parts[i] / parts[joined].sum()), rel=1e-5)
            assert target[b, j] != j or float(after[b, j]) == float(size[b, joined].sum())


@here
def test_mean_weights_of_tokens_without_any() -> None:
    target, alive = torch.tensor([[1, 1, 2, -1]], device=DEVICE), torch.ones(1, 4, dtype=torch.bool, device=DEVICE)
    with torch.no_grad():
        source_weight, after = merge.mean_weights(target, alive.float(), alive, torch.zeros(1, 4, device=DEVICE))
    assert source_weight.tolist() == [[0.0, 0.0, 0.0, 0.0]]
    assert after.tolist() == [[1.0, 2.0, 1.0, 1.0]]


# -- after a skipped block ---------------------------------------------------------------------------------------------
@here
@dtypes
@pytest.mark.parametrize("width", [24, 192])
def test_unskip(width: int, dtype: torch.dtype) -> None:
    for batch, slots, counted in ((1, 1, False), (5, 7, False), (3, 50, True)):
        alive = staying("most", batch, slots, 1)
        computed = alive & staying("some", batch, slots, 2)
        _, cells, _, _ = pack_index.reference(alive, cells_of(alive))
        place, _, offsets, _ = pack_index.reference(computed, cells_of(alive))
        number = int(alive.sum())
        rows = noise(alive.numel() if counted else number, width, seed=3, dtype=dtype, live=number)
        moved = noise(alive.numel(), width, seed=4, dtype=dtype, live=int(offsets[-1]))
        cells = cells[: len(rows)]
        for gate in (None, noise(batch, slots, seed=5), noise(slots, batch, seed=5).T):
            found = unskip.unskip(rows, cells, moved, place, gate, count(number) if counted else None)
            assert found.dtype == dtype
            wide = None if gate is None else gate.double()
            expected = unskip.reference(rows.double(), cells, moved.double(), place, wide, count(number))
            assert_near(found[:number], expected[:number], ROUNDING[dtype])
            if gate is None:
                assert torch.equal(found[:number].double(), expected[:number])


# -- what torch wants of an operation ----------------------------------------------------------------------------------
@here
def test_operations_declare_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    alive = torch.ones(2, 5, dtype=torch.bool, device=DEVICE)
    cells = cells_of(alive)
    target, weight = merging(alive, 3, "plain", 1)
    check_operation(topk._topk, noise(2, 5), alive, 3, False)
    check_operation(pack_index._pack_index, equally(2, 5, 3, 1), cells, 3)
    check_operation(pack_index._pack_index, staying("some", 2, 5), cells, None)
    for size in (None, weight):
        check_operation(merge._merge, noise(10, 80), alive, target, weight, cells, 3, size, None)
        check_operation(merge._mean_weights, target, weight, alive, size)
    for gate in (None, noise(2, 5)):
        check_operation(unskip._unskip, noise(10, 16), cells, noise(10, 16), cells, gate, None)


def test_without_kernels_the_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if launch.usable(torch.device(DEVICE)):
        pytest.skip("the kernels run")
    alive, rows = torch.ones(2, 5, dtype=torch.bool), noise(10, 16)
    target, weight = merging(alive, 3, "plain", 1)
    assert torch.equal(topk.topk(weight, alive, 2), literal_topk(weight, alive, 2))
    merged = merge.merge(rows, alive, target, weight, cells_of(alive))[0][0]
    assert torch.equal(merged, merge.reference(rows, alive, target, weight, cells_of(alive))[0])
    size = weight.clone().requires_grad_()
    merge.mean_weights(target, size, alive)[0].sum().backward()
    assert size.grad is not None
