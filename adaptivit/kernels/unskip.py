# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rows after a block that some tokens skipped: computed rows are put back in between those that were not.

Shapes: B images, N slots, D width. rows [R, D] as they were before the block, with their `cells` [R]; moved [M, D] of
the tokens that were computed, at `place` [B N] (pack_index.py); gate [B, N]; count [1] live rows where that is not R.

    out_r = moved_p                               p = place of cell_r, if it has one
            row_r + gate_cell (moved_p - row_r)   with a gate
            row_r                                 where it was skipped
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import jit, live, multiprocessors, operation, pointers, power_of_two, tl, triton, usable


def reference(
    rows: Tensor, cells: Tensor, moved: Tensor, place: Tensor, gate: Tensor | None = None, count: Tensor | None = None
) -> Tensor:
    """[R, D]; rows that are not live stay as they are."""
    n = live(count, rows)
    position = place[cells[:n]]
    computed = (position >= 0).nonzero()[:, 0]
    new, old = moved[position[computed]], rows[computed]
    if gate is not None:
        new = old + gate.flatten()[cells[computed]][:, None].to(rows.dtype) * (new - old)
    return rows.index_copy(0, computed, new.to(rows.dtype))


@jit
def _unskip_kernel(
    rows_pointer,  # [R, D]
    cells_pointer,  # [R]
    moved_pointer,  # [M, D]
    place_pointer,  # [B N]
    gate_pointer,  # [B, N] or None
    count_pointer,  # [1] or None
    out_pointer,  # [R, D]
    room,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    TM: tl.constexpr,
):
    rows = room
    if count_pointer is not None:
        rows = tl.load(count_pointer)
    column = tl.arange(0, WIDE)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, TM), tl.num_programs(0)):
        row = tile * TM + tl.arange(0, TM)
        live = row < rows
        cell = tl.load(cells_pointer + row, mask=live, other=0)
        place = tl.load(place_pointer + cell, mask=live, other=-1)
        inside = (column < D)[None, :]
        computed = (place >= 0)[:, None] & inside
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        of = place.to(tl.int64)[:, None] * D + column[None, :]
        new = tl.load(moved_pointer + of, mask=computed, other=0.0)
        if gate_pointer is not None:
            gate = tl.load(gate_pointer + cell, mask=live, other=0.0).to(tl.float32)[:, None]
            old = tl.load(rows_pointer + at, mask=live[:, None] & inside, other=0.0)
            gated = old.to(tl.float32) + gate * (new.to(tl.float32) - old.to(tl.float32))
            new = gated.to(old.dtype)
        else:
            old = tl.load(rows_pointer + at, mask=(live & (place < 0))[:, None] & inside, other=0.0)
        value = tl.where(computed, new, old)
        tl.store(out_pointer + at, value, mask=live[:, None] & inside)


@operation("unskip", lambda rows, *_: torch.empty_like(rows))
def _unskip(
    out: Tensor,
    rows: Tensor,
    cells: Tensor,
    moved: Tensor,
    place: Tensor,
    gate: Tensor | None,
    count: Tensor | None,
) -> None:
    room, width = rows.shape
    wide = power_of_two(width)
    tall = max(1, 2048 // wide)
    programs = min(triton.cdiv(room, tall), 16 * multiprocessors(rows.device))
    given = pointers(rows, cells, moved, place, gate, count, out)
    _unskip_kernel[(programs,)](*given, room, D=width, WIDE=wide, TM=tall)


def unskip(
    rows: Tensor, cells: Tensor, moved: Tensor, place: Tensor, gate: Tensor | None = None, count: Tensor | None = None
) -> Tensor:
    """As the reference, with the kernel where it can run; what is not live is not written then."""
    if not usable(rows.device) or rows.dtype == torch.float64:
        return reference(rows, cells, moved, place, gate, count)
    gate = None if gate is None else gate.contiguous()
    out: Tensor = _unskip(rows.contiguous(), cells, moved.contiguous(), place, gate, count)
    return out
