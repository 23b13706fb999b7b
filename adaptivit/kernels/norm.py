# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""LayerNorm of rows, and on the way: taking rows to a new place, and one element of the layer that follows.

Shapes: R rows that there is room for, of which `rows` [1] are live; D width. x [R', D], index [R] into it.

    kept_m = x_index(m),   y_m = LayerNorm(kept_m),   seen_m = y_m . probe + shift

So a compaction costs no pass of its own, and AHT-ViT's supervisor (one element after fc1, whose row of weights is
`probe`) reads what the norm has in its registers anyway.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch import live, multiprocessors, power_of_two, tl, triton


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    index: Tensor | None = None,
    rows: Tensor | None = None,
    probe: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y [R, D], kept [R, D] (x itself without an index) and seen [R] float32; rows that are not live are zero."""
    n = live(rows, x if index is None else index)
    kept = x if index is None else torch.zeros_like(x).index_copy(0, torch.arange(n, device=x.device), x[index[:n]])
    y = torch.zeros_like(x)
    y[:n] = F.layer_norm(kept[:n], x.shape[-1:], weight, bias, eps)
    if probe is None:
        return y, kept, None
    seen = torch.zeros(len(x), dtype=torch.float32, device=x.device)
    seen[:n] = y[:n].float() @ probe.float() + (0.0 if shift is None else shift.float())
    return y, kept, seen


if triton is not None:

    @triton.jit
    def _norm_kernel(
        x_pointer,
        weight_pointer,
        bias_pointer,
        index_pointer,
        rows_pointer,
        probe_pointer,
        shift_pointer,
        y_pointer,
        kept_pointer,
        seen_pointer,
        room,
        eps,
        D: tl.constexpr,
        WIDE: tl.constexpr,
        TM: tl.constexpr,
        MOVES: tl.constexpr,
        COUNTED: tl.constexpr,
        PROBED: tl.constexpr,
        SHIFTED: tl.constexpr,
    ):
        rows = room
        if COUNTED:
            rows = tl.load(rows_pointer)
        column = tl.arange(0, WIDE)
        inside = column < D
        weight = tl.load(weight_pointer + column, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(bias_pointer + column, mask=inside, other=0.0).to(tl.float32)
        if PROBED:
            probe = tl.load(probe_pointer + column, mask=inside, other=0.0).to(tl.float32)
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, TM), tl.num_programs(0)):
            row = tile * TM + tl.arange(0, TM)
            there = row < rows
            source = row
            if MOVES:
                source = tl.load(index_pointer + row, mask=there, other=0)
            mask = there[:, None] & inside[None, :]
            at = source.to(tl.int64)[:, None] * D + column[None, :]
            to = row.to(tl.int64)[:, None] * D + column[None, :]
            raw = tl.load(x_pointer + at, mask=mask, other=0.0)
            if MOVES:
                tl.store(kept_pointer + to, raw, mask=mask)
            x = raw.to(tl.float32)
            mean = tl.sum(x, 1) / D
            centred = tl.where(inside[None, :], x - mean[:, None], 0.0)
            spread = tl.sum(centred * centred, 1) / D
            y = centred * tl.rsqrt(spread + eps)[:, None] * weight[None, :] + bias[None, :]
            tl.store(y_pointer + to, y.to(y_pointer.dtype.element_ty), mask=mask)
            if PROBED:
                seen = tl.sum(y * probe[None, :], 1)
                if SHIFTED:
                    seen += tl.load(shift_pointer).to(tl.float32)
                tl.store(seen_pointer + row, seen, mask=there)


@torch.library.custom_op("adaptivit::norm", mutates_args=())
def _norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    index: Tensor | None,
    rows: Tensor | None,
    probe: Tensor | None,
    shift: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel; kept and seen are empty where nothing moves and nothing is looked at."""
    room, width = len(x if index is None else index), x.shape[1]
    y = torch.empty(room, width, dtype=x.dtype, device=x.device)
    kept = y.new_empty(0) if index is None else torch.empty_like(y)
    seen = torch.empty(0 if probe is None else room, dtype=torch.float32, device=x.device)
    wide = power_of_two(width)
    tall = max(1, 2048 // wide)
    programs = min(triton.cdiv(room, tall), 16 * multiprocessors(x.device))
    _norm_kernel[(programs,)](
        x,
        weight,
        bias,
        x if index is None else index,
        x if rows is None else rows,
        x if probe is None else probe,
        x if shift is None else shift,
        y,
        kept,
        seen,
        room,
        eps,
        D=width,
        WIDE=wide,
        TM=tall,
        MOVES=index is not None,
        COUNTED=rows is not None,
        PROBED=probe is not None,
        SHIFTED=shift is not None,
        num_warps=4,
    )
    return y, kept, seen


@_norm.register_fake
def _(x, weight, bias, eps, index, rows, probe, shift):
    room = x.shape[0] if index is None else index.shape[0]
    y = x.new_empty(room, x.shape[1])
    kept = x.new_empty(0) if index is None else torch.empty_like(y)
    return y, kept, x.new_empty(0 if probe is None else room, dtype=torch.float32)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    index: Tensor | None = None,
    rows: Tensor | None = None,
    probe: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As the reference; what is not live is not written."""
    y, kept, seen = _norm(x, weight, bias, eps, index, rows, probe, shift)
    return y, x if index is None else kept, None if probe is None else seen
