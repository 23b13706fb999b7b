# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""LayerNorm without a pass of its own: the product before it measures the rows, the product behind it norms them.

    LayerNorm(x) W^T + b = rstd (x W'^T - mean u) + c,   W' = W gamma,   u = row sums of W',   c = W beta + b

Shapes: R rows that there is room for, of which `rows` [1] are live; D width of the rows, N width out, K of a hidden
layer. x [R, D], W [N, D], u and c [N] float32. Moments [P, 2, R] float32 are what is known of each of the P pieces of a
row: the mean of its `width` columns (the last piece may be narrower) and the sum of squared distances from it. Of these
mean and rstd are found without the difference of two large numbers.

W' is rounded to the dtype of the weights, and u is of the rounded ones, so that a mean that all columns share goes out
as exactly as it came in. Both run the kernel of linear.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import linear as products
from .launch import live, triton
from .linear import Norm, Tile, tile_for


def fold(gain: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """gamma, beta [D], W [N, D], b [N] -> W' [N, D] in the dtype of the weights, u and c [N] in float32 at least."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    folded = (weight.to(wide) * gain.to(wide)).to(weight.dtype)
    shift = (weight.to(wide) * offset.to(wide)).sum(1)
    return folded, folded.to(wide).sum(1), shift if bias is None else shift + bias.to(wide)


def reference_moments(x: Tensor, width: int, rows: Tensor | None = None) -> Tensor:
    """[R, D] -> [P, 2, R]; zero for rows that are not live."""
    n = live(rows, x)
    out = x.new_zeros(-(-x.shape[1] // width), 2, len(x))
    for piece, of in zip(out, x[:n].split(width, 1), strict=True):
        piece[0, :n] = of.mean(1)
        piece[1, :n] = (of - of.mean(1, keepdim=True)).square().sum(1)
    return out


def reference(
    x: Tensor,
    moments: Tensor,
    width: int,
    eps: float,
    weight: Tensor,
    sums: Tensor,
    shift: Tensor,
    rows: Tensor | None = None,
    probe: int = -1,
    gelu: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """out [R, N] and seen [R]: element `probe` before the GELU; rows that are not live are zero."""
    n, wide = live(rows, x), x.shape[1]
    size = torch.full((len(moments), 1), width, dtype=moments.dtype, device=x.device)
    size[-1] = wide - (len(moments) - 1) * width
    means, squares = moments[:, 0, :n], moments[:, 1, :n]
    mean = (size * means).sum(0) / wide
    spread = (squares + size * (means - mean).square()).sum(0) / wide
    y = (spread + eps).rsqrt()[:, None] * (F.linear(x[:n], weight) - mean[:, None] * sums) + shift
    out, seen = x.new_zeros(len(x), len(weight)), moments.new_zeros(len(x))
    out[:n] = F.gelu(y) if gelu else y
    if probe >= 0:
        seen[:n] = y[:, probe]
    return out, None if probe < 0 else seen


def piece(expected: int, width: int, dtype: torch.dtype) -> int:
    """Of how many columns `measured` gives moments, one after the other."""
    return tile_for(expected, width, True, dtype == torch.float32).n


@torch.library.custom_op("adaptivit::linear_measured", mutates_args=())
def measured(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    scale: Tensor | None,
    rows: Tensor | None,
    expected: int,
) -> tuple[Tensor, Tensor]:
    """As `linear` with a residual, [R, K] -> [R, D], and the moments of what it writes, [P, 2, R], for every
    piece(expected, D, dtype) columns. What is not live is not written."""
    tile = tile_for(expected, len(weight), True, x.dtype == torch.float32)
    return run_measured(x, weight, bias, residual, scale, rows, tile)


@measured.register_fake
def _(x, weight, bias, residual, scale, rows, expected):
    pieces = -(-weight.shape[0] // piece(expected, weight.shape[0], x.dtype))
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(pieces, 2, x.shape[0], dtype=torch.float32)


def run_measured(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    rows: Tensor | None,
    tile: Tile,
) -> tuple[Tensor, Tensor]:
    """`measured` with a tile of one's own."""
    pieces = triton.cdiv(len(weight), tile.n)
    moments = torch.empty(pieces, 2, len(x), dtype=torch.float32, device=x.device)
    return products.run(x, weight, bias, residual, scale, rows, False, tile, moments), moments


@torch.library.custom_op("adaptivit::linear_normed", mutates_args=())
def _normed(
    x: Tensor,
    moments: Tensor,
    width: int,
    eps: float,
    weight: Tensor,
    sums: Tensor,
    shift: Tensor,
    rows: Tensor | None,
    probe: int,
    gelu: bool,
    expected: int,
    space: int = 0,
) -> tuple[Tensor, Tensor]:
    tile = tile_for(expected, len(weight), False, x.dtype == torch.float32)
    return run_normed(x, moments, width, eps, weight, sums, shift, rows, probe, gelu, tile, space)


@_normed.register_fake
def _(x, moments, width, eps, weight, sums, shift, rows, probe, gelu, expected, space=0):
    seen = x.new_empty(x.shape[0] if probe >= 0 else 0, dtype=torch.float32)
    return x.new_empty(x.shape[0], weight.shape[0]), seen


def run_normed(
    x: Tensor,
    moments: Tensor,
    width: int,
    eps: float,
    weight: Tensor,
    sums: Tensor,
    shift: Tensor,
    rows: Tensor | None,
    probe: int,
    gelu: bool,
    tile: Tile,
    space: int = 0,
) -> tuple[Tensor, Tensor]:
    """The kernel with a tile of one's own; seen is empty where nothing is looked at."""
    seen = torch.empty(len(x) if probe >= 0 else 0, dtype=torch.float32, device=x.device)
    norm = Norm(moments, width, eps, sums, probe, seen)
    return products.run(x, weight, shift, None, None, rows, gelu, tile, norm=norm, space=space), seen


def normed(
    x: Tensor,
    moments: Tensor,
    width: int,
    eps: float,
    weight: Tensor,
    sums: Tensor,
    shift: Tensor,
    rows: Tensor | None,
    probe: int,
    gelu: bool,
    expected: int,
    space: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """As the reference, W', u and c being those of `fold`; what is not live is not written. `space`: see
    kernels.blank."""
    out, seen = _normed(x, moments, width, eps, weight, sums, shift, rows, probe, gelu, expected, space)
    return out, None if probe < 0 else seen
