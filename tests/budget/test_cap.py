"""max_macs: no image costs more, on every layout, and images below the limit do not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import adaptivit
from adaptivit import layouts
from adaptivit.budget.control import RunSetting
from adaptivit.budget.limit import minimum
from adaptivit.cost import CostModel
from adaptivit.errors import UserError
from adaptivit.execution.select import Choice
from adaptivit.execution.torch import Executor
from adaptivit.layouts import Masked, Packed, PackedOnDevice
from adaptivit.output import Output
from tests.support.models import SIDES, assert_close, pictures, tiny
from tests.support.policies import CASES
from tests.support.reference_vit import randomised

LEAVING = ("aht", "avit", "act", "confidence", "similarity", "pondernet")
HALTING = [case for case, (name, _) in CASES.items() if name in LEAVING]

TYPES = (Masked, Packed, PackedOnDevice)


def run(model: Any, kind: type[layouts.Layout], images: Tensor, shift: Tensor | None, limit: Tensor | None) -> Output:
    setting = RunSetting(model.policy, shift, limit)
    return model.run(Choice(kind, Executor(model.backbone)), images, setting=setting)


def hostile(seed: int, batch: int = 5) -> Tensor:
    """Noise of all sizes, and constant images."""
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, 3, 32, 32, generator=g) * 10 ** (4 * torch.rand(batch, 1, 1, 1, generator=g) - 2)
    images[0] = float(torch.randn((), generator=g))
    return images


@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("case", HALTING)
def test_the_law(case: str, kind: str) -> None:
    """Every image, limits anywhere in their range, some shift of the gate, every layout."""
    name, more = CASES[case]
    seed = HALTING.index(case) * len(SIDES) + SIDES.index(kind)
    g = torch.Generator().manual_seed(seed)
    shares, shift = torch.rand(5, generator=g).tolist(), 18 * float(torch.rand((), generator=g)) - 9
    try:
        model = randomised(name, kind, seed=seed % 7, **more)
    except UserError:
        return  # this policy does not run on such a backbone
    costs = CostModel(model.shape, model.shape.tokens)
    least = minimum(model.policy, costs)
    limit = torch.tensor([least + share * (1.05 * costs.static - least) for share in shares], dtype=torch.float64)
    limit[-1] = least
    images, shifts = hostile(seed), torch.full((5,), shift)
    outputs = [run(model, layout, images, shifts, limit) for layout in TYPES]
    free = run(model, Masked, images, shifts, None)
    for output in outputs:
        assert (output.macs_deployed <= limit).all()
        assert torch.equal(output.trace.attended, outputs[0].trace.attended)
        assert_close(output.logits, outputs[0].logits, 1e-3)
        assert torch.equal(output.macs_deployed, outputs[0].macs_deployed)
    inside = free.macs_deployed <= limit  # the limit would not have been needed
    assert torch.equal(outputs[0].trace.attended[:, inside], free.trace.attended[:, inside])
    assert torch.equal(outputs[0].logits[inside], free.logits[inside])
    for i in range(5):
        alone = run(model, Masked, images[i : i + 1], shifts[:1], limit[i : i + 1])
        assert torch.equal(alone.trace.attended[:, 0], outputs[0].trace.attended[:, i])


@pytest.mark.parametrize("point", ["before_mlp", "after"])
@pytest.mark.parametrize("blocks", [None, (1, 3)])
def test_an_image_below_the_limit_is_not_touched(point: str, blocks: tuple[int, ...] | None) -> None:
    """At the very cost that it has."""
    model = tiny("aht_merge", halting_blocks=blocks, halt_point=point, gate="shared", gamma=20.0, threshold=1.5)
    images, shifts = hostile(0), torch.zeros(5)
    free = run(model, Masked, images, shifts, None)
    assert not free.trace.attended.all()
    held = run(model, Masked, images, shifts, free.macs_deployed)
    assert torch.equal(held.trace.updated, free.trace.updated)
    assert torch.equal(held.logits, free.logits)


@torch.no_grad()
def test_what_is_left_is_spread_over_the_blocks() -> None:
    """An image that no token would leave: as many tokens to the end as can be paid, and one more could not."""
    model = tiny("aht", beta=-100.0)
    free = model(pictures())
    assert (free.trace.live == 17).all()
    costs = CostModel(model.shape, 17)
    for share in (0.4, 0.6, 0.9):
        out = model(pictures(), max_macs=share * costs.static)
        live = out.trace.live
        first = int((live[:, 0] < 17).nonzero()[0])
        assert (live[:first] == 17).all()
        assert (live[first:] == live[first]).all()
        more = live.clone().double()
        more[first:] += 1
        assert (costs.embedding + costs.head + costs.blocks(more, more) > share * costs.static).all()


@torch.no_grad()
def test_those_nearest_to_halting_leave() -> None:
    model = tiny("aht", beta=-4.0)
    out = model(pictures(), max_macs="-40%")
    before = out.trace.fact("scores").cumsum(0)
    gone = 0
    for layer in range(1, 6):
        left = out.trace.attended[layer - 1] & ~out.trace.attended[layer]
        for b in range(3):
            if left[b].any():
                gone += 1
                stay = out.trace.attended[layer, b].clone()
                stay[0] = False  # the class token stays
                assert before[layer - 1, b][left[b]].min() >= before[layer - 1, b][stay].max()
    assert gone
    assert out.trace.attended[:, :, 0].all()


@pytest.mark.parametrize("case", ["avit", "act", "pondernet"])
@torch.no_grad()
def test_halting_mass_still_sums_to_one(case: str) -> None:
    """Tokens that have to leave halt, so the readout is a mean still."""
    name, more = CASES[case]
    model = tiny(name, **({"bias": -9.0} if name == "act" else more | {"gate_center": 9.0}))
    out = model(pictures(), max_macs="-40%")
    assert not out.trace.attended[-1].all()
    if name == "pondernet":
        mass = out.trace.fact("chance").sum(0)
    else:
        scores, halt = out.trace.fact("scores"), out.trace.fact("halt")
        before = torch.arange(1, 7)[:, None, None] < halt
        mass = (scores * before).sum(0) + out.trace.fact("remainder")
        assert torch.equal(halt[:, 1:], out.trace.depth[:, 1:])
    assert_close(mass, torch.ones_like(mass))


@torch.no_grad()
def test_as_a_setting_and_for_a_call() -> None:
    model = tiny("aht", beta=-100.0)
    model.max_macs = "-30%"
    assert model.max_macs == "-30%"
    static = model(pictures(), max_macs="none").macs
    assert (static == model(pictures(), max_macs="none").costs.static).all()
    assert (model(pictures()).macs <= 0.7 * static).all()
    each = model(pictures(), max_macs=["-20%", "-40%", "none"])
    assert (each.macs <= torch.tensor([0.8, 0.6, 1.0]) * static).all()
    assert each.macs[0] > 0.7 * static[0]
    model.train()
    assert (model(pictures()).macs == static).all()  # training is not held
    model.eval()
    model.max_macs = None
    assert (model(pictures()).macs == static).all()


@pytest.mark.parametrize("case", ["mod", "evit", "tome", "fold", "dynamicvit", "static"])
@torch.no_grad()
def test_policies_that_fix_counts_are_held_by_their_dial(case: str) -> None:
    name, more = CASES[case]
    model = randomised(name, **more)
    with pytest.raises(UserError, match="not calibrated"):
        model.max_macs = "-20%"
    curve = model.calibrate(pictures(1))
    static, least = curve.static, curve.points[-1].macs
    limits = [static, 0.8 * static, least]
    out = model(pictures(), max_macs=limits)
    assert (out.macs <= torch.tensor(limits, dtype=torch.float64)).all()
    model.max_macs = 0.8 * static
    assert (model(pictures()).macs <= 0.8 * static).all()
    assert (model(pictures(), budget=curve.points[-1].macs * 1.0001).macs == least).all()  # a lower budget holds


def test_errors() -> None:
    model = tiny("aht")
    least = minimum(model.policy, CostModel(model.shape, 17))
    for bad, message in {
        "-99%": "below the least that can be held",
        "3 ms": "expected MACs or a saving",
        "lots": "max_macs: expected",
        0.99 * least: "below the least",
    }.items():
        with pytest.raises(UserError, match=message):
            model.max_macs = bad
        with pytest.raises(UserError, match=message):
            model(pictures(), max_macs=bad)
    assert model.max_macs is None
    model.max_macs = least
    with torch.no_grad():
        out = model(pictures())
    assert (out.macs <= least).all()
    with pytest.raises(UserError, match=r"aux=\('exits',\)"):
        tiny("confidence")(pictures(), max_macs="-30%", aux=("exits",))
    with pytest.raises(UserError, match="'replay' cannot be held"):
        adaptivit.create(model.vit, "replay", trace=out.trace)(pictures(), max_macs="-30%")
    model.train()
    with pytest.raises(UserError, match="for evaluation"):
        model(pictures(), max_macs="-30%")
