"""Decisions inside the product that the supervisor reads (ops/gate.py): the kernel alone, and whole passes with it."""

from __future__ import annotations

from typing import Any

import pytest
import test_kernels
import torch
from conftest import randomise
from interpreted import DEVICE, here
from test_fused import CONFIG, HALTING, assert_same, images_of, run
from test_kernels import TOLERANCE, assert_near, double, dtypes, noise
from torch._subclasses import FakeTensorMode

import adaptivit
from adaptivit.budget.control import RunSetting
from adaptivit.decision import Drop, Merge, Skip
from adaptivit.execution import triton
from adaptivit.kernels import halting_gate, launch, norm_linear, pack_index
from adaptivit.layouts import PackedOnDevice, RowSchedule
from adaptivit.policies.aht import AHT

pytestmark = test_kernels.pytestmark
_poison = test_kernels._poison

IMAGES, SLOTS, PREFIX, WIDTH, PROBE = 3, 13, 2, 48, 33
FACTS = ("scores", "halt", "remainder", "presence")


def a_gate(shifted: bool, going: torch.Tensor, dtype: torch.dtype = torch.float32) -> halting_gate.Gate:
    luck = torch.rand(IMAGES, SLOTS, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    gamma, beta = (torch.tensor([[0.0, value]], dtype=dtype, device=DEVICE)[0, 1] for value in (1.5, -0.5))  # views
    shift = torch.tensor([[0.5], [-1.0], [2.0]], device=DEVICE) if shifted else None
    return halting_gate.Gate(gamma, beta, shift, 0.99, PREFIX, luck, going)


def parts() -> dict[str, Any]:
    return {
        "affine": (1 + noise(WIDTH, seed=1), noise(WIDTH, seed=2)),
        "w": noise(72, WIDTH, seed=3) / WIDTH**0.5,
        "b": noise(72, seed=4),
    }


@here
@dtypes
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("moved", ["no", "before", "now", "nobody is left"])
@pytest.mark.parametrize("tile", [norm_linear.Tile(16, 16, 4), norm_linear.Tile(32, 32, 4)], ids=str)
def test_the_kernel(tile: norm_linear.Tile, moved: str, shifted: bool, dtype: torch.dtype) -> None:
    """Rows in their cells; moved some blocks ago, and thinned since; to be moved by this kernel. A cell without a row,
    whatever memory held, has not gone on."""
    given = parts()
    affine, w, b = tuple(t.to(dtype) for t in given["affine"]), given["w"].to(dtype), given["b"].to(dtype)
    x = (3 * noise(IMAGES * SLOTS, WIDTH) + 1).to(dtype)
    luck = torch.rand(IMAGES, SLOTS, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    going, where, rows, index = luck < 0.8, (None, None), None, None
    if moved != "no":
        stay = torch.zeros_like(going) if moved == "nobody is left" else luck < 0.6
        own = torch.arange(IMAGES * SLOTS, device=DEVICE, dtype=torch.int32)
        place, cells, offsets, index = pack_index.reference(stay, own)
        going, where, rows = stay & (luck < 0.5), (cells, place), offsets[-1:]
        live = int(rows)
        if moved == "now":
            x[~stay.flatten()] = float("nan")
        else:
            x[:live], x[live:], index = x[index[:live].long()], float("nan"), None
    knows = a_gate(shifted, going, dtype)
    found = norm_linear.run(x, *affine, 1e-6, w, b, index, rows, PROBE, True, tile, 0, knows, where)
    plain = norm_linear.run(x, *affine, 1e-6, w, b, index, rows, PROBE, True, tile)
    stop = len(x) if rows is None else int(rows)
    for mine, usual in zip(found[:3], plain[:3], strict=True):
        assert torch.equal(mine[:stop], usual[:stop])
    seen = found[2].clone()
    seen[stop:] = 0.0
    assert not seen.isnan().any()
    want = halting_gate.reference(seen, knows, *where)
    assert_near(found[3], want.score, 1e-6)
    assert_near(found[4], want.spent, 1e-6)
    assert torch.equal(found[5], want.going)
    if where[0] is not None:
        assert torch.equal(found[6][:stop], want.rows[:stop])
    assert (found[4] - knows.level).abs().min() > 1e-5  # so nobody is at the edge
    assert torch.equal(found[4][:, :PREFIX], knows.spent[:, :PREFIX])  # who never halts
    assert torch.equal(found[5][:, :PREFIX], going[:, :PREFIX])
    if moved != "nobody is left":
        assert (found[5] != going).any()
        exact = norm_linear.reference(*double(x, *affine), 1e-6, *double(w, b), index, rows, PROBE, True)[2]
        assert exact is not None
        assert_near(seen[:stop], exact[:stop], TOLERANCE[dtype])


@here
def test_nan_goes_on_and_the_level_is_enough() -> None:
    given, x = parts(), noise(IMAGES * SLOTS, WIDTH)
    x[7] = float("nan")
    going = torch.ones(IMAGES, SLOTS, dtype=torch.bool, device=DEVICE)
    spent = torch.zeros(IMAGES, SLOTS, device=DEVICE)
    sure = (torch.zeros((), device=DEVICE), torch.full((), 40.0, device=DEVICE))  # h is 1
    knows = halting_gate.Gate(*sure, None, 1.0, PREFIX, spent, going)
    tile = norm_linear.Tile(16, 16, 4)
    made = norm_linear.run(x, *given["affine"], 1e-6, given["w"], given["b"], None, None, PROBE, True, tile, 0, knows)
    want = halting_gate.reference(made[2], knows)
    assert torch.equal(made[5], want.going)
    left = torch.arange(SLOTS, device=DEVICE).expand(IMAGES, -1) < PREFIX
    left.flatten()[7] = True  # what is no number is not enough
    assert torch.equal(made[5], left)


@here
def test_the_operation_tells_its_shapes() -> None:
    """What torch.compile is told of it is what it does."""
    given, x = parts(), noise(IMAGES * SLOTS, WIDTH)
    knows = a_gate(True, torch.ones(IMAGES, SLOTS, dtype=torch.bool, device=DEVICE))
    cells = torch.arange(len(x), device=DEVICE, dtype=torch.int32)
    tensors = (knows.gamma, knows.beta, knows.shift, knows.level, knows.prefix, knows.spent, knows.going)
    for index, where in ((None, (None, None)), (cells.flip(0), (cells, cells))):
        usual = (x, *given["affine"], 1e-6, given["w"], given["b"], index, None, PROBE, True, 40, 80)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(norm_linear._norm_linear_gated, (*usual, *tensors, *where), test_utils=checks)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for every product that has decided."""
    found: list[int] = []
    real = triton.norm_linear_gated

    def counted(*args: Any) -> Any:
        found.append(len(found))
        return real(*args)

    monkeypatch.setattr(triton, "norm_linear_gated", counted)
    return found


CASES: dict[str, dict[str, Any]] = {
    "paper": {},
    "mean field": {"class_token": "mean_field"},
    "a gate for every block": {"gate": "layer"},
    "zeroed": {"halted": "zeroed"},
    "two supervisors": {"supervised": (0, 2)},
}
PLANS = {
    "never": RowSchedule(frozenset(), (34,) * 4),
    "once": RowSchedule(frozenset({1}), (34, 34, 20, 20)),
    "always": RowSchedule(None, (34, 30, 25, 20)),
}


def model_of(case: dict[str, Any], **more: Any) -> adaptivit.AdaptiveViT:
    model = adaptivit.create(CONFIG, "aht", **HALTING | case | more)
    randomise(model.vit)
    return model.to(DEVICE).eval()


@here
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES)
def test_a_pass_is_that_of_masked(case: str, plan: str, gated: list[int]) -> None:
    model, images = model_of(CASES[case]), images_of()
    expected = run(model, images, "masked", False, ("features",))
    assert not gated
    found = run(model, images, "packed", True, ("features",), PLANS[plan])
    assert len(gated) == (2 if case == "two supervisors" else 3)  # four blocks, the last decides nothing
    assert_same(found, expected)
    assert not expected.trace.attended.all()
    assert len({int(n) for n in expected.trace.live[-1]} | {int(n) for n in expected.trace.live[1]}) > 1
    for name in (*FACTS, "features"):
        assert_near(found.trace.facts[name].double(), expected.trace.facts[name].double(), 1e-5)


@here
@pytest.mark.parametrize("backbone", [{"distilled": True}, {"reg_tokens": 2, "no_embed_class": True}], ids=str)
def test_all_prefix_tokens_stay(backbone: dict[str, Any], gated: list[int]) -> None:
    model = adaptivit.create(CONFIG | backbone, "aht", gamma=2.0, beta=0.5)
    randomise(model.vit)
    model, images = model.to(DEVICE).eval(), images_of()
    expected = run(model, images, "masked", False)
    assert_same(run(model, images, "packed", True), expected)
    assert len(gated) == 3
    assert not expected.trace.attended.all()


@here
def test_few_rows_then_many(gated: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a gate has said of rows holds until somebody else decides."""
    monkeypatch.setattr(triton, "FEW_ROWS", 25)
    model, images = model_of({}), images_of()
    plan = RowSchedule(frozenset(), (20, 34, 34, 34))
    assert_same(run(model, images, "packed", True, plan=plan), run(model, images, "masked", False))
    assert len(gated) == 1


@here
def test_rows_that_are_fewer_than_cells_are_decided_apart(gated: list[int]) -> None:
    """One image on `gathered`: as many rows as are left."""
    model, images = model_of({}), images_of()[:1]
    assert_same(run(model, images, "gathered", True), run(model, images, "masked", False))
    assert 0 < len(gated) < 3


@here
def test_a_score_of_ones_own_is_heeded(gated: list[int]) -> None:
    class Own(AHT):
        def _score(self, *given: Any) -> Any:
            score, margin = super()._score(*given)
            return score / 2, margin

    model, images = model_of({}), images_of()
    model.policy.__class__ = Own
    assert_same(run(model, images, "packed", True), run(model, images, "masked", False))
    assert not gated


@here
def test_budgets_shift_it(gated: list[int]) -> None:
    model, images = model_of({}), images_of()
    turn = RunSetting(model.policy, shift=torch.tensor([1.5, -2.0], device=DEVICE))
    outputs = []
    for layout, use in (("masked", False), ("packed", True)):
        launch.on_cpu = use
        with torch.inference_mode():
            outputs.append(model._run(model._choose(layout, images.device), images, turn=turn))
    assert_same(outputs[1], outputs[0])
    assert len(gated) == 3
    assert (outputs[0].trace.attended != run(model, images, "masked", False).trace.attended).any()


@here
@pytest.mark.parametrize(
    "case",
    [
        {"relative": 1.0},
        {"plan_weight": 0.7},
        {"leave": "fold"},
        {"feature": "gelu"},
        {"decide": "between", "spare": 1, "feature": "received"},
    ],
    ids=str,
)
def test_what_reads_more_decides_itself(case: dict[str, Any], gated: list[int]) -> None:
    model, images = model_of(case), images_of()
    assert_same(run(model, images, "packed", True), run(model, images, "masked", False))
    assert not gated


@here
def test_a_limit_may_make_others_leave(gated: list[int]) -> None:
    model, images = model_of({}), images_of()
    outputs = []
    for layout, use in (("masked", False), ("packed", True)):
        launch.on_cpu = use
        with torch.inference_mode():
            outputs.append(model(images, layout=layout, max_macs="-30%"))
    assert_same(*outputs)
    assert not gated


@here
def test_many_rows_are_decided_apart(gated: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "FEW_ROWS", -1)
    model, images = model_of({}), images_of()
    assert_same(run(model, images, "packed", True), run(model, images, "masked", False))
    assert not gated


# -- what layouts and operations remember ----------------------------------------------------------------------------
def a_layout() -> PackedOnDevice:
    layout = PackedOnDevice(noise(2, 9, 16), 1)
    layout.keeps_prefix = True
    return layout


@here
def test_what_was_said_of_rows_ends_with_their_block() -> None:
    """Rows of some tokens are not those of all."""
    layout = a_layout()
    sitting = torch.arange(9, device=DEVICE).expand(2, -1) > 4
    layout.skip(Skip(sitting))
    live = layout.alive
    layout.know(live, torch.zeros(18, dtype=torch.bool, device=DEVICE))
    layout.unskip()
    layout.drop(Drop(torch.zeros_like(live), staying=live))
    weight = layout._row_weight()
    assert weight is None or (isinstance(weight, torch.Tensor) and bool(weight.all()))


@here
@torch.inference_mode()
def test_a_count_that_is_older_than_a_drop_is_not_believed() -> None:
    slot = torch.arange(9, device=DEVICE).expand(2, -1)
    into = torch.where(slot == 8, 1, slot)
    for older in (True, False):
        layout = a_layout()
        before = layout.alive
        layout.drop(Drop((slot == 5) & (torch.arange(2, device=DEVICE)[:, None] == 0)))
        left = (before & (into == slot)).sum(-1).int()
        of_whom = before if older else layout.alive
        left = left if older else (layout.alive & (into == slot)).sum(-1).int()
        layout.merge(Merge(into, torch.ones(2, 9, device=DEVICE), left_counts=(of_whom, left)))
        assert layout.offsets.tolist() == [0, 7, 15]
        assert layout.cells[:15].tolist() == [0, 1, 2, 3, 4, 6, 7, *range(9, 17)]


def test_constants_are_kept_but_for_those_that_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(pack_index, "_kept", {})
    like = torch.zeros(2)
    with FakeTensorMode():
        assert pack_index.steps(torch.zeros(2), 30, 7).shape == (5,)
    assert not pack_index._kept
    traced: Any = torch.compile(lambda x: pack_index.steps(x, 30, 7) + 1, backend="eager", fullgraph=True)
    assert traced(like).tolist() == [1, 8, 15, 22, 29]
    assert not pack_index._kept
    made = pack_index.steps(like, 30, 7)
    assert made.tolist() == [0, 7, 14, 21, 28]
    assert pack_index.steps(like, 30, 7) is made
    with torch.inference_mode():
        assert not pack_index.steps(like, 12, 3).is_inference()
    monkeypatch.setattr(pack_index, "KEPT", 2)
    assert pack_index.steps(like, 4, 1).tolist() == [0, 1, 2, 3]
    assert len(pack_index._kept) == 2
