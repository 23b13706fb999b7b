"""What the checks on a GPU share: how they compare, and how they say it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

WRONG: list[str] = []
BOUND = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def close(name: str, out: Tensor, reference: Tensor, bound: float, least: float = 1e-2) -> None:
    """The error relative to the reference, or to `least` where that is nearly zero."""
    out, reference = out.detach().double(), reference.detach().double()
    error = float((out - reference).norm() / reference.norm().clamp_min(least))
    good = bool(torch.isfinite(out).all()) and error <= bound
    if not good:
        WRONG.append(name)
    print(f"{'ok   ' if good else 'WRONG'} {name:70} {error:.1e} (at most {bound:.0e})", flush=True)


def attempt(name: str, run: Callable[[], None]) -> None:
    try:
        run()
    except Exception as error:
        WRONG.append(name)
        print(f"WRONG {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def noise(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def rows_of(live: int, x: Tensor) -> Tensor:
    """x with NaN behind the live rows."""
    x[live:] = float("nan")
    return x


def same(name: str, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    good = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    print(f"{'ok   ' if good else 'WRONG'} {name}", flush=True)
    WRONG.extend([] if good else [name])
