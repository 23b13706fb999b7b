"""GMACs and token counts at 224 px against those in the papers, from a real pass with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

import adaptivit
from tests.support.models import pictures, randomise


@pytest.fixture(scope="module")
def backbones() -> dict[str, Any]:
    made = {}
    for size, name in (("T", "deit_tiny_patch16_224"), ("S", "deit_small_patch16_224")):
        with torch.device("meta"):  # timm's careful initialisation takes longer than the passes
            vit = timm.create_model(name)
        made[size] = vit.to_empty(device="cpu").eval()
        randomise(made[size])
    return made


CASES: list[tuple[str, str, dict[str, Any], float, int]] = [
    ("T", "mod", {"capacity": 0.5}, 0.927, 3),
    ("T", "mod", {"capacity": 0.125}, 0.709, 3),
    ("S", "mod", {"capacity": 0.5}, 3.42, 2),
    ("T", "amod", {"capacity": 0.5}, 0.927, 3),
    ("T", "amod", {"capacity": 0.125}, 0.709, 3),
    ("S", "amod", {"capacity": 0.5}, 3.42, 2),
    ("S", "amod", {"capacity": 0.125}, 2.60, 2),
    ("S", "amod", {"capacity": 0.7}, 3.88, 2),
    ("S", "dynamicvit", {"keep": 0.7}, 2.88, 2),
    ("S", "spvit", {"select": "count"}, 2.65, 2),
    ("S", "evit", {}, 3.03, 2),
    ("S", "evit", {"fuse": False}, 3.00, 2),
    ("T", "evit", {}, 0.821, 3),
    ("T", "evit", {"fuse": False}, 0.812, 3),
    ("S", "tome", {"r": 13}, 2.70, 2),
    ("S", "tome", {"r": 8}, 3.42, 2),
]


@pytest.mark.parametrize(("size", "policy", "given", "gmacs", "digits"), CASES)
@torch.no_grad()
def test_gmacs(
    backbones: dict[str, Any], size: str, policy: str, given: dict[str, Any], gmacs: float, digits: int
) -> None:
    out = adaptivit.create(backbones[size], policy, **given)(pictures(1, 224))
    assert round(float(out.macs_blocks[0]) / 1e9, digits) == gmacs
    assert out.layout == "gathered"
    assert float(out.macs[0]) > float(out.macs_blocks[0])  # the cost of the method itself counts, too


@torch.no_grad()
def test_tokens(backbones: dict[str, Any]) -> None:
    image = pictures(1, 224)

    def counts(policy: str, **given: Any) -> list[int]:
        return adaptivit.create(backbones["T"], policy, **given)(image).trace.live_mlp[:, 0].tolist()

    stages = [0, 3, 6, 9]
    assert [counts("dynamicvit")[i] - 1 for i in stages] == [196, 137, 96, 67]
    assert [counts("evit")[i] - 1 for i in stages] == [196, 139, 99, 71]
    assert [counts("evit", fuse=False)[i] - 1 for i in stages] == [196, 138, 97, 68]
    assert counts("tome", r=8) == list(range(189, 100, -8))
    assert counts("amod") == [197, 99] * 6
    assert counts("mod", capacity=0.125) == [197, 25] * 6


@torch.no_grad()
def test_the_predictors_of_dynamicvit_are_counted(backbones: dict[str, Any]) -> None:
    """196, 137 and 96 patches, and the class token among the rows: D^2 + D^2 / 2 + D^2 / 8 + D / 2 each."""
    out = adaptivit.create(backbones["S"], "dynamicvit")(pictures(1, 224))
    assert float(out.parts["policy"][0]) / 1e9 == pytest.approx(0.10, abs=0.006)


@torch.no_grad()
def test_a_budget_of_static_is_met(backbones: dict[str, Any]) -> None:
    out = adaptivit.create(backbones["T"], "fold", budget=0.67)(pictures(1, 224))
    assert 0.66 < float(out.macs[0]) / out.costs.static <= 0.67
