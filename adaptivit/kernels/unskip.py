# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Whoever sat out a block is back, and the others come back to where they were.

Shapes: B images, N slots, D width. rows [R, D] as they were before the block, with their `cells` [R]; moved [M, D] of
those that took part, at `place` [B N] (compact.py); gate [B, N]; count [1] live rows where that is not R.

    out_r = moved_p                               p = place of cell_r, if it has one
            row_r + gate_cell (moved_p - row_r)   with a gate
            row_r                                 where it sat out
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import live, multiprocessors, power_of_two, tl, triton, usable


def reference(
    rows: Tensor, cells: Tensor, moved: Tensor, place: Tensor, gate: Tensor | None = None, count: Tensor | None = None
) -> Tensor:
    """[R, D]; rows that are not live stay as they are."""
    n = live(count, rows)
    position = place[cells[:n]]
    took_part = (position >= 0).nonzero()[:, 0]
    new, old = moved[position[took_part]], rows[took_part]
    if gate is not None:
        new = old + gate.flatten()[cells[took_part]][:, None].to(rows.dtype) * (new - old)
    return rows.index_copy(0, took_part, new.to(rows.dtype))


if triton is not None:

    @triton.jit
    def _back_kernel(
        rows_pointer,
        cells_pointer,
        moved_pointer,
        place_pointer,
        gate_pointer,
        count_pointer,
        out_pointer,
        room,
        D: tl.constexpr,
        WIDE: tl.constexpr,
        TM: tl.constexpr,
        GATED: tl.constexpr,
        COUNTED: tl.constexpr,
    ):
        rows = room
        if COUNTED:
            rows = tl.load(count_pointer)
        column = tl.arange(0, WIDE)
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, TM), tl.num_programs(0)):
            row = tile * TM + tl.arange(0, TM)
            there = row < rows
            cell = tl.load(cells_pointer + row, mask=there, other=0)
            place = tl.load(place_pointer + cell, mask=there, other=-1)
            inside = (column < D)[None, :]
            took_part = (place >= 0)[:, None] & inside
            at = row.to(tl.int64)[:, None] * D + column[None, :]
            of = place.to(tl.int64)[:, None] * D + column[None, :]
            new = tl.load(moved_pointer + of, mask=took_part, other=0.0)
            if GATED:
                gate = tl.load(gate_pointer + cell, mask=there, other=0.0).to(tl.float32)[:, None]
                old = tl.load(rows_pointer + at, mask=there[:, None] & inside, other=0.0)
                gated = old.to(tl.float32) + gate * (new.to(tl.float32) - old.to(tl.float32))
                new = gated.to(old.dtype)
            else:
                old = tl.load(rows_pointer + at, mask=(there & (place < 0))[:, None] & inside, other=0.0)
            value = tl.where(took_part, new, old)
            tl.store(out_pointer + at, value, mask=there[:, None] & inside)


@torch.library.custom_op("adaptivit::back", mutates_args=())
def _back(
    rows: Tensor,
    cells: Tensor,
    moved: Tensor,
    place: Tensor,
    gate: Tensor | None,
    count: Tensor | None,
) -> Tensor:
    out = torch.empty_like(rows)
    room, width = rows.shape
    wide = power_of_two(width)
    tall = max(1, 2048 // wide)
    given = (rows, cells, moved, place, rows if gate is None else gate, cells if count is None else count)
    _back_kernel[(min(triton.cdiv(room, tall), 16 * multiprocessors(rows.device)),)](
        *(*given, out, room),
        D=width,
        WIDE=wide,
        TM=tall,
        GATED=gate is not None,
        COUNTED=count is not None,
    )
    return out


@_back.register_fake
def _(rows, cells, moved, place, gate, count):
    return torch.empty_like(rows)


def back(
    rows: Tensor, cells: Tensor, moved: Tensor, place: Tensor, gate: Tensor | None = None, count: Tensor | None = None
) -> Tensor:
    """As the reference, with the kernel where it can run; what is not live is not written then."""
    if not usable(rows.device) or rows.dtype == torch.float64:
        return reference(rows, cells, moved, place, gate, count)
    gate = None if gate is None else gate.contiguous()
    return _back(rows.contiguous(), cells, moved.contiguous(), place, gate, count)
