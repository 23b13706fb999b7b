"""Constants that are kept, and masks that are stacked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from adaptivit.kernels import constants
from tests.support.interpreter import DEVICE, here
from tests.support.kernels import NAN_WARNINGS, check_operation, poison, staying  # noqa: F401

pytestmark = [*NAN_WARNINGS, here]


@torch.inference_mode()
@pytest.mark.parametrize(("number", "size"), [(1, (1, 1)), (12, (3, 197)), (3, (0, 5))])
def test_masks_stacked(number: int, size: tuple[int, int]) -> None:
    empty = torch.ones(size, device=DEVICE) > 0
    masks = [staying("most", *size, seed=seed) if all(size) else empty for seed in range(number)]
    masks[-1] = masks[-1].T.contiguous().T  # not as it lies in memory
    given = [*masks, masks[0]]  # one of them twice
    assert torch.equal(constants.stacked(given), torch.stack(given))
    assert torch.equal(constants.joined(given), torch.cat(given))


def test_constants_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels read them; not while something is traced, nor where a gradient may be wanted."""
    monkeypatch.setattr(constants, "_kept", {})
    x = torch.zeros(2, 3, device=DEVICE)
    with torch.inference_mode():
        one, zero = (constants.filled(x, (2, 3), n, kind) for n, kind in ((True, torch.bool), (0.0, x.dtype)))
        assert torch.equal(one, x == 0)
        assert torch.equal(zero, x)
        assert constants.filled(x, (2, 3), True, torch.bool) is one
        assert constants.filled(x, (3, 2), True, torch.bool).shape == (3, 2)
        assert constants.steps(x, 6, 1) is constants.steps(x, 6, 1)
        assert not one.is_inference()
        assert not constants.steps(x, 12, 3).is_inference()
        fake = torch.compile(lambda t: constants.filled(t, (4, 5), 2.0, torch.float32) + t, backend="eager")
        assert torch.equal(fake(torch.zeros(4, 5, device=DEVICE)), torch.full((4, 5), 2.0, device=DEVICE))
        assert (x.device, 4, 5, 2.0, torch.float32) not in constants._kept
    assert constants.filled(x, (2, 3), True, torch.bool) is not one


def test_what_is_traced_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(constants, "_kept", {})
    like = torch.zeros(2, device=DEVICE)
    with FakeTensorMode():
        assert constants.steps(torch.zeros(2), 30, 7).shape == (5,)
    traced: Any = torch.compile(lambda x: constants.steps(x, 30, 7) + 1, backend="eager", fullgraph=True)
    assert traced(like).tolist() == [1, 8, 15, 22, 29]
    assert not constants._kept
    monkeypatch.setattr(constants, "KEPT", 1)
    assert [constants.steps(like, n, 1).tolist() for n in (2, 3)] == [[0, 1], [0, 1, 2]]
    assert len(constants._kept) == 1
    check_operation(constants._steps, like, 30, 7)
    masks = [torch.ones(2, 3, dtype=torch.bool, device=DEVICE)] * 2
    check_operation(constants._stacked, masks)
    check_operation(constants._joined, masks)
