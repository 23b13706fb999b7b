"""Models and passes for the tests of the fused kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import adaptivit
from adaptivit.kernels import launch
from adaptivit.layouts import RowSchedule
from adaptivit.model import AdaptiveViT
from adaptivit.output import Output
from tests.support.interpreter import DEVICE
from tests.support.models import pictures, randomise
from tests.support.policies import PAPERS

WARNINGS = [
    # what numpy says in the interpreter of rows that are left over and may be anything
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
    # torch's own, of the mode that finds out who waits for the GPU
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]

CONFIG: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 4,
    "num_heads": 2,
    "num_classes": 10,
}


HALTING = {"gamma": 2.0, "beta": -1.5}


POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "static": ("static", {}),
    "static, fewer blocks": ("static", {"depth": 2}),
    "aht": ("aht", HALTING),
    "aht_merge": ("aht_merge", {"gate": "shared", "center_per_image": 0.0, "gamma": 2.0, "beta": -5.0}),
    "aht_merge, by fc1": ("aht_merge", PAPERS | HALTING | {"halting_blocks": (0, 1, 2)}),
    "avit": ("avit", {"gate_scale": 2.0, "gate_center": 0.5}),
    "avit, folds": ("avit", {"gate_scale": 2.0, "gate_center": 0.5, "removal": "merge"}),
    "amod": ("amod", {}),
    "mod": ("mod", {}),
    "dynamicvit": ("dynamicvit", {}),
    "dynamicvit, folds": ("dynamicvit", {"removal": "merge"}),
    "evit": ("evit", {}),
    "tome": ("tome", {"r": 3}),
    "tome, all it can": ("tome", {"r": 50}),
    "fold": ("fold", {"keep": 0.8}),
    "fold, by all queries": ("fold", {"keep": 0.6, "evidence": "column", "power": 1.0, "value": 0.0}),
}


def make(case: str = "static", change: dict[str, Any] | None = None, config: dict[str, Any] = CONFIG) -> AdaptiveViT:
    """A model with random weights, the policy's too, but for its gate."""
    name, given = POLICIES[case]
    model = adaptivit.create(config | (change or {}), name, **given)
    gate = {k: p.detach().clone() for k, p in model.policy.named_parameters() if p.ndim == 0}
    randomise(model.vit)
    randomise(model.policy, 1)
    model.policy.load_state_dict(gate, strict=False)
    return model.to(DEVICE)


def run(
    model: AdaptiveViT,
    images: Tensor,
    layout: str,
    use: bool,
    aux: tuple[str, ...] = (),
    plan: RowSchedule | None = None,
) -> Output:
    """A pass with the fused kernels, or without any."""
    launch.on_cpu = use
    with torch.inference_mode():
        choice = model.choose(layout, images.device)
        assert choice.fused == (use and layout != "masked")
        return model(images, layout=layout, aux=aux) if plan is None else model.run(choice, images, aux, plan)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "on_cpu", launch.on_cpu)


def images_of(config: dict[str, Any] = CONFIG, batch: int = 2, seed: int = 0) -> Tensor:
    return pictures(batch, config["img_size"], seed).to(DEVICE)


def assert_near(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    """Relative to the largest value."""
    assert a.shape == b.shape
    assert a.isfinite().all()
    error, size = float((a.double() - b.double()).abs().max()), float(b.abs().max())
    assert error <= tolerance * size, f"off by {error:.2e} of {size:.2e}"


def assert_same(found: Output, expected: Output, tolerance: float = 1e-5) -> None:
    assert torch.equal(found.trace.attended, expected.trace.attended)
    assert torch.equal(found.trace.updated, expected.trace.updated)
    assert torch.equal(found.macs, expected.macs)
    assert_near(found.logits, expected.logits, tolerance)
    assert_near(found.features, expected.features, tolerance)
