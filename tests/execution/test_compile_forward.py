"""Every policy's forward pass is one graph for torch.compile, on the oldest torch that we promise too (.ci/oldest)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptivit import policies
from adaptivit.kernels import launch
from tests.support.fused import WARNINGS
from tests.support.interpreter import here
from tests.support.models import assert_close, pictures, tiny

pytestmark = WARNINGS
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "static": [{}],
    "aht": [
        {"beta": -2.0},
    ],
    "aht_merge": [{"gamma": 2.0}, {"feature": "class_row", "removal": "drop", "halting_blocks": (0, 1), "beta": -1.0}],
    "avit": [{"gate_scale": 1.0, "gate_center": 2.0}],
    "mod": [{}],
    "amod": [{}],
    "dynamicvit": [{}],
    "spvit": [{}, {"select": "count"}],
    "evit": [{}],
    "patch_slimming": [{"counts": (9, 4)}],
    "tome": [{"r": 2}],
    "fold": [{"keep": 0.8}],
    "act": [{}, {"unit": "token", "gate": "block", "bias": -1.0}],
    "confidence": [{"threshold": 0.2}, {"threshold": 0.02, "criterion": "entropy", "heads": "own"}],
    "similarity": [{}],
    "pondernet": [{"gate_scale": 1.0, "gate_center": 2.0}],
}
CASES = [(policy, given) for policy, several in SETTINGS.items() for given in several]


def test_no_policy_is_left_out() -> None:
    assert {*SETTINGS, "replay"} == set(policies.names())


def run_compiled(policy: str, given: dict[str, Any], layout: str) -> None:
    model, images = tiny(policy, more={"embed_dim": 48, "depth": 3}, **given), (pictures(2), pictures(2, seed=1))
    choice = model.choose(layout, images[0].device)
    torch._dynamo.reset()
    quick = torch.compile(lambda x: model.run(choice, x).logits, fullgraph=True, dynamic=False, backend="eager")
    quick(images[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_close(quick(images[1]), model.run(choice, images[1]).logits)  # who leaves is no part of the graph


@pytest.mark.parametrize(("policy", "given"), CASES)
@torch.inference_mode()
def test_a_masked_pass_is_one_graph(policy: str, given: dict[str, Any]) -> None:
    run_compiled(policy, given, "masked")


@here
@pytest.mark.parametrize(("policy", "given"), CASES)
@torch.inference_mode()
def test_a_pass_of_kernels_is_one_graph(policy: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the layout of the GPU, which waits for no count."""
    monkeypatch.setattr(launch, "on_cpu", True)
    run_compiled(policy, given, "auto")
