# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rows times a matrix, with all that follows in the same kernel: out = [residual + scale] act(x W^T + b).

Shapes: R rows that there is room for, of which `rows` [1] are live; K width in, N width out. x [R, K], W [N, K], b [N],
scale [N] (LayerScale).

A persistent grid walks over the tiles of the live rows, so that the number of rows may be known to the device alone,
and the loads of the next tile are under way while the last one is being written.

GELU is the exact one, x Phi(x) = max(x, 0) - |x| Phi(-|x|), with Phi(-t) = 2^p(t) for a polynomial p fitted to stay
below the rounding of bfloat16 (3e-5 at most): one special-function instruction, where erf takes tens of ordinary ones.
In float32 it is computed with erf.

Two things more are there for norms without a pass of their own (norm_folded.py): the moments of the rows that are
written, and a product of rows that are normed in its epilogue, by their moments. Moments [P, 2, R] are the mean of each
P-th of a row, of `width` columns (the last one may be narrower), and the sum of squared distances from it, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch import blank, live, multiprocessors, packs, precision, tl, triton


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    rows: Tensor | None = None,
    gelu: bool = False,
) -> Tensor:
    """[R, K] -> [R, N]; rows that are not live are zero."""
    n = live(rows, x)
    out = x.new_zeros(len(x), len(weight))
    y = F.linear(x[:n], weight, bias)
    y = F.gelu(y) if gelu else y
    y = y if scale is None else y * scale
    out[:n] = y if residual is None else y + residual[:n]
    return out


