# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The best tokens of every image.

Shapes: B images, N slots. score [B, N], among [B, N] bool -> [B, N] bool: the `count` tokens of `among` with the
highest score, of equals the first; or the `rest` of them. NaN is above all numbers, as in torch's sorts. Where `among`
has no more than `count`, it is all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import power_of_two, tl, triton, usable


def reference(score: Tensor, among: Tensor, count: int, rest: bool = False) -> Tensor:
    order = score.argsort(dim=-1, descending=True, stable=True)
    candidates = among.gather(1, order)
    above = candidates.cumsum(-1)
    chosen = candidates & (above > count if rest else above <= count)
    return torch.zeros_like(among).scatter(1, order, chosen)


if triton is not None:

    @triton.jit
    def _higher(other, j, mine, i):
        """[n, m] whether the others, of slots j [m], are above those of slots i [n]."""
        nan = (mine != mine)[:, None]
        other = other[None, :]
        other_nan = other != other
        higher = (other > mine[:, None]) | (other_nan & (nan == 0))
        equal = (other == mine[:, None]) | (other_nan & nan)
        return higher | (equal & (j[None, :] < i[:, None]))

    @triton.jit
    def _top_kernel(
        score_pointer,
        among_pointer,
        out_pointer,
        score_stride,
        among_stride,
        slots,
        count,
        TM: tl.constexpr,
        TN: tl.constexpr,
        REST: tl.constexpr,
    ):
        """A token is chosen if fewer than `count` others are above it: no sort."""
        image = tl.program_id(1)
        i = tl.program_id(0) * TM + tl.arange(0, TM)
        scores, candidates = score_pointer + image * score_stride, among_pointer + image * among_stride
        mine = tl.load(scores + i, mask=i < slots, other=0.0).to(tl.float32)
        above = tl.zeros((TM,), dtype=tl.int32)
        for first in range(0, slots, TN):
            j = first + tl.arange(0, TN)
            there = tl.load(candidates + j, mask=j < slots, other=0) != 0
            other = tl.load(scores + j, mask=j < slots, other=0.0).to(tl.float32)
            above += tl.sum((_higher(other, j, mine, i) & there[None, :]).to(tl.int32), 1)
        among = tl.load(candidates + i, mask=i < slots, other=0) != 0
        if REST:
            chosen = among & (above >= count)
        else:
            chosen = among & (above < count)
        tl.store(out_pointer + image * slots + i, chosen.to(tl.uint8), mask=i < slots)


@torch.library.custom_op("adaptivit::top", mutates_args=())
def _top(score: Tensor, among: Tensor, count: int, rest: bool) -> Tensor:
    batch, slots = among.shape
    out = torch.empty(batch, slots, dtype=torch.bool, device=among.device)
    tall = 16
    _top_kernel[(triton.cdiv(slots, tall), batch)](
        *(score, among.view(torch.uint8), out.view(torch.uint8), score.stride(0), among.stride(0), slots, count),
        TM=tall,
        TN=min(256, power_of_two(slots)),
        REST=rest,
    )
    return out


@_top.register_fake
def _(score, among, count, rest):
    return among.new_empty(among.shape)


def top(score: Tensor, among: Tensor, count: int, *, rest: bool = False) -> Tensor:
    """As the reference, with the kernel where it can run: it needs no gradient, so in training too."""
    if not usable(among.device) or score.dtype == torch.float64:
        return reference(score, among, count, rest)
    score, among = (t if t.stride(1) == 1 else t.contiguous() for t in (score.detach(), among))
    return _top(score, among, count, rest)
