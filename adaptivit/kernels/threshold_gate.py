# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A running sum of sigmoid scores against a threshold, as an epilogue of the product that yields what is scored.

Shapes: B images, N slots; R rows that there is room for. f [R] is one element of every row. On the grid [B, N]:

    score = sigmoid(scale f + offset + shift),   total' = total + score,   active' = active and not total' >= threshold

With few images a pass is a chain of launches of about 2 us each; this saves several a block (docs/results/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .launch import jit, tl


@dataclass(frozen=True)
class ThresholdGate:
    """What the gate needs beside f. Tensors on the grid are contiguous."""

    scale: Tensor  # [] any dtype, as offset
    offset: Tensor  # []
    shift: Tensor | None  # [B, 1] float32
    threshold: float
    first: int  # slots before this one keep their total and stay active
    total: Tensor  # [B, N] float32
    active: Tensor  # [B, N] bool


@dataclass(frozen=True)
class GateResult:
    """What the gate yields."""

    score: Tensor  # [B, N] 0 where a token was not active
    total: Tensor  # [B, N]
    active: Tensor  # [B, N] bool
    active_rows: Tensor  # [R] bool: the same for every live row; not written behind them


def reference(
    element: Tensor, gate: ThresholdGate, cells: Tensor | None = None, place: Tensor | None = None
) -> GateResult:
    """element [R]: f. cells [R] is the cell of every row, place [B N] the row of every cell, < 0 for those without one;
    None: rows are in their cells."""
    values = (element if place is None else element[place.clamp_min(0)]).view_as(gate.total)
    logit = gate.scale.to(element.dtype) * values + gate.offset.to(element.dtype)
    logit = logit if gate.shift is None else logit + gate.shift
    score = torch.where(gate.active, torch.sigmoid(logit), torch.zeros_like(logit))
    counts = torch.arange(gate.total.shape[1], device=element.device) >= gate.first
    total = gate.total + torch.where(counts, score, torch.zeros_like(score))
    active = gate.active & ~(counts & (total >= gate.threshold))
    return GateResult(score, total, active, active.flatten() if cells is None else active.flatten()[cells])


@jit
def _gate_rows(
    element,  # [TM]
    row,  # [TM]
    live,  # [TM] bool
    cells,  # [R] or None: rows are in their cells
    total,  # [B, N]
    active,  # [B, N]
    scale,  # []
    offset,  # []
    shift,  # [B] or None
    score_out,  # [B, N]
    total_out,  # [B, N]
    active_out,  # [B, N]
    active_rows_out,  # [R]
    threshold,
    slots,
    first,
):
    """The gate of some live rows."""
    cell = row
    if cells is not None:
        cell = tl.load(cells + row, mask=live, other=0)
    logit = tl.load(scale).to(tl.float32) * element + tl.load(offset).to(tl.float32)
    if shift is not None:
        logit += tl.load(shift + cell // slots, mask=live, other=0.0)
    stays = tl.load(active + cell, mask=live, other=0) != 0
    score = tl.where(stays, tl.sigmoid(logit), 0.0)
    counts = cell % slots >= first
    sum = tl.load(total + cell, mask=live, other=0.0) + tl.where(counts, score, 0.0)
    stays = stays & ((counts == 0) | ((sum >= threshold) == 0))  # NaN stays
    tl.store(score_out + cell, score, mask=live)
    tl.store(total_out + cell, sum, mask=live)
    tl.store(active_out + cell, stays.to(tl.uint8), mask=live)
    if cells is not None:
        tl.store(active_rows_out + row, stays.to(tl.uint8), mask=live)


@jit
def _gate_cells_without_rows(
    cell,  # [TM]
    inside,  # [TM] bool
    place,  # [B N]
    total,  # [B, N]
    score_out,  # [B, N]
    total_out,  # [B, N]
    active_out,  # [B, N]
):
    """Cells that have no row keep their total and are not active."""
    empty = inside & (tl.load(place + cell, mask=inside, other=0) < 0)
    tl.store(score_out + cell, tl.zeros_like(cell).to(tl.float32), mask=empty)
    tl.store(total_out + cell, tl.load(total + cell, mask=empty, other=0.0), mask=empty)
    tl.store(active_out + cell, tl.zeros_like(cell).to(tl.uint8), mask=empty)