@dataclass(frozen=True)
class Tile:
    """How a product is cut: rows, columns and depth of a tile, warps, pipeline stages, programs a multiprocessor (0:
    one program a tile), and the parts in which a tile is written."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    residents: int
    parts: int = 1


@dataclass(frozen=True)
class Norm:
    """What a product knows of the norm that is worked into it: the moments of x [P, 2, R] and the width they are of,
    eps, the sums of the rows of W [N], and where its element `probe` (-1: none) is seen before GELU, [R]."""

    moments: Tensor
    width: int
    eps: float
    sums: Tensor
    probe: int
    seen: Tensor


def tile_for(rows: int, width: int, adds: bool, wide: bool = False, depth: int = 0) -> Tile:
    """Measured on an H200 (benchmarks/LOG.md): by the rows that are expected, whether a residual is read, and the width
    in, `depth`. `wide` elements (float32) take twice the shared memory."""
    narrow = width % 128 != 0
    if wide:
        return Tile(64, 64, 32, 4, 3, 2)
    if rows < 1024:  # a few tiles for many multiprocessors: small ones
        if adds and depth >= 1024:
            return Tile(64, 32, 256, 4, 4, 0)
        return Tile(64, 32, 128, 4, 3, 0) if adds or narrow else Tile(64, 64, 128, 4, 3, 0)
    if not adds:
        return Tile(128, 64, 64, 4, 4, 2, 2) if narrow else Tile(128, 128, 64, 4, 3, 2, 2)
    if rows < 16384:
        if not narrow and 2 * 132 < -(-rows // 64) * (width // 128) <= 3 * 132:  # one wave of three, two of two
            return Tile(64, 128, 64, 4, 2, 3, 2)
        return Tile(64, 64, 64, 4, 4, 3) if narrow else Tile(64, 128, 64, 4, 4, 2, 2)
    return Tile(128, 64, 64, 4, 4, 2, 2) if narrow else Tile(128, 128, 64, 4, 5, 1)


if triton is not None:

    @triton.jit
    def _gelu(x, EXACT: tl.constexpr):
        if EXACT:
            return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        t = tl.minimum(tl.abs(x), 8.0)
        p = -1.00056331 + t * (-1.14502134 + t * (-0.473259941 + t * (-0.0406493417 + t * 0.0031972067)))
        return tl.maximum(x, 0.0) - tl.abs(x) * tl.exp2(p)

    @triton.jit
    def _rounded(x, TYPE: tl.constexpr, PACKED: tl.constexpr):
        """x as it is when it has been stored, in float32 still. PACKED: to bfloat16 and back two at a time, 1.5
        instructions each; what the compiler makes of two conversions is a slow one, one at a time."""
        if PACKED:
            return tl.inline_asm_elementwise(
                "{.reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000;}",
                "=r,=r,r,r",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=2,
            )
        return x.to(TYPE).to(tl.float32)

    @triton.jit
    def _join(mean, squares, n, other_mean, other_squares, k):
        """The moments of n numbers and of k others -> those of all (Chan et al.)."""
        apart = other_mean - mean
        share = k / (n + k)
        return mean + apart * share, squares + other_squares + apart * apart * (n * share)

    @triton.jit
    def _measure(x, n, N: tl.constexpr, TN: tl.constexpr):
        """Mean and squares of the columns of a part that are inside, and how many there are. x in float32."""
        count = tl.minimum(tl.maximum(N - n, 0), TN).to(tl.float32)
        if N % TN == 0:
            mean = tl.sum(x, 1) / TN
            apart = x - mean[:, None]
        else:
            inside = (n + tl.arange(0, TN) < N)[None, :]
            mean = tl.sum(tl.where(inside, x, 0.0), 1) / tl.maximum(count, 1.0)
            apart = tl.where(inside, x - mean[:, None], 0.0)
        return mean, tl.sum(apart * apart, 1), count

    @triton.jit
    def _statistics(moments_pointer, row, rows, room, eps, K: tl.constexpr, WIDTH: tl.constexpr):
        """Mean and 1 / deviation of rows of K columns, from their moments of WIDTH columns each."""
        there = row < rows
        pieces: tl.constexpr = (K + WIDTH - 1) // WIDTH
        mean = tl.load(moments_pointer + row, mask=there, other=0.0)
        squares = tl.load(moments_pointer + room + row, mask=there, other=0.0)
        for p in tl.static_range(1, pieces):
            at = moments_pointer + 2 * p * room + row
            other_mean = tl.load(at, mask=there, other=0.0)
            other_squares = tl.load(at + room, mask=there, other=0.0)
            width = WIDTH if p < pieces - 1 else K - p * WIDTH
            mean, squares = _join(mean, squares, p * WIDTH, other_mean, other_squares, width)
        return mean, tl.rsqrt(squares / K + eps)

    @triton.jit
    def _write(
        total,
        out_tile,
        residual_tile,
        bias_pointer,
        scale_pointer,
        m,
        n,
        mean,
        steep,
        sums_pointer,
        seen_pointer,
        probe,
        rows,
        N: tl.constexpr,
        TN: tl.constexpr,
        GELU: tl.constexpr,
        BIAS: tl.constexpr,
        SCALE: tl.constexpr,
        RESIDUAL: tl.constexpr,
        NORMED: tl.constexpr,
        PROBED: tl.constexpr,
        MEASURED: tl.constexpr,
        EXACT: tl.constexpr,
        PACKED: tl.constexpr,
    ):
        """What follows the product, and the store, for one part of a tile; gives what was stored, in float32."""
        column = n + tl.arange(0, TN)
        if NORMED:
            sums = tl.load(sums_pointer + column, mask=column < N, other=0.0)
            total = (total - mean[:, None] * sums[None, :]) * steep[:, None]
        if BIAS:
            total += tl.load(bias_pointer + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        if PROBED:
            row = m + tl.arange(0, total.shape[0])
            if (probe >= n) & (probe < n + TN):
                seen = tl.sum(tl.where((column == probe)[None, :], total, 0.0), 1)
                tl.store(seen_pointer + row, seen, mask=row < rows)
        if GELU:
            total = _gelu(total, EXACT)
        if SCALE:
            total *= tl.load(scale_pointer + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            total += residual_tile.load([m, n]).to(tl.float32)
        if MEASURED:
            total = _rounded(total, out_tile.dtype, PACKED)
        out_tile.store([m, n], total.to(out_tile.dtype))
        return total

    @triton.jit
    def _linear_kernel(
        x_tile,
        w_tile,
        out_tile,
        residual_tile,
        bias_pointer,
        scale_pointer,
        rows_pointer,
        moments_pointer,
        sums_pointer,
        seen_pointer,
        room,
        eps,
        probe,
        N: tl.constexpr,
        K: tl.constexpr,
        WIDTH: tl.constexpr,
        TM: tl.constexpr,
        TN: tl.constexpr,
        TK: tl.constexpr,
        PARTS: tl.constexpr,
        GELU: tl.constexpr,
        BIAS: tl.constexpr,
        SCALE: tl.constexpr,
        RESIDUAL: tl.constexpr,
        COUNTED: tl.constexpr,
        MEASURED: tl.constexpr,
        NORMED: tl.constexpr,
        PROBED: tl.constexpr,
        EXACT: tl.constexpr,
        PACKED: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        rows = room
        if COUNTED:
            rows = tl.load(rows_pointer)
        across: tl.constexpr = (N + TN - 1) // TN
        tiles = tl.cdiv(rows, TM) * across
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            m = (tile // across) * TM
            n = (tile % across) * TN
            total = tl.zeros((TM, TN), dtype=tl.float32)
            for k in range(0, K, TK):
                x = x_tile.load([m, k])
                w = w_tile.load([n, k])
                total = tl.dot(x, w.T, total, input_precision=PRECISION)
            row = m + tl.arange(0, TM)
            mean, steep = 0.0, 1.0
            if NORMED:
                mean, steep = _statistics(moments_pointer, row, rows, room, eps, K, WIDTH)
            if PARTS == 1:
                value = _write(
                    *(total, out_tile, residual_tile, bias_pointer, scale_pointer, m, n),
                    *(mean, steep, sums_pointer, seen_pointer, probe, rows),
                    *(N, TN, GELU, BIAS, SCALE, RESIDUAL, NORMED, PROBED, MEASURED, EXACT, PACKED),
                )
                if MEASURED:
                    centre, squares, _ = _measure(value, n, N, TN)
            else:
                half: tl.constexpr = TN // 2
                left, right = tl.split(tl.permute(tl.reshape(total, (TM, 2, half)), (0, 2, 1)))
                value = _write(
                    *(left, out_tile, residual_tile, bias_pointer, scale_pointer, m, n),
                    *(mean, steep, sums_pointer, seen_pointer, probe, rows),
                    *(N, half, GELU, BIAS, SCALE, RESIDUAL, NORMED, PROBED, MEASURED, EXACT, PACKED),
                )
                if MEASURED:
                    first = _measure(value, n, N, half)
                value = _write(
                    *(right, out_tile, residual_tile, bias_pointer, scale_pointer, m, n + half),
                    *(mean, steep, sums_pointer, seen_pointer, probe, rows),
                    *(N, half, GELU, BIAS, SCALE, RESIDUAL, NORMED, PROBED, MEASURED, EXACT, PACKED),
                )
                if MEASURED:
                    second = _measure(value, n + half, N, half)
                    centre, squares = _join(*first, *second)
            if MEASURED:
                at = moments_pointer + 2 * (tile % across) * room + row
                tl.store(at, centre, mask=row < rows)
                tl.store(at + room, squares, mask=row < rows)


@torch.library.custom_op("adaptivit::linear", mutates_args=())
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    rows: Tensor | None,
    gelu: bool,
    expected: int,
    space: int = 0,
) -> Tensor:
    """The kernel: [R, K] -> [R, N]; rows behind the last tile of live ones are not written.

    `expected` rows choose the tile; any number of them is right. `space`: see kernels.blank."""
    tile = tile_for(expected, len(weight), residual is not None, x.dtype == torch.float32, x.shape[1])
    return run(x, weight, bias, residual, scale, rows, gelu, tile, space=space)


@linear.register_fake
def _(x, weight, bias, residual, scale, rows, gelu, expected, space=0):
    return x.new_empty(x.shape[0], weight.shape[0])


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    rows: Tensor | None,
    gelu: bool,
    tile: Tile,
    moments: Tensor | None = None,
    norm: Norm | None = None,
    space: int = 0,
) -> Tensor:
    """The kernel with a tile of one's own. `moments` [P, 2, R] of the rows are written where they are asked for."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    room, width = len(x), len(weight)
    out = blank(room, width, space, x)
    if not room:
        return out
    part = [tile.m, tile.n // tile.parts]
    out_tile = TensorDescriptor.from_tensor(out, part)
    tiles = triton.cdiv(room, tile.m) * triton.cdiv(width, tile.n)
    programs = min(tiles, multiprocessors(x.device) * tile.residents) if tile.residents else tiles
    _linear_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [tile.m, tile.k]),
        TensorDescriptor.from_tensor(weight, [tile.n, tile.k]),
        out_tile,
        out_tile if residual is None else TensorDescriptor.from_tensor(residual, part),
        weight if bias is None else bias,
        weight if scale is None else scale,
        weight if rows is None else rows,
        weight if moments is None and norm is None else moments if norm is None else norm.moments,
        weight if norm is None else norm.sums,
        weight if norm is None else norm.seen,
        room,
        0.0 if norm is None else norm.eps,
        -1 if norm is None else norm.probe,
        N=width,
        K=x.shape[1],
        WIDTH=0 if norm is None else norm.width,
        TM=tile.m,
        TN=tile.n,
        TK=tile.k,
        PARTS=tile.parts,
        GELU=gelu,
        BIAS=bias is not None,
        SCALE=scale is not None,
        RESIDUAL=residual is not None,
        COUNTED=rows is not None,
        MEASURED=moments is not None,
        NORMED=norm is not None,
        PROBED=norm is not None and norm.probe >= 0,
        EXACT=x.dtype == torch.float32,
        PACKED=packs(x),
        PRECISION=precision(x.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
