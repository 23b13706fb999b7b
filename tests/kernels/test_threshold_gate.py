"""The gate inside fc1 (kernels/threshold_gate.py): the kernel alone, and whole passes with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adaptivit
from adaptivit.budget.control import RunSetting
from adaptivit.decision import Drop, Skip
from adaptivit.execution import triton
from adaptivit.kernels import launch, norm_linear, pack_index, threshold_gate
from adaptivit.kernels.launch import KernelRows
from adaptivit.layouts import PackedOnDevice, RowSchedule
from adaptivit.policies.aht import AHT
from tests.support.fused import CONFIG, HALTING, assert_same, images_of, run
from tests.support.interpreter import DEVICE, here
from tests.support.kernels import NAN_WARNINGS, TOLERANCE, assert_near, double, dtypes, noise, poison  # noqa: F401
from tests.support.models import randomise

pytestmark = NAN_WARNINGS

IMAGES, SLOTS, FIRST, WIDTH, PROBE = 3, 13, 2, 48, 33
AFFINE = (1 + noise(WIDTH, seed=1), noise(WIDTH, seed=2), 1e-6)
W, B = noise(72, WIDTH, seed=3) / WIDTH**0.5, noise(72, seed=4)
TILE = norm_linear.Tile(16, 16, 4)


def luck(seed: int) -> torch.Tensor:
    return torch.rand(IMAGES, SLOTS, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@here
@dtypes
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("moved", ["no", "before", "now", "no token is left"])
def test_the_kernel(moved: str, shifted: bool, dtype: torch.dtype) -> None:
    """Rows in their cells; moved some blocks ago, and fewer since; to be moved by this kernel. A cell without a row,
    whatever memory held, is not active."""
    gain, offset, w, b = (t.to(dtype) for t in (*AFFINE[:2], W, B))
    x, chance = (3 * noise(IMAGES * SLOTS, WIDTH) + 1).to(dtype), luck(5)
    active, where, count, index, live = chance < 0.8, (None, None), None, None, len(x)
    if moved != "no":
        stay = torch.zeros_like(active) if moved == "no token is left" else chance < 0.6
        place, cells, offsets, index = pack_index.reference(stay, torch.arange(len(x), device=DEVICE).int())
        active, where, count, live = stay & (chance < 0.5), (cells, place), offsets[-1:], int(offsets[-1])
        if moved == "now":
            x[~stay.flatten()] = float("nan")
        else:
            x[:live], x[live:], index = x[index[:live].long()], float("nan"), None
    numbers = (torch.tensor([[0.0, n]], dtype=dtype, device=DEVICE)[0, 1] for n in (1.5, -0.5))  # views
    shift = torch.tensor([[0.5], [-1.0], [2.0]], device=DEVICE) if shifted else None
    gate = threshold_gate.ThresholdGate(*numbers, shift, 0.99, FIRST, luck(3), active)
    given = (KernelRows(x, index, count), gain, offset, 1e-6, w, b, PROBE, True)
    out, kept, element, found = norm_linear.norm_linear(*given, gate=gate, where=where, tile=TILE)
    plain = norm_linear.norm_linear(*given, tile=TILE)
    assert element is not None
    assert found is not None
    for mine, usual in zip((out, kept, element), plain[:3], strict=True):
        assert torch.equal(mine[:live], usual[:live])  # type: ignore[index]
    element[live:] = 0.0
    want = threshold_gate.reference(element, gate, *where)
    assert_near(found.score, want.score, 1e-6)
    assert_near(found.total, want.total, 1e-6)
    assert (found.total - gate.threshold).abs().min() > 1e-5  # no token at the edge
    assert torch.equal(found.active, want.active)
    assert torch.equal(found.active_rows[:live], want.active_rows[:live])
    assert torch.equal(found.total[:, :FIRST], gate.total[:, :FIRST])
    assert torch.equal(found.active[:, :FIRST], active[:, :FIRST])
    if live:
        assert (found.active != active).any()
        exact = norm_linear.reference(*double(x, gain, offset), 1e-6, *double(w, b), index, count, PROBE, True)[2]
        assert exact is not None
        assert_near(element[:live], exact[:live], TOLERANCE[dtype])


@here
def test_nan_stays_and_the_threshold_is_enough() -> None:
    x, one = noise(IMAGES * SLOTS, WIDTH), torch.ones(IMAGES, SLOTS, device=DEVICE)
    x[7] = float("nan")
    sure = (torch.zeros((), device=DEVICE), torch.full((), 40.0, device=DEVICE))  # the score is 1
    gate = threshold_gate.ThresholdGate(*sure, None, 1.0, FIRST, 0 * one, one > 0)
    found = norm_linear.norm_linear(KernelRows(x), *AFFINE, W, B, PROBE, True, gate=gate, tile=TILE)[3]
    left = torch.arange(SLOTS, device=DEVICE).expand(IMAGES, -1) < FIRST
    left.flatten()[7] = True
    assert found is not None
    assert torch.equal(found.active, left)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The gates that products apply."""
    found: list[Any] = []
    real = triton.norm_linear

    def noted(*args: Any) -> Any:
        found.extend([gate] if (gate := args[9]) is not None else [])
        return real(*args)

    monkeypatch.setattr(triton, "norm_linear", noted)
    return found


