# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The patch embedding as one matrix product that reads the images where they are and writes token rows.

Shapes: B images [B, C, H, W], P patches of p x q pixels each, D width, K = C p q; N = prefix + P rows an image.

    out[b, prefix + i] = W patch_i + bias + position_i,    out[b, :prefix] = lead

No copy of the pixels in patch order, no concatenation, no pass for the position embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch import jit, operation, pointers, precision, tl, triton


def reference(
    images: Tensor, weight: Tensor, bias: Tensor | None, position: Tensor, lead: Tensor, sides: tuple[int, int]
) -> Tensor:
    """weight [D, K], position [P, D], lead [prefix, D] -> [B, N, D]."""
    high, wide = sides
    grid = images.unflatten(3, (-1, wide)).unflatten(2, (-1, high)).permute(0, 2, 4, 1, 3, 5)
    rows = F.linear(grid.flatten(3).flatten(1, 2), weight, bias) + position
    return torch.cat([lead.expand(len(images), -1, -1), rows], 1)


@jit
def _patch_embed_kernel(
    images_pointer,  # [B, C, H, W]
    weight_pointer,  # [D, K]
    bias_pointer,  # [D] or None
    position_pointer,  # [P, D]
    lead_pointer,  # [prefix, D]
    out_pointer,  # [B, N, D]
    batch,
    width,  # pixels in a row of an image
    area,  # pixels in a channel
    GRID: tl.constexpr,  # patches in a row of an image
    P: tl.constexpr,
    PREFIX: tl.constexpr,
    CHANNELS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    K: tl.constexpr = CHANNELS * HIGH * WIDE
    across: tl.constexpr = (D + TN - 1) // TN
    m = (tl.program_id(0) // across) * TM + tl.arange(0, TM)
    n = (tl.program_id(0) % across) * TN + tl.arange(0, TN)
    image, patch = m // P, m % P
    inside = m < batch * P
    corner = image.to(tl.int64) * (CHANNELS * area) + (patch // GRID) * HIGH * width + (patch % GRID) * WIDE
    total = tl.zeros((TM, TN), dtype=tl.float32)
    for first in range(0, K, TK):
        k = first + tl.arange(0, TK)
        pixel = (k // (HIGH * WIDE)) * area + (k % (HIGH * WIDE)) // WIDE * width + k % WIDE
        x = tl.load(
            images_pointer + corner[:, None] + pixel[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0
        )
        w = tl.load(weight_pointer + n[:, None] * K + k[None, :], mask=(n < D)[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(x, w.T, total, input_precision=PRECISION)
    if bias_pointer is not None:
        total += tl.load(bias_pointer + n, mask=n < D, other=0.0).to(tl.float32)[None, :]
    mask = inside[:, None] & (n < D)[None, :]
    total += tl.load(position_pointer + patch[:, None] * D + n[None, :], mask=mask, other=0.0).to(tl.float32)
    row = image.to(tl.int64) * (PREFIX + P) + PREFIX + patch
    tl.store(out_pointer + row[:, None] * D + n[None, :], total.to(out_pointer.dtype.element_ty), mask=mask)
    for slot in tl.static_range(PREFIX):  # written with the first patch of an image
        value = tl.load(lead_pointer + slot * D + n, mask=n < D, other=0.0)
        place = (image.to(tl.int64) * (PREFIX + P) + slot)[:, None] * D + n[None, :]
        first_patch = mask & (patch == 0)[:, None]
        tl.store(out_pointer + place, tl.broadcast_to(value[None, :], (TM, TN)), mask=first_patch)


def _outputs(images, weight, bias, position, lead, *_) -> Tensor:
    return weight.new_empty(images.shape[0], lead.shape[0] + position.shape[0], weight.shape[0])


@operation("patch_embed", _outputs)
def patch_embed(
    out: Tensor,
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    position: Tensor,
    lead: Tensor,
    high: int,
    wide: int,
) -> None:
    """The kernel, as the reference; images must be contiguous."""
    batch, channels, height, width = images.shape
    count, dim = len(position), len(weight)
    tm, tn = 64, 64 if batch * count < 1024 else 128  # measured on an H200 (docs/results/log.md)
    _patch_embed_kernel[(triton.cdiv(batch * count, tm) * triton.cdiv(dim, tn),)](
        *pointers(images, weight, bias, position, lead, out),
        *(batch, width, height * width),
        GRID=width // wide,
        P=count,
        PREFIX=len(lead),
        CHANNELS=channels,
        HIGH=high,
        WIDE=wide,
        D=dim,
        TM=tm,
        TN=tn,
        TK=64,
        PRECISION=precision(images.dtype),
        num_warps=4,
        num_stages=3,
    )
