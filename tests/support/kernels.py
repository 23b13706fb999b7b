"""What the tests of kernels share: memory that holds NaN, noise and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivit.kernels import launch
from tests.support import similar_rows
from tests.support.interpreter import DEVICE, DTYPES

# What numpy says in the interpreter of rows that hold NaN on purpose.
NAN_WARNINGS = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # relative to the largest value
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run, on a CPU too, and memory that has not been written holds NaN, or a number far out of range."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **more: Any) -> Tensor:
            t = make(*args, **more)
            if t.dtype == torch.bool:
                return t.fill_(True)
            return t.fill_(float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).min)

        return made

    similar_rows.seed = 0
    monkeypatch.setattr(launch, "on_cpu", True)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, live: int | None = None) -> Tensor:
    """Normal numbers; with `live`, rows behind so many are NaN."""
    t = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    if live is not None:
        t[live:] = float("nan")
    return t


def count(n: int | None) -> Tensor | None:
    return None if n is None else torch.tensor([n], dtype=torch.int32, device=DEVICE)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert found.isfinite().all()
    if found.numel():
        error, size = float((found.double() - expected).abs().max()), float(expected.double().abs().max())
        assert error <= tolerance * max(size, 1.0), f"off by {error:.2e} of {size:.2e}"


def staying(kind: str, batch: int, slots: int, seed: int = 0) -> Tensor:
    """[B, N] bool: of the middle image no token stays, unless all do."""
    share = {"none": 0.0, "all": 1.1, "some": 0.5, "most": 0.95}[kind]
    stay = torch.rand(batch, slots, generator=torch.Generator().manual_seed(seed)) < share
    stay[batch // 2] &= kind == "all"
    return stay.to(DEVICE)


def double(*given: Any) -> list[Any]:
    return [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in given]


def check_operation(operation: Any, *given: Any) -> None:
    """What torch.compile is told of an operation is what it returns; without poison, since outputs are compared."""
    torch.library.opcheck(operation, given, test_utils=("test_schema", "test_faketensor"))
