# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rows times a matrix, with all that follows in the same kernel: out = [residual + scale] act(x W^T + b).

Shapes: R rows that there is room for, `rows` [1] of them live; K width in, N width out. x [R, K], W [N, K], b [N],
scale [N] (LayerScale).

A persistent grid walks over the tiles of the live rows, so that the number of rows may be known to the device alone,
and the loads of the next tile are under way while the last one is being written.

GELU is the exact one, x Phi(x) = max(x, 0) - |x| Phi(-|x|), with Phi(-t) = 2^p(t) for a polynomial p fitted to stay
below the rounding of bfloat16 (3e-5 at most): one special-function instruction, where erf takes tens of ordinary ones.
In float32 it is computed with erf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch import blank, jit, live, multiprocessors, operation, pointers, precision, tl, triton


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


class Tile(NamedTuple):
    """How a product is cut: rows, columns and depth of a tile, warps, pipeline stages, programs a multiprocessor (0:
    one program a tile), and the parts in which a tile is written."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    residents: int
    parts: int = 1


def tile_for(rows: int, width: int, adds: bool, wide: bool = False, depth: int = 0) -> Tile:
    """By the rows that are expected, whether a residual is read, and the width in, `depth`; measured on an H200
    (docs/results/log.md). `wide` elements (float32) take twice the shared memory."""
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


@jit
def _gelu(x, EXACT: tl.constexpr):
    if EXACT:
        return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    t = tl.minimum(tl.abs(x), 8.0)
    p = -1.00056331 + t * (-1.14502134 + t * (-0.473259941 + t * (-0.0406493417 + t * 0.0031972067)))
    return tl.maximum(x, 0.0) - tl.abs(x) * tl.exp2(p)


@jit
def _write(
    total,  # [TM, TN] float32
    out_tile,  # [R, N]
    residual_tile,  # [R, N] or None
    bias_pointer,  # [N] or None
    scale_pointer,  # [N] or None
    m,
    n,
    N: tl.constexpr,
    TN: tl.constexpr,
    GELU: tl.constexpr,
    EXACT: tl.constexpr,
):
    """What follows the product, and the store, for one part of a tile."""
    column = n + tl.arange(0, TN)
    if bias_pointer is not None:
        total += tl.load(bias_pointer + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if GELU:
        total = _gelu(total, EXACT)
    if scale_pointer is not None:
        total *= tl.load(scale_pointer + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if residual_tile is not None:
        total += residual_tile.load([m, n]).to(tl.float32)
    out_tile.store([m, n], total.to(out_tile.dtype))


@jit
def _linear_kernel(
    x_tile,  # [R, K]
    w_tile,  # [N, K]
    out_tile,  # [R, N]
    residual_tile,  # [R, N] or None
    bias_pointer,  # [N] or None
    scale_pointer,  # [N] or None
    rows_pointer,  # [1] or None
    room,
    N: tl.constexpr,
    K: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    PARTS: tl.constexpr,
    GELU: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = room
    if rows_pointer is not None:
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
        if PARTS == 1:
            _write(
                *(total, out_tile, residual_tile, bias_pointer, scale_pointer, m, n),
                *(N, TN, GELU, EXACT),
            )
        else:
            half: tl.constexpr = TN // 2
            left, right = tl.split(tl.permute(tl.reshape(total, (TM, 2, half)), (0, 2, 1)))
            _write(
                *(left, out_tile, residual_tile, bias_pointer, scale_pointer, m, n),
                *(N, half, GELU, EXACT),
            )
            _write(
                *(right, out_tile, residual_tile, bias_pointer, scale_pointer, m, n + half),
                *(N, half, GELU, EXACT),
            )


@operation("linear", lambda x, weight, *given: blank(x.shape[0], weight.shape[0], given[5], x))
def _linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    rows: Tensor | None,
    gelu: bool,
    space: int,
    tile: Sequence[int],
) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    (room, width), (m, n, k, warps, stages, residents, parts) = out.shape, tile
    if not room:
        return
    tiles = triton.cdiv(room, m) * triton.cdiv(width, n)
    programs = min(tiles, multiprocessors(x.device) * residents) if residents else tiles
    _linear_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [m, k]),
        TensorDescriptor.from_tensor(weight, [n, k]),
        TensorDescriptor.from_tensor(out, [m, n // parts]),
        None if residual is None else TensorDescriptor.from_tensor(residual, [m, n // parts]),
        *pointers(bias, scale, rows),
        room,
        N=width,
        K=x.shape[1],
        TM=m,
        TN=n,
        TK=k,
        PARTS=parts,
        GELU=gelu,
        EXACT=x.dtype == torch.float32,
        PRECISION=precision(x.dtype),
        num_warps=warps,
        num_stages=stages,
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    rows: Tensor | None = None,
    gelu: bool = False,
    expected: int = 0,
    space: int = 0,
    tile: Tile | None = None,
) -> Tensor:
    """As the reference; rows behind the last tile of live ones are not written. `space`: see launch.blank. A tile
    changes the speed alone; default: by the `expected` rows."""
    tile = tile or tile_for(expected, len(weight), residual is not None, x.dtype == torch.float32, x.shape[1])
    out: Tensor = _linear(x, weight, bias, residual, scale, rows, gelu, space, tile)
    return out
