# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Two numbers of a token: the score that ranks it for merging, and its weight in the mean of a merge.

The kernel of merge_assign.py computes them on its way.

Shapes: B images, N slots; all [B, N] float32. attention: what the token receives; cosine: to its most similar patch.

    score = attention max(1 - cosine, 1e-6)^power,   merge_weight = size max(attention, 1e-9)^value
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .launch import jit, tl


@dataclass(frozen=True)
class MergeScore:
    """What both are made of."""

    attention: Tensor  # [B, N] float32
    cosine: Tensor | None  # [B, N] float32; None: tokens are ranked by attention alone
    power: float
    value: float

    def numbers(self, size: Tensor) -> tuple[Tensor, Tensor]:
        """score and merge_weight [B, N]."""
        score = self.attention
        if self.cosine is not None:
            score = score * (1 - self.cosine.clamp(-1, 1)).clamp_min(1e-6) ** self.power
        return score, size * self.attention.clamp_min(1e-9) ** self.value


@jit
def _power(x, EXPONENT: tl.constexpr):
    """x^EXPONENT of x > 0."""
    if EXPONENT == 0.5:
        return tl.sqrt_rn(x)
    return tl.exp2(EXPONENT * tl.log2(x))


@jit
def _score(attention, cosine, POWER: tl.constexpr):
    distance = 1.0 - tl.minimum(tl.maximum(cosine, -1.0), 1.0)
    return attention * _power(tl.maximum(distance, 1e-6), POWER)


@jit
def _merge_weight(attention, size, VALUE: tl.constexpr):
    return size * _power(tl.maximum(attention, 1e-9), VALUE)
