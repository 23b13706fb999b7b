# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""LayerNorm and the product behind it in one kernel, for few rows: out = [GELU](LayerNorm(x) W^T + b).

Shapes: R rows that there is room for, of which `rows` [1] are live; D width in, N width out. x [R', D], index [R] into
it, W [N, D], b [N]. As in norm.py, rows may move on the way (kept), and one element of the product may be seen before
its GELU.

Every program norms its rows anew, which is work done several times over, but saves a launch and a trip to memory. With
many rows the two kernels of norm.py and linear.py are faster.

A row is held in two parts, since the widths of ViTs are 2^k or 3 2^k and tiles are powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import norm as norms
from .launch import blank, precision, tl, triton

if triton is not None:
    from .linear import _gelu


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
    """out [R, N], kept [R, D] and seen [R]: element `probe` before the GELU. Rows that are not live are zero or b."""
    row = None if probe < 0 else weight[probe]
    shift = None if probe < 0 or bias is None else bias[probe : probe + 1]
    y, kept, seen = norms.reference(x, norm_weight, norm_bias, eps, index, rows, row, shift)
    out = F.linear(y, weight, bias)
    return F.gelu(out) if gelu else out, kept, seen


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a tile, warps."""

    m: int
    n: int
    warps: int


def tile_for(rows: int, width: int, dtype: torch.dtype) -> Tile:
    """Measured on an H200 (benchmarks/LOG.md), by the rows that are expected and the width out."""
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


if triton is not None:

    @triton.jit
    def _norm_linear_kernel(
        x_pointer,
        norm_weight_pointer,
        norm_bias_pointer,
        weight_pointer,
        bias_pointer,
        index_pointer,
        rows_pointer,
        out_pointer,
        kept_pointer,
        seen_pointer,
        room,
        probe,
        eps,
        N: tl.constexpr,
        LEFT: tl.constexpr,
        RIGHT: tl.constexpr,
        TM: tl.constexpr,
        TN: tl.constexpr,
        MOVES: tl.constexpr,
        COUNTED: tl.constexpr,
        PROBED: tl.constexpr,
        BIAS: tl.constexpr,
        GELU: tl.constexpr,
        EXACT: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        D: tl.constexpr = LEFT + RIGHT
        rows = room
        if COUNTED:
            rows = tl.load(rows_pointer)
        groups: tl.constexpr = (N + TN - 1) // TN
        group = tl.program_id(0) % groups
        row = tl.program_id(0) // groups * TM + tl.arange(0, TM)
        if tl.program_id(0) // groups * TM < rows:
            there = row < rows
            n = group * TN + tl.arange(0, TN)
            inside = n < N
            source = row
            if MOVES:
                source = tl.load(index_pointer + row, mask=there, other=0)
            a = tl.arange(0, LEFT)
            b = LEFT + tl.arange(0, RIGHT)
            at = source.to(tl.int64)[:, None] * D
            left = tl.load(x_pointer + at + a[None, :], mask=there[:, None], other=0.0)
            right = tl.load(x_pointer + at + b[None, :], mask=there[:, None], other=0.0)
            if MOVES:
                mine = there & (group == 0)
                here = row.to(tl.int64)[:, None] * D
                tl.store(kept_pointer + here + a[None, :], left, mask=mine[:, None])
                tl.store(kept_pointer + here + b[None, :], right, mask=mine[:, None])
            x = left.to(tl.float32)
            z = right.to(tl.float32)
            mean = (tl.sum(x, 1) + tl.sum(z, 1)) / D
            x -= mean[:, None]
            z -= mean[:, None]
            scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(z * z, 1)) / D + eps)[:, None]
            x = x * scale * tl.load(norm_weight_pointer + a).to(tl.float32)[None, :]
            z = z * scale * tl.load(norm_weight_pointer + b).to(tl.float32)[None, :]
            x = (x + tl.load(norm_bias_pointer + a).to(tl.float32)[None, :]).to(left.dtype)
            z = (z + tl.load(norm_bias_pointer + b).to(tl.float32)[None, :]).to(right.dtype)
            w = tl.load(weight_pointer + n[:, None] * D + a[None, :], mask=inside[:, None], other=0.0)
            v = tl.load(weight_pointer + n[:, None] * D + b[None, :], mask=inside[:, None], other=0.0)
            total = tl.dot(x, w.T, input_precision=PRECISION)
            total = tl.dot(z, v.T, total, input_precision=PRECISION)
            if BIAS:
                total += tl.load(bias_pointer + n, mask=inside, other=0.0).to(tl.float32)[None, :]
            if PROBED:
                first = group * TN
                if (probe >= first) & (probe < first + TN):
                    seen = tl.sum(tl.where((n == probe)[None, :], total, 0.0), 1)
                    tl.store(seen_pointer + row, seen, mask=there)
            if GELU:
                total = _gelu(total, EXACT)
            to = row.to(tl.int64)[:, None] * N + n[None, :]
            out_type = out_pointer.dtype.element_ty
            tl.store(out_pointer + to, total.to(out_type), mask=there[:, None] & inside[None, :])


@torch.library.custom_op("adaptivit::norm_linear", mutates_args=())
def _norm_linear(
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
    expected: int,
    space: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    tile = tile_for(expected, len(weight), x.dtype)
    return run(x, norm_weight, norm_bias, eps, weight, bias, index, rows, probe, gelu, tile, space)


def run(
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
    tile: Tile,
    space: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel with a tile of one's own; kept and seen are empty where nothing moves and nothing is read."""
    room, parts = len(x if index is None else index), split(x.shape[1])
    assert parts is not None
    out = blank(room, len(weight), space, x)
    kept = x.new_empty(0) if index is None else torch.empty(room, x.shape[1], dtype=x.dtype, device=x.device)
    seen = x.new_empty(room if probe >= 0 else 0, dtype=torch.float32)
    groups = triton.cdiv(len(weight), tile.n)
    _norm_linear_kernel[(triton.cdiv(room, tile.m) * groups,)](
        x,
        norm_weight,
        norm_bias,
        weight,
        weight if bias is None else bias,
        x if index is None else index,
        x if rows is None else rows,
        out,
        kept,
        seen,
        room,
        probe,
        eps,
        N=len(weight),
        LEFT=parts[0],
        RIGHT=parts[1],
        TM=tile.m,
        TN=tile.n,
        MOVES=index is not None,
        COUNTED=rows is not None,
        PROBED=probe >= 0,
        BIAS=bias is not None,
        GELU=gelu,
        EXACT=x.dtype == torch.float32,
        PRECISION=precision(x.dtype),
        num_warps=tile.warps,
    )
    return out, kept, seen


@_norm_linear.register_fake
def _(x, norm_weight, norm_bias, eps, weight, bias, index, rows, probe, gelu, expected, space=0):
    room = x.shape[0] if index is None else index.shape[0]
    kept = x.new_empty(0) if index is None else x.new_empty(room, x.shape[1])
    return x.new_empty(room, weight.shape[0]), kept, x.new_empty(room if probe >= 0 else 0, dtype=torch.float32)


def norm_linear(
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
    expected: int,
    space: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As the reference; what is not live is not written. `expected` rows choose the tile; any number of them is right.
    `space`: see kernels.blank."""
    given = (x, norm_weight, norm_bias, eps, weight, bias, index, rows, probe, gelu, expected, space)
    out, kept, seen = _norm_linear(*given)
    return out, x if index is None else kept, None if probe < 0 else seen
