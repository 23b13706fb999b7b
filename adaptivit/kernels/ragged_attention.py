# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Attention inside each image of a packed batch.

Shapes: B images, H heads, d head width; R rows that there is room for. q, k, v [R, H, d] are views of one qkv; image b
has the rows offsets[b] to offsets[b + 1]. weight [R] >= 0 of every row as a key, or None for all ones:

    a_ij = w_j exp(s_ij) / sum_j w_j exp(s_ij),   s = q k^T / sqrt(d)

A weight may be boolean or float32. An image may have any number of rows, none included; lengths are
known to the device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .launch import (
    LOG2E,
    Log2,
    alike,
    jit,
    log2_weight,
    operation,
    pointers,
    power_of_two,
    precision,
    tl,
    triton,
    usable,
    weight_kind,
)


def reference(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, weight: Tensor | None = None) -> Tensor:
    """[R, H, d] -> [R, H, d]; rows of no image, and those of an image without any weight, are zero."""
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        one, two, three = (t[start:stop].transpose(0, 1).double() for t in (q, k, v))
        s = one @ two.transpose(1, 2) * q.shape[-1] ** -0.5
        if weight is not None:
            s = s + weight[start:stop].double().log()
        out[start:stop] = (s.softmax(-1).nan_to_num(0.0) @ three).transpose(0, 1).to(v.dtype)
    return out


@jit
def _attend_kernel(
    q_pointer,  # [R, H, d], as k and v
    k_pointer,
    v_pointer,
    weight_pointer,  # [R] or None
    offsets_pointer,  # [B + 1]
    out_pointer,  # [R, H, d]
    row_stride,
    head_stride,
    scale,  # log2(e) / sqrt(d)
    HEADS: tl.constexpr,
    d: tl.constexpr,
    WIDE: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """TM queries of one head over all keys of an image."""
    absent = float("-inf") if WEIGHTED == 2 else 0
    image = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    start = tl.load(offsets_pointer + image)
    length = tl.load(offsets_pointer + image + 1) - start
    first = tl.program_id(0) * TM
    if first < length:
        at = start.to(tl.int64) * row_stride + head * head_stride
        q_pointer += at
        k_pointer += at
        v_pointer += at
        if WEIGHTED:
            weight_pointer += start
        out_pointer += start.to(tl.int64) * (HEADS * d) + head * d
        i = first + tl.arange(0, TM)
        c = tl.arange(0, WIDE)
        wide = (c < d)[None, :]
        q = tl.load(q_pointer + i[:, None] * row_stride + c[None, :], mask=(i < length)[:, None] & wide, other=0.0)
        top = tl.full((TM,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((TM,), dtype=tl.float32)
        out = tl.zeros((TM, WIDE), dtype=tl.float32)
        j = tl.arange(0, TN)
        if WEIGHTED:  # of the keys that come next: no product waits for it
            weight = tl.load(weight_pointer + j, mask=j < length, other=absent)
        for other in range(0, length, TN):
            j = other + tl.arange(0, TN)
            inside = (j < length)[:, None] & wide
            place = j[:, None] * row_stride + c[None, :]
            k = tl.load(k_pointer + place, mask=inside, other=0.0)
            v = tl.load(v_pointer + place, mask=inside, other=0.0)
            s = tl.dot(q, k.T, input_precision=PRECISION)
            if WEIGHTED == 2:
                s = s * scale + weight[None, :]
            elif WEIGHTED == 1:
                s = tl.where((weight != 0)[None, :], s, float("-inf"))
            elif other + TN > length:
                s = tl.where((j < length)[None, :], s, float("-inf"))
            if WEIGHTED:
                weight = tl.load(weight_pointer + j + TN, mask=j + TN < length, other=absent)
            highest = tl.max(s, 1)
            if WEIGHTED != 2:  # scale is positive; multiplied with the rest in the one instruction that subtracts
                highest *= scale
            highest = tl.maximum(top, highest)
            finite = highest
            if WEIGHTED:  # all keys so far may be absent
                finite = tl.where(highest == float("-inf"), 0.0, highest)
            if WEIGHTED == 2:
                p = tl.exp2(s - finite[:, None])
            else:
                p = tl.exp2(s * scale - finite[:, None])
            shrink = tl.exp2(top - finite)
            total = total * shrink + tl.sum(p, 1)
            out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
            top = highest
        out = out / tl.where(total > 0.0, total, 1.0)[:, None]
        to = out_pointer + i[:, None] * (HEADS * d) + c[None, :]
        tl.store(to, out.to(out_pointer.dtype.element_ty), mask=(i < length)[:, None] & wide)


class Tile(NamedTuple):
    """Queries and keys of a tile, warps, pipeline stages."""

    m: int
    n: int
    warps: int
    stages: int


def tile_for(longest: int, width: int, dtype: torch.dtype, images: int, typical: int, weighted: bool) -> Tile:
    """For so many images of `typical` rows; measured on an H200 (benchmarks/attention_tiles.py)."""
    if dtype == torch.float32 or width > 64:
        return Tile(64, 32, 4, 2)
    if images > 64 and longest <= 256:
        return Tile(64, 32, 4, 3)
    if typical > 120:
        return Tile(64, 64, 4, 3)
    return Tile(64, 128, 4, 2) if weighted and typical > 64 else Tile(64, 64, 4, 2)


@operation("attend", lambda q, k, v, *_: v.new_empty(v.shape))
def _attend(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    weight: Tensor | None,
    tile: Sequence[int],
) -> None:
    """`weight` boolean, or the binary logarithm."""
    (_, heads, width), (tm, tn, warps, stages) = q.shape, tile
    _attend_kernel[(triton.cdiv(longest, tm), (len(offsets) - 1) * heads)](
        *pointers(q, k, v, weight, offsets, out),
        *(q.stride(0), q.stride(1), LOG2E * width**-0.5),
        HEADS=heads,
        d=width,
        WIDE=power_of_two(width),
        TM=tm,
        TN=tn,
        WEIGHTED=weight_kind(weight),
        PRECISION=precision(q.dtype),
        num_warps=warps,
        num_stages=stages,
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    weight: Tensor | Log2 | None = None,
    typical: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """As the reference, with the kernel where it can run; rows of no image are not written.

    `longest` bounds the rows of an image; the `typical` ones choose the tile, which changes the speed alone."""
    if not usable(q.device):
        assert not isinstance(weight, Log2)
        return reference(q, k, v, offsets, weight)
    q, k, v = alike(q, k, v)
    weight, typical = log2_weight(weight), longest if typical is None else typical
    tile = tile or tile_for(longest, q.shape[-1], q.dtype, len(offsets) - 1, typical, weight is not None)
    out: Tensor = _attend(q, k, v, offsets, longest, weight, tile)
    return out
