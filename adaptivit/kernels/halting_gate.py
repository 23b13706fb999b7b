# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A supervisor's decision inside the product that it reads (AHT-ViT Sec. 3.3), which saves a launch a block.

Shapes: B images, N slots; R rows that there is room for. f [R] is one element of fc1 of every row. On the grid [B, N]:

    h = sigmoid(gamma f + beta + shift),   c' = c + h,   a token halts when c' >= T - eps

With few images a pass is a chain of launches, each of about 2 us whatever it does (benchmarks/LOG.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .launch import tl, triton


@dataclass(frozen=True)
class Gate:
    """What a supervisor knows before its block's MLP. Tensors on the grid are contiguous."""

    gamma: Tensor  # [] any dtype, as beta
    beta: Tensor  # []
    shift: Tensor | None  # [B, 1] float32, of the logit
    level: float  # T - eps
    prefix: int  # so many first slots never halt
    spent: Tensor  # [B, N] float32: c so far
    going: Tensor  # [B, N] bool: has not halted


@dataclass(frozen=True)
class Decided:
    """What it knows afterwards."""

    score: Tensor  # [B, N] h, 0 where a token had halted before
    spent: Tensor  # [B, N] c'
    going: Tensor  # [B, N] bool
    rows: Tensor  # [R] bool: the same for every live row; what is behind them is not written


def reference(seen: Tensor, gate: Gate, cells: Tensor | None = None, place: Tensor | None = None) -> Decided:
    """seen [R]: f of every row. cells [R] says whose they are, place [B N] is the row of every cell, < 0 for those that
    have none; None: its own."""
    values = (seen if place is None else seen[place.clamp_min(0)]).view_as(gate.spent)
    logit = gate.gamma.to(seen.dtype) * values + gate.beta.to(seen.dtype)
    logit = logit if gate.shift is None else logit + gate.shift
    score = torch.where(gate.going, torch.sigmoid(logit), torch.zeros_like(logit))
    halts = torch.arange(gate.spent.shape[1], device=seen.device) >= gate.prefix
    spent = gate.spent + torch.where(halts, score, torch.zeros_like(score))
    going = gate.going & ~(halts & (spent >= gate.level))
    return Decided(score, spent, going, going.flatten() if cells is None else going.flatten()[cells])


if triton is not None:

    @triton.jit
    def _decide_rows(
        seen,
        row,
        there,
        cells_pointer,
        spent_pointer,
        going_pointer,
        gamma_pointer,
        beta_pointer,
        shift_pointer,
        score_out,
        spent_out,
        going_out,
        rows_out,
        level,
        slots,
        prefix,
        MOVED: tl.constexpr,
        SHIFTED: tl.constexpr,
    ):
        """The decision about some rows [TM] that are `there`, of which `seen` [TM] has been read."""
        cell = row
        if MOVED:
            cell = tl.load(cells_pointer + row, mask=there, other=0)
        logit = tl.load(gamma_pointer).to(tl.float32) * seen + tl.load(beta_pointer).to(tl.float32)
        if SHIFTED:
            logit += tl.load(shift_pointer + cell // slots, mask=there, other=0.0)
        going = tl.load(going_pointer + cell, mask=there, other=0) != 0
        score = tl.where(going, tl.sigmoid(logit), 0.0)
        halts = cell % slots >= prefix
        spent = tl.load(spent_pointer + cell, mask=there, other=0.0) + tl.where(halts, score, 0.0)
        going = going & ((halts == 0) | ((spent >= level) == 0))  # NaN goes on
        tl.store(score_out + cell, score, mask=there)
        tl.store(spent_out + cell, spent, mask=there)
        tl.store(going_out + cell, going.to(tl.uint8), mask=there)
        if MOVED:
            tl.store(rows_out + row, going.to(tl.uint8), mask=there)

    @triton.jit
    def _decide_absent(cell, inside, place_pointer, spent_pointer, score_out, spent_out, going_out):
        """Cells [TM] that have no row keep what they have spent."""
        gone = inside & (tl.load(place_pointer + cell, mask=inside, other=0) < 0)
        tl.store(score_out + cell, tl.zeros_like(cell).to(tl.float32), mask=gone)
        tl.store(spent_out + cell, tl.load(spent_pointer + cell, mask=gone, other=0.0), mask=gone)
        tl.store(going_out + cell, tl.zeros_like(cell).to(tl.uint8), mask=gone)
