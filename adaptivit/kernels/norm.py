# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""LayerNorm of rows, and on the way: taking rows to a new place, and one element of the layer that follows.

Shapes: R rows that there is room for, `rows` [1] of them live; D width. x [R', D], index [R] into it.

    kept_m = x_index(m),   y_m = LayerNorm(kept_m),   element_m = y_m . probe + shift

So a compaction costs no pass of its own, and AHT-ViT's supervisor (one element after fc1, whose row of weights is
`probe`) reads what the norm has in its registers anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch import KernelRows, jit, live, multiprocessors, operation, pointers, power_of_two, tl, triton


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
    """y [R, D], kept [R, D] (x itself without an index) and element [R] float32; rows that are not live are zero."""
    n = live(rows, x if index is None else index)
    kept = x if index is None else torch.zeros_like(x).index_copy(0, torch.arange(n, device=x.device), x[index[:n]])
    y = torch.zeros_like(x)
    y[:n] = F.layer_norm(kept[:n], x.shape[-1:], weight, bias, eps)
    if probe is None:
        return y, kept, None
    element = torch.zeros(len(x), dtype=torch.float32, device=x.device)
    element[:n] = y[:n].float() @ probe.float() + (0.0 if shift is None else shift.float())
    return y, kept, element


@jit
def _norm_kernel(
    x_pointer,  # [R', D]
    weight_pointer,  # [D]
    bias_pointer,  # [D]
    index_pointer,  # [R] or None
    rows_pointer,  # [1] or None
    probe_pointer,  # [D] or None
    shift_pointer,  # [1] or None
    y_pointer,  # [R, D]
    kept_pointer,  # [R, D]
    element_pointer,  # [R]
    room,
    eps,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    TM: tl.constexpr,
):
    rows = room
    if rows_pointer is not None:
        rows = tl.load(rows_pointer)
    column = tl.arange(0, WIDE)
    inside = column < D
    weight = tl.load(weight_pointer + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_pointer + column, mask=inside, other=0.0).to(tl.float32)
    if probe_pointer is not None:
        probe = tl.load(probe_pointer + column, mask=inside, other=0.0).to(tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, TM), tl.num_programs(0)):
        row = tile * TM + tl.arange(0, TM)
        live = row < rows
        source = row
        if index_pointer is not None:
            source = tl.load(index_pointer + row, mask=live, other=0)
        mask = live[:, None] & inside[None, :]
        at = source.to(tl.int64)[:, None] * D + column[None, :]
        to = row.to(tl.int64)[:, None] * D + column[None, :]
        raw = tl.load(x_pointer + at, mask=mask, other=0.0)
        if index_pointer is not None:
            tl.store(kept_pointer + to, raw, mask=mask)
        x = raw.to(tl.float32)
        mean = tl.sum(x, 1) / D
        centred = tl.where(inside[None, :], x - mean[:, None], 0.0)
        spread = tl.sum(centred * centred, 1) / D
        y = centred * tl.rsqrt(spread + eps)[:, None] * weight[None, :] + bias[None, :]
        tl.store(y_pointer + to, y.to(y_pointer.dtype.element_ty), mask=mask)
        if probe_pointer is not None:
            element = tl.sum(y * probe[None, :], 1)
            if shift_pointer is not None:
                element += tl.load(shift_pointer).to(tl.float32)
            tl.store(element_pointer + row, element, mask=live)


def _outputs(x, weight, bias, eps, index, rows, probe, shift) -> Any:
    room = x.shape[0] if index is None else index.shape[0]
    kept = x.new_empty(0 if index is None else (room, x.shape[1]))
    return x.new_empty(room, x.shape[1]), kept, x.new_empty(0 if probe is None else room, dtype=torch.float32)


@operation("norm", _outputs)
def _norm(
    out: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    index: Tensor | None,
    rows: Tensor | None,
    probe: Tensor | None,
    shift: Tensor | None,
) -> None:
    room, width = out[0].shape
    wide = power_of_two(width)
    tall = max(1, 2048 // wide)
    programs = min(triton.cdiv(room, tall), 16 * multiprocessors(x.device))
    given = pointers(x, weight, bias, index, rows, probe, shift, *out)
    _norm_kernel[(programs,)](*given, room, eps, D=width, WIDE=wide, TM=tall, num_warps=4)


def norm(
    rows: KernelRows, weight: Tensor, bias: Tensor, eps: float, probe: Tensor | None = None, shift: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As the reference; what is not live is not written."""
    y, kept, element = _norm(rows.rows, weight, bias, eps, rows.index, rows.count, probe, shift)
    return y, rows.rows if rows.index is None else kept, None if probe is None else element
