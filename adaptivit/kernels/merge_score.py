# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""fold's two numbers of a token: the score that ranks it, and its weight in the mean of a merge.

merge_assign.py computes them inside its kernel; this one returns them.

Shapes: B images, N slots; all [B, N] float32. seen: attention received; alike: cosine to the most similar other patch.

    score = seen max(1 - alike, 1e-6)^power,   merge_weight = size max(seen, 1e-9)^value
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .launch import tl, triton, usable


@dataclass(frozen=True)
class MergeScore:
    """What both are made of."""

    seen: Tensor  # [B, N] float32
    alike: Tensor | None  # [B, N] float32; None: a token is ranked by attention alone
    power: float
    value: float

    def numbers(self, size: Tensor) -> tuple[Tensor, Tensor]:
        """score and merge_weight [B, N]."""
        return worth(self.seen, self.alike, size, self.power, self.value)


def reference(seen: Tensor, alike: Tensor | None, size: Tensor, power: float, value: float) -> tuple[Tensor, Tensor]:
    """score and merge_weight; without `alike` a token is ranked by attention alone."""
    score = seen if alike is None else seen * (1 - alike.clamp(-1, 1)).clamp_min(1e-6) ** power
    return score, size * seen.clamp_min(1e-9) ** value


if triton is not None:

    @triton.jit
    def _power(x, exponent, HALF: tl.constexpr):
        """x^exponent of x > 0."""
        if HALF:
            return tl.sqrt_rn(x)
        return tl.exp2(exponent * tl.log2(x))

    @triton.jit
    def _score(seen, alike, power, LIKENESS: tl.constexpr, HALF: tl.constexpr):
        if LIKENESS:
            apart = 1.0 - tl.minimum(tl.maximum(alike, -1.0), 1.0)
            return seen * _power(tl.maximum(apart, 1e-6), power, HALF)
        return seen

    @triton.jit
    def _merge_weight(seen, size, value, HALF: tl.constexpr):
        return size * _power(tl.maximum(seen, 1e-9), value, HALF)

    @triton.jit
    def _worth_kernel(
        seen_pointer,
        alike_pointer,
        size_pointer,
        score_pointer,
        merge_weight_pointer,
        cells,
        power,
        value,
        TILE: tl.constexpr,
        LIKENESS: tl.constexpr,
        POWER_HALF: tl.constexpr,
        VALUE_HALF: tl.constexpr,
    ):
        cell = tl.program_id(0) * TILE + tl.arange(0, TILE)
        inside = cell < cells
        seen = tl.load(seen_pointer + cell, mask=inside, other=1.0)
        alike = seen
        if LIKENESS:
            alike = tl.load(alike_pointer + cell, mask=inside, other=0.0)
        size = tl.load(size_pointer + cell, mask=inside, other=1.0)
        tl.store(score_pointer + cell, _score(seen, alike, power, LIKENESS, POWER_HALF), mask=inside)
        tl.store(merge_weight_pointer + cell, _merge_weight(seen, size, value, VALUE_HALF), mask=inside)


@torch.library.custom_op("adaptivit::worth", mutates_args=())
def _worth(seen: Tensor, alike: Tensor | None, size: Tensor, power: float, value: float) -> tuple[Tensor, Tensor]:
    score, merge_weight = torch.empty_like(seen), torch.empty_like(seen)
    _worth_kernel[(triton.cdiv(seen.numel(), 512),)](
        *(seen, seen if alike is None else alike, size, score, merge_weight, seen.numel(), power, value),
        TILE=512,
        LIKENESS=alike is not None,
        POWER_HALF=power == 0.5,
        VALUE_HALF=value == 0.5,
    )
    return score, merge_weight


@_worth.register_fake
def _(seen, alike, size, power, value):
    return torch.empty_like(seen), torch.empty_like(seen)


def worth(seen: Tensor, alike: Tensor | None, size: Tensor, power: float, value: float) -> tuple[Tensor, Tensor]:
    """As the reference, with the kernel where it can run and nobody wants a gradient."""
    if not usable(seen.device) or seen.dtype != torch.float32 or torch.is_grad_enabled():
        return reference(seen, alike, size, power, value)
    alike = None if alike is None else alike.contiguous()
    return _worth(seen.contiguous(), alike, size.contiguous(), power, value)