def model_of(**more: Any) -> adaptivit.AdaptiveViT:
    model = adaptivit.create(CONFIG, "aht", **HALTING | more)
    randomise(model.vit)
    return model.to(DEVICE).eval()


PLANS = {"never": RowSchedule(frozenset(), (34,) * 4), "once": RowSchedule(frozenset({1}), (34, 34, 20, 20))}
PLANS["always"] = RowSchedule(None, (34, 30, 25, 20))


@here
@pytest.mark.parametrize(
    ("more", "plan", "gates"),
    [
        *(({}, plan, 3) for plan in PLANS.values()),  # four blocks, the last decides nothing
    ],
    ids=str,
)
def test_a_pass_is_that_of_masked(more: dict[str, Any], plan: RowSchedule, gates: int, gated: list[Any]) -> None:
    model, images = model_of(**more), images_of()
    expected = run(model, images, "masked", False, ("plan",))
    assert not gated
    found = run(model, images, "packed", True, ("plan",), plan)
    assert len(gated) == gates
    assert_same(found, expected)
    assert not expected.trace.attended.all()
    for name in ("scores", "halt", "remainder", "presence"):
        assert_near(found.trace.facts[name].double(), expected.trace.facts[name].double(), 1e-5)


@here
@pytest.mark.parametrize(
    ("case", "gates"), [("shift", 3), ("limit", 0), ("score", 0), ("gathered", 2), ("few", 1), ("many", 0)]
)
def test_where_a_kernel_decides(case: str, gates: int, gated: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget shifts the gate; a limit makes others leave; a subclass scores by itself; on `gathered` one image has as
    many rows as tokens left; from FEW_ROWS on fc1 is a kernel of its own."""

    class Halved(AHT):
        def _score(self, ctx: Any) -> Any:
            return super()._score(ctx) / 2

    model, images = model_of(), images_of()[: 1 if case == "gathered" else 2]
    if case == "score":
        model.policy.__class__ = Halved
    monkeypatch.setattr(triton, "FEW_ROWS", {"few": 25, "many": -1}.get(case, 1024))
    shift = torch.tensor([1.5, -2.0], device=DEVICE) if case == "shift" else None
    setting = RunSetting(model.policy, shift=shift)
    plan = RowSchedule(frozenset(), (20, 34, 34, 34)) if case == "few" else None
    outputs = []
    for layout, use in (("masked", False), ("gathered" if case == "gathered" else "packed", True)):
        launch.on_cpu = use
        with torch.inference_mode():
            if case == "limit":
                outputs.append(model(images, layout=layout, max_macs="-30%"))
            else:
                outputs.append(model.run(model.choose(layout, images.device), images, (), plan, setting))
    assert_same(outputs[1], outputs[0])
    assert len(gated) == gates


@here
def test_what_is_known_of_rows_ends_with_their_block() -> None:
    """Rows of the tokens that do not skip a block are not those of all."""
    layout = PackedOnDevice(noise(2, 9, 16), 1)
    layout.keeps_prefix, alive = True, layout.alive
    layout.skip(Skip(torch.arange(9, device=DEVICE).expand(2, -1) > 4))
    layout.remember(alive, torch.zeros(18, dtype=torch.bool, device=DEVICE))
    layout.unskip()
    layout.drop(Drop(torch.zeros_like(alive), staying=alive))
    weight = layout._row_weight()
    assert weight is None or (isinstance(weight, torch.Tensor) and bool(weight.all()))
