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

from .launch import precision, tl, triton


def reference(
    images: Tensor, weight: Tensor, bias: Tensor | None, position: Tensor, lead: Tensor, sides: tuple[int, int]
) -> Tensor:
    """weight [D, K], position [P, D], lead [prefix, D] -> [B, N, D]."""
    high, wide = sides
    grid = images.unflatten(3, (-1, wide)).unflatten(2, (-1, high)).permute(0, 2, 4, 1, 3, 5)
    rows = F.linear(grid.flatten(3).flatten(1, 2), weight, bias) + position
    return torch.cat([lead.expand(len(images), -1, -1), rows], 1)


if triton is not None:

    @triton.jit
    def _patches_kernel(
        images_pointer,
        weight_pointer,
        bias_pointer,
        position_pointer,
        lead_pointer,
        out_pointer,
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
        BIAS: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        K: tl.constexpr = CHANNELS * HIGH * WIDE
        across: tl.constexpr = (D + TN - 1) // TN
        m = (tl.program_id(0) // across) * TM + tl.arange(0, TM)
        n = (tl.program_id(0) % across) * TN + tl.arange(0, TN)
        image, patch = m // P, m % P
        there = m < batch * P
        corner = image.to(tl.int64) * (CHANNELS * area) + (patch // GRID) * HIGH * width + (patch % GRID) * WIDE
        total = tl.zeros((TM, TN), dtype=tl.float32)
        for first in range(0, K, TK):
            k = first + tl.arange(0, TK)
            pixel = (k // (HIGH * WIDE)) * area + (k % (HIGH * WIDE)) // WIDE * width + k % WIDE
            x = tl.load(
                images_pointer + corner[:, None] + pixel[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0
            )
            w = tl.load(
                weight_pointer + n[:, None] * K + k[None, :], mask=(n < D)[:, None] & (k < K)[None, :], other=0.0
            )
            total = tl.dot(x, w.T, total, input_precision=PRECISION)
        if BIAS:
            total += tl.load(bias_pointer + n, mask=n < D, other=0.0).to(tl.float32)[None, :]
        mask = there[:, None] & (n < D)[None, :]
        total += tl.load(position_pointer + patch[:, None] * D + n[None, :], mask=mask, other=0.0).to(tl.float32)
        row = image.to(tl.int64) * (PREFIX + P) + PREFIX + patch
        tl.store(out_pointer + row[:, None] * D + n[None, :], total.to(out_pointer.dtype.element_ty), mask=mask)
        for slot in tl.static_range(PREFIX):  # by whoever has the first patch of an image
            value = tl.load(lead_pointer + slot * D + n, mask=n < D, other=0.0)
            place = (image.to(tl.int64) * (PREFIX + P) + slot)[:, None] * D + n[None, :]
            first_patch = mask & (patch == 0)[:, None]
            tl.store(out_pointer + place, tl.broadcast_to(value[None, :], (TM, TN)), mask=first_patch)


@torch.library.custom_op("adaptivit::patches", mutates_args=())
def patches(
    images: Tensor, weight: Tensor, bias: Tensor | None, position: Tensor, lead: Tensor, high: int, wide: int
) -> Tensor:
    """The kernel, as the reference; images must be contiguous."""
    batch, channels, height, width = images.shape
    count, dim, prefix = len(position), len(weight), len(lead)
    out = torch.empty(batch, prefix + count, dim, dtype=weight.dtype, device=images.device)
    tm, tn = 64, 64 if batch * count < 1024 else 128  # measured on an H200 (benchmarks/LOG.md)
    grid = (triton.cdiv(batch * count, tm) * triton.cdiv(dim, tn),)
    _patches_kernel[grid](
        images,
        weight,
        weight if bias is None else bias,
        position,
        lead,
        out,
        batch,
        width,
        height * width,
        GRID=width // wide,
        P=count,
        PREFIX=prefix,
        CHANNELS=channels,
        HIGH=high,
        WIDE=wide,
        D=dim,
        TM=tm,
        TN=tn,
        TK=64,
        BIAS=bias is not None,
        PRECISION=precision(images.dtype),
        num_warps=4,
        num_stages=3,
    )
    return out


@patches.register_fake
def _(images, weight, bias, position, lead, high, wide):
    return weight.new_empty(images.shape[0], lead.shape[0] + position.shape[0], weight.shape[0])
