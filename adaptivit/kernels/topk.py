# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The highest-scoring tokens of every image.

Shapes: B images, N slots. score [B, N], candidates [B, N] bool -> [B, N] bool: the `count` candidates with the highest
score, of equal ones the first; or the `rest` of them. NaN is above all numbers, as in torch's sorts. Up to `count`
candidates are all chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import jit, operation, pointers, power_of_two, tl, triton, usable


def reference(score: Tensor, candidates: Tensor, count: int, rest: bool = False) -> Tensor:
    order = score.argsort(dim=-1, descending=True, stable=True)
    ordered = candidates.gather(1, order)
    above = ordered.cumsum(-1)
    chosen = ordered & (above > count if rest else above <= count)
    return torch.zeros_like(candidates).scatter(1, order, chosen)


@jit
def _higher(other, j, mine, i):
    """[n, m] whether the others, of slots j [m], are above those of slots i [n]."""
    nan = (mine != mine)[:, None]
    other = other[None, :]
    other_nan = other != other
    higher = (other > mine[:, None]) | (other_nan & (nan == 0))
    equal = (other == mine[:, None]) | (other_nan & nan)
    return higher | (equal & (j[None, :] < i[:, None]))


@jit
def _topk_kernel(
    score_pointer,  # [B, N]
    candidates_pointer,  # [B, N]
    out_pointer,  # [B, N]
    score_stride,
    candidates_stride,
    slots,
    count,
    TM: tl.constexpr,
    TN: tl.constexpr,
    REST: tl.constexpr,
):
    """A token is chosen if fewer than `count` others are above it: no sort."""
    image = tl.program_id(1)
    i = tl.program_id(0) * TM + tl.arange(0, TM)
    scores, candidates = score_pointer + image * score_stride, candidates_pointer + image * candidates_stride
    mine = tl.load(scores + i, mask=i < slots, other=0.0).to(tl.float32)
    above = tl.zeros((TM,), dtype=tl.int32)
    for first in range(0, slots, TN):
        j = first + tl.arange(0, TN)
        rival = tl.load(candidates + j, mask=j < slots, other=0) != 0
        other = tl.load(scores + j, mask=j < slots, other=0.0).to(tl.float32)
        above += tl.sum((_higher(other, j, mine, i) & rival[None, :]).to(tl.int32), 1)
    own = tl.load(candidates + i, mask=i < slots, other=0) != 0
    if REST:
        chosen = own & (above >= count)
    else:
        chosen = own & (above < count)
    tl.store(out_pointer + image * slots + i, chosen.to(tl.uint8), mask=i < slots)


@operation("topk", lambda score, candidates, *_: candidates.new_empty(candidates.shape))
def _topk(out: Tensor, score: Tensor, candidates: Tensor, count: int, rest: bool) -> None:
    batch, slots = candidates.shape
    tall = 16
    _topk_kernel[(triton.cdiv(slots, tall), batch)](
        *pointers(score, candidates, out),
        *(score.stride(0), candidates.stride(0), slots, count),
        TM=tall,
        TN=min(256, power_of_two(slots)),
        REST=rest,
    )


def topk(score: Tensor, candidates: Tensor, count: int, *, rest: bool = False) -> Tensor:
    """As the reference, with the kernel where it can run: it needs no gradient, so in training too."""
    if not usable(candidates.device) or score.dtype == torch.float64:
        return reference(score, candidates, count, rest)
    score, candidates = (t if t.stride(1) == 1 else t.contiguous() for t in (score.detach(), candidates))
    out: Tensor = _topk(score, candidates, count, rest)
    return out
