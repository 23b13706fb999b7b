"""The parts of a pass have times of their own, and nothing stays named."""

from __future__ import annotations

import pytest
import torch

from adaptivit.execution.cpu import CpuExecutor
from adaptivit.execution.parts import PARTS, part_times
from tests.support.models import tiny


@pytest.mark.parametrize("policy", ["static", "amod", "mod"])
def test_parts_of_a_pass(policy: str) -> None:
    model = tiny(policy).eval()
    images = torch.randn(2, 3, 32, 32)
    before = model(images).logits
    found = part_times(model, images, repeats=2, warm_up=1)
    assert set(found.cpu) == set(PARTS)
    assert found.device == {}
    assert min(found.cpu["attention"], found.cpu["MLP"], found.cpu["other"]) > 0
    assert found.cpu["routing"] > 0
    assert "before" not in vars(model.policy)
    assert CpuExecutor.attention.__qualname__ == "CpuExecutor.attention"
    assert not hasattr(CpuExecutor.attention, "__wrapped__")
    assert torch.equal(model(images).logits, before)
