# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""LayerNorm and the product behind it in one kernel, for few rows: out = [GELU](LayerNorm(x) W^T + b).

Shapes: B images, N slots; R rows that there is room for, `rows` [1] of them live; K width in, C width out. x [R',
K], index [R] into it, W [C, K], b [C]. As in norm.py, rows may move on the way (kept), and one element of the product
may be read before its GELU (element). The program that reads it may also sum scores of it against a threshold
(threshold_gate.py).

Every program norms its rows again, which repeats work, but saves a launch and a trip to memory. With many rows the two
kernels of norm.py and linear.py are faster.

A row is held in two parts, since the widths of ViTs are 2^k or 3 2^k and tiles are powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import norm as norms
from .launch import KernelRows, blank, jit, operation, pointers, precision, tl, triton
from .linear import _gelu
from .threshold_gate import GateResult, ThresholdGate, _gate_cells_without_rows, _gate_rows


def reference(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    index: Tensor | None = None,
    rows: Tensor | None = None,
    probe: int = -1,
    gelu: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out [R, C], kept [R, K], element `probe` [R] before the GELU. Rows that are not live are zero or b."""
    row = None if probe < 0 else weight[probe]
    shift = None if probe < 0 or bias is None else bias[probe : probe + 1]
    y, kept, element = norms.reference(x, norm_weight, norm_bias, eps, index, rows, row, shift)
    out = F.linear(y, weight, bias)
    return F.gelu(out) if gelu else out, kept, element


class Tile(NamedTuple):
    """Rows and columns of a tile, warps."""

    m: int
    n: int
    warps: int


def tile_for(rows: int, width: int, dtype: torch.dtype) -> Tile:
    """Measured on an H200 (docs/results/log.md), by the rows that are expected and the width out."""
    if dtype == torch.float32:
        return Tile(32, 32, 4)
    if rows <= 32:
        return Tile(16, 32, 4)
    across = -(-width // 64)
    two_and_no_third = -(-rows // 32) * across > 132 and -(-rows // 16) * across <= 2 * 132  # small ones on each
    return Tile(16, 64, 4) if rows <= 64 or two_and_no_third else Tile(32, 64, 4)


def split(width: int) -> tuple[int, int] | None:
    """The two parts of a row, or None where they would not be powers of two."""
    first = 1 << (width.bit_length() - 1)
    rest = width - first
    if width < 32 or width > 1024 or rest & (rest - 1) or 0 < rest < 16:
        return None
    return (first, rest) if rest else (first // 2, first // 2)


@jit
def _norm_linear_kernel(
    x_pointer,  # [R', K]
    norm_weight_pointer,  # [K]
    norm_bias_pointer,  # [K]
    weight_pointer,  # [C, K]
    bias_pointer,  # [C] or None
    index_pointer,  # [R] or None
    rows_pointer,  # [1] or None
    out_pointer,  # [R, C]
    kept_pointer,  # [R, K]
    element_pointer,  # [R]
    cells_pointer,  # [R] or None, and from here on as in threshold_gate.py
    place_pointer,  # [B N] or None
    total_pointer,  # [B, N] or None
    active_pointer,  # [B, N]
    scale_pointer,  # []
    offset_pointer,  # []
    shift_pointer,  # [B] or None
    score_out,  # [B, N]
    total_out,  # [B, N]
    active_out,  # [B, N]
    active_rows_out,  # [R]
    room,
    probe,
    eps,
    threshold,
    slots,
    first_slot,
    C: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    PROBED: tl.constexpr,
    GELU: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    K: tl.constexpr = LEFT + RIGHT
    rows = room
    if rows_pointer is not None:
        rows = tl.load(rows_pointer)
    groups: tl.constexpr = (C + TN - 1) // TN
    group = tl.program_id(0) % groups
    row = tl.program_id(0) // groups * TM + tl.arange(0, TM)
    if place_pointer is not None:  # noqa: SIM102 - known when it is compiled
        if group == 0:
            _gate_cells_without_rows(row, row < room, place_pointer, total_pointer, score_out, total_out, active_out)
    if tl.program_id(0) // groups * TM < rows:
        live = row < rows
        n = group * TN + tl.arange(0, TN)
        inside = n < C
        source = row
        if index_pointer is not None:
            source = tl.load(index_pointer + row, mask=live, other=0)
        a = tl.arange(0, LEFT)
        b = LEFT + tl.arange(0, RIGHT)
        at = source.to(tl.int64)[:, None] * K
        left = tl.load(x_pointer + at + a[None, :], mask=live[:, None], other=0.0)
        right = tl.load(x_pointer + at + b[None, :], mask=live[:, None], other=0.0)
        if index_pointer is not None:
            mine = live & (group == 0)
            to = row.to(tl.int64)[:, None] * K
            tl.store(kept_pointer + to + a[None, :], left, mask=mine[:, None])
            tl.store(kept_pointer + to + b[None, :], right, mask=mine[:, None])
        x = left.to(tl.float32)
        z = right.to(tl.float32)
        mean = (tl.sum(x, 1) + tl.sum(z, 1)) / K
        x -= mean[:, None]
        z -= mean[:, None]
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(z * z, 1)) / K + eps)[:, None]
        x = x * scale * tl.load(norm_weight_pointer + a).to(tl.float32)[None, :]
        z = z * scale * tl.load(norm_weight_pointer + b).to(tl.float32)[None, :]
        x = (x + tl.load(norm_bias_pointer + a).to(tl.float32)[None, :]).to(left.dtype)
        z = (z + tl.load(norm_bias_pointer + b).to(tl.float32)[None, :]).to(right.dtype)
        w = tl.load(weight_pointer + n[:, None] * K + a[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(weight_pointer + n[:, None] * K + b[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(x, w.T, input_precision=PRECISION)
        total = tl.dot(z, v.T, total, input_precision=PRECISION)
        if bias_pointer is not None:
            total += tl.load(bias_pointer + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        if PROBED:
            first = group * TN
            if (probe >= first) & (probe < first + TN):
                element = tl.sum(tl.where((n == probe)[None, :], total, 0.0), 1)
                tl.store(element_pointer + row, element, mask=live)
                if total_pointer is not None:
                    _gate_rows(
                        *(element, row, live, cells_pointer, total_pointer, active_pointer),
                        *(scale_pointer, offset_pointer, shift_pointer, score_out, total_out, active_out),
                        *(active_rows_out, threshold, slots, first_slot),
                    )
        if GELU:
            total = _gelu(total, EXACT)
        to = row.to(tl.int64)[:, None] * C + n[None, :]
        out_type = out_pointer.dtype.element_ty
        tl.store(out_pointer + to, total.to(out_type), mask=live[:, None] & inside[None, :])


def _outputs(x, norm_weight, norm_bias, eps, weight, bias, index, rows, probe, gelu, space, tile, gate, *rest) -> Any:
    """out, kept, element, score, total, active and active_rows; those that are not wanted are empty."""
    room, grid = x.shape[0] if index is None else index.shape[0], gate[2].shape if gate else (0,)
    kept = x.new_empty(0 if index is None else (room, x.shape[1]))
    element = x.new_empty(0 if probe < 0 else room, dtype=torch.float32)
    score, total = (x.new_empty(grid, dtype=torch.float32) for _ in range(2))
    flags = (x.new_empty(size, dtype=torch.bool) for size in (grid, 0 if rest[3] is None else room))
    return blank(room, weight.shape[0], space, x), kept, element, score, total, *flags


@operation("norm_linear", _outputs)
def _norm_linear(
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    rows: Tensor | None,
    probe: int,
    gelu: bool,
    space: int,
    tile: Sequence[int],
    gate: Sequence[Tensor],
    shift: Tensor | None,
    threshold: float,
    first_slot: int,
    cells: Tensor | None,
    place: Tensor | None,
) -> None:
    """gate: scale, offset, total and active, or nothing."""
    (room, width), parts, (tall, wide, warps) = out[0].shape, split(x.shape[1]), tile
    assert parts is not None
    assert not gate or probe >= 0
    assert not gate or cells is None or room == gate[2].numel()
    scale, offset, total, active = gate or (None,) * 4
    slots = 1 if total is None else total.shape[1]
    _norm_linear_kernel[(triton.cdiv(room, tall) * triton.cdiv(width, wide),)](
        *pointers(x, norm_weight, norm_bias, weight, bias, index, rows, *out[:3]),
        *pointers(cells, place, total, active, scale, offset, shift, *out[3:]),
        *(room, probe, eps, threshold, slots, first_slot),
        C=width,
        LEFT=parts[0],
        RIGHT=parts[1],
        TM=tall,
        TN=wide,
        PROBED=probe >= 0,
        GELU=gelu,
        EXACT=x.dtype == torch.float32,
        PRECISION=precision(x.dtype),
        num_warps=warps,
    )


def norm_linear(
    rows: KernelRows,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    probe: int = -1,
    gelu: bool = False,
    space: int = 0,
    gate: ThresholdGate | None = None,
    where: tuple[Tensor | None, Tensor | None] = (None, None),
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, GateResult | None]:
    """As the reference; what is not live is not written. `where`: cells [R] and place [B N] of rows that have moved,
    for the gate. `space`: see launch.blank. A tile changes the speed alone; default: by the expected rows."""
    x, index = rows.rows, rows.index
    tile = tile or tile_for(rows.expected, len(weight), x.dtype)
    given = (x, norm_weight, norm_bias, eps, weight, bias, index, rows.count, probe, gelu, space, tile)
    knows, shift, numbers = [], None, (0.0, 0)
    if gate is not None:
        knows = [gate.scale, gate.offset, gate.total.contiguous(), gate.active.contiguous()]
        shift, numbers = gate.shift, (gate.threshold, gate.first)
    out, kept, element, score, total, active, active_rows = _norm_linear(
        *given, knows, None if shift is None else shift.contiguous(), *numbers, *where
    )
    if where[0] is None:  # rows are in their cells
        active_rows = active.flatten()
    return (
        out,
        x if index is None else kept,
        None if probe < 0 else element,
        None if gate is None else GateResult(score, total, active, active_rows),
    )
