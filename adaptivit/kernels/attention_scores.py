# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Attention that tokens receive in a packed batch, mean over heads and queries.

Shapes as in ragged_attention.py: q, k [R, H, d], offsets [B + 1], weight [R] bool, float32 or None.

    received_j = 1/H sum_h 1/n sum_i a_hij over the n rows i with a weight     [R] float32, A-MoD's evidence

The attention matrix is never stored: scores are computed twice, once for their sums and once for the result. Each head
has programs of its own, and the kernels give every head's part [R, H], so that few images fill a GPU too.
"""

from __future__ import annotations

from typing import Any

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


def reference(q: Tensor, k: Tensor, offsets: Tensor, weight: Tensor | None) -> Tensor:
    """[R]; rows of no image, and those of an image without any weight, are zero."""
    out = torch.zeros(len(q), device=q.device)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if start < stop:
            s = torch.einsum("ihc,jhc->hij", q[start:stop].double(), k[start:stop].double()) * q.shape[-1] ** -0.5
            w = torch.ones(stop - start, device=q.device) if weight is None else weight[start:stop]
            a = (s + w.double().log()).softmax(-1).nan_to_num(0.0).mean(0)
            counts = (w > 0).double()
            out[start:stop] = ((a * counts[:, None]).sum(0) / counts.sum().clamp_min(1)).to(out.dtype)
    return out


@jit
def _key_bias(weight_pointer, row, inside, WEIGHTED: tl.constexpr):
    """log2 of a key's weight, -inf where there is none."""
    if WEIGHTED == 2:
        return tl.load(weight_pointer + row, mask=inside, other=float("-inf"))
    if WEIGHTED == 1:
        return tl.where(tl.load(weight_pointer + row, mask=inside, other=0) != 0, 0.0, float("-inf"))
    return tl.where(inside, 0.0, float("-inf"))


@jit
def _sums_kernel(
    q_pointer,  # [R, H, d], as k
    k_pointer,
    weight_pointer,  # [R] or None
    offsets_pointer,  # [B + 1]
    sums_pointer,  # [R, H]
    row_stride,
    head_stride,
    scale,
    HEADS: tl.constexpr,
    d: tl.constexpr,
    WIDE: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """log2 sum_j w_j exp(s_ij) of every row and head."""
    image = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    start = tl.load(offsets_pointer + image)
    length = tl.load(offsets_pointer + image + 1) - start
    first = tl.program_id(0) * TM
    if first < length:
        i = first + tl.arange(0, TM)
        c = tl.arange(0, WIDE)
        base = start.to(tl.int64) * row_stride + head * head_stride
        at = base + i.to(tl.int64)[:, None] * row_stride + c[None, :]
        q = tl.load(q_pointer + at, mask=(i < length)[:, None] & (c < d)[None, :], other=0.0)
        top = tl.full((TM,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((TM,), dtype=tl.float32)
        for other in range(0, length, TN):
            j = other + tl.arange(0, TN)
            inside = j < length
            place = base + j.to(tl.int64)[:, None] * row_stride + c[None, :]
            k = tl.load(k_pointer + place, mask=inside[:, None] & (c < d)[None, :], other=0.0)
            s = tl.dot(q, k.T, input_precision=PRECISION) * scale
            s += _key_bias(weight_pointer, start + j, inside, WEIGHTED)[None, :]
            highest = tl.maximum(top, tl.max(s, 1))
            finite = tl.where(highest == float("-inf"), 0.0, highest)
            total = total * tl.exp2(top - finite) + tl.sum(tl.exp2(s - finite[:, None]), 1)
            top = highest
        # rows without any key get +inf, so that they give nothing
        sums = tl.where(total > 0.0, top + tl.log2(tl.maximum(total, 1e-37)), float("inf"))
        tl.store(sums_pointer + (start + i) * HEADS + head, sums, mask=i < length)


@jit
def _received_kernel(
    q_pointer,  # [R, H, d], as k
    k_pointer,
    weight_pointer,  # [R] or None
    offsets_pointer,  # [B + 1]
    sums_pointer,  # [R, H]
    out_pointer,  # [R, H]
    row_stride,
    head_stride,
    scale,
    HEADS: tl.constexpr,
    d: tl.constexpr,
    WIDE: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    image = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    start = tl.load(offsets_pointer + image)
    length = tl.load(offsets_pointer + image + 1) - start
    first = tl.program_id(0) * TN
    if first < length:
        j = first + tl.arange(0, TN)
        c = tl.arange(0, WIDE)
        base = start.to(tl.int64) * row_stride + head * head_stride
        keys = base + j.to(tl.int64)[:, None] * row_stride + c[None, :]
        bias = _key_bias(weight_pointer, start + j, j < length, WEIGHTED)
        total = tl.zeros((TN,), dtype=tl.float32)
        count = tl.zeros((TM,), dtype=tl.float32)
        k = tl.load(k_pointer + keys, mask=(j < length)[:, None] & (c < d)[None, :], other=0.0)
        for other in range(0, length, TM):
            i = other + tl.arange(0, TM)
            at = base + i.to(tl.int64)[:, None] * row_stride + c[None, :]
            q = tl.load(q_pointer + at, mask=(i < length)[:, None] & (c < d)[None, :], other=0.0)
            sums = tl.load(sums_pointer + (start + i) * HEADS + head, mask=i < length, other=float("inf"))
            counts = _key_bias(weight_pointer, start + i, i < length, WEIGHTED) > float("-inf")
            s = tl.dot(q, k.T, input_precision=PRECISION) * scale + bias[None, :] - sums[:, None]
            total += tl.sum(tl.where(counts[:, None], tl.exp2(s), 0.0), 0)
            count += counts.to(tl.float32)
        queries = tl.maximum(tl.sum(count, 0), 1.0)
        tl.store(out_pointer + (start + j) * HEADS + head, total / (queries * HEADS), mask=j < length)


@operation("received", lambda q, *_: q.new_empty(q.shape[:2], dtype=torch.float32))
def _received(out: Tensor, q: Tensor, k: Tensor, offsets: Tensor, longest: int, weight: Tensor | None) -> None:
    heads, width = q.shape[1:]
    sums, grid = torch.empty_like(out), (triton.cdiv(longest, 64), (len(offsets) - 1) * heads)
    sizes: dict[str, Any] = {"HEADS": heads, "d": width, "WIDE": power_of_two(width), "TM": 64, "TN": 64}
    sizes |= {"WEIGHTED": weight_kind(weight), "PRECISION": precision(q.dtype)}
    strides = (q.stride(0), q.stride(1), LOG2E * width**-0.5)
    _sums_kernel[grid](*pointers(q, k, weight, offsets, sums), *strides, **sizes)
    _received_kernel[grid](*pointers(q, k, weight, offsets, sums, out), *strides, **sizes)


def received(q: Tensor, k: Tensor, offsets: Tensor, longest: int, weight: Tensor | Log2 | None = None) -> Tensor:
    """As the reference, with the kernels where they can run; `longest` bounds the rows of an image."""
    if not usable(q.device):
        assert not isinstance(weight, Log2)
        return reference(q, k, offsets, weight)
    out: Tensor = _received(*alike(q, k), offsets, longest, log2_weight(weight))
    return out.sum(1)
