# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Attention that tokens receive, in a packed batch: from the class token, or from all tokens (mean over heads).

Shapes as in ragged.py: q, k [R, H, d], offsets [B + 1], weight [R] bool, float32 or None. Answers are [R] float32.

    class_row_j = 1/H sum_h a_hij with i the first row of the image            EViT's evidence
    received_j  = 1/H sum_h 1/n sum_i a_hij over the n rows with a weight      A-MoD's

The attention matrix is never stored: the second takes the scores twice, once for their sums and once for the answer.
Each head has programs of its own, and the kernels give every head's part [R, H], so that few images fill a GPU too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import (
    LOG2E,
    Log2,
    alike,
    as_pointer,
    log2_weight,
    power_of_two,
    precision,
    tl,
    triton,
    usable,
    weight_kind,
)


def reference(q: Tensor, k: Tensor, offsets: Tensor, weight: Tensor | None, queries: str) -> Tensor:
    """[R]; rows of no image, and those of an image without any weight, are zero."""
    out = torch.zeros(len(q), device=q.device)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if start == stop:
            continue
        first = start + 1 if queries == "class" else stop
        s = torch.einsum("ihc,jhc->hij", q[start:first].double(), k[start:stop].double()) * q.shape[-1] ** -0.5
        w = torch.ones(stop - start, device=q.device) if weight is None else weight[start:stop]
        a = (s + w.double().log()).softmax(-1).nan_to_num(0.0).mean(0)
        there = torch.ones(1, device=q.device) if queries == "class" else (w > 0).double()
        out[start:stop] = ((a * there[:, None]).sum(0) / there.sum().clamp_min(1)).to(out.dtype)
    return out


if triton is not None:

    @triton.jit
    def _key_bias(weight_pointer, row, inside, WEIGHTED: tl.constexpr):
        """log2 of a key's weight, -inf where there is none."""
        if WEIGHTED == 2:
            return tl.load(weight_pointer + row, mask=inside, other=float("-inf"))
        if WEIGHTED == 1:
            return tl.where(tl.load(weight_pointer + row, mask=inside, other=0) != 0, 0.0, float("-inf"))
        return tl.where(inside, 0.0, float("-inf"))

    @triton.jit
    def _class_row_of(
        image,
        head,
        q_pointer,
        k_pointer,
        weight_pointer,
        offsets_pointer,
        out_pointer,
        row_stride,
        head_stride,
        scale,
        HEADS: tl.constexpr,
        d: tl.constexpr,
        CHUNK: tl.constexpr,
        WIDE: tl.constexpr,
        WEIGHTED: tl.constexpr,
    ):
        start = tl.load(offsets_pointer + image)
        length = tl.load(offsets_pointer + image + 1) - start
        j = tl.arange(0, WIDE)
        inside = j < length
        bias = _key_bias(weight_pointer, start + j, inside, WEIGHTED)
        base = start.to(tl.int64) * row_stride + head * head_stride
        s = tl.zeros((WIDE,), dtype=tl.float32)
        for part in range(0, d, CHUNK):
            c = part + tl.arange(0, CHUNK)
            q = tl.load(q_pointer + base + c, mask=(c < d) & (length > 0), other=0.0).to(tl.float32)
            place = base + c[None, :] + j.to(tl.int64)[:, None] * row_stride
            k = tl.load(k_pointer + place, mask=inside[:, None] & (c < d)[None, :], other=0.0)
            s += tl.sum(k.to(tl.float32) * q[None, :], 1)
        s = s * scale + bias
        top = tl.max(s, 0)
        p = tl.exp2(s - tl.where(top == float("-inf"), 0.0, top))
        p = p / tl.maximum(tl.sum(p, 0), 1e-37)
        tl.store(out_pointer + (start + j) * HEADS + head, p / HEADS, mask=inside)

    @triton.jit
    def _class_row_kernel(
        q_pointer,
        k_pointer,
        weight_pointer,
        offsets_pointer,
        out_pointer,
        row_stride,
        head_stride,
        scale,
        HEADS: tl.constexpr,
        d: tl.constexpr,
        CHUNK: tl.constexpr,
        WIDE: tl.constexpr,
        WEIGHTED: tl.constexpr,
    ):
        _class_row_of(
            *(tl.program_id(0), tl.program_id(1), q_pointer, k_pointer, weight_pointer, offsets_pointer, out_pointer),
            *(row_stride, head_stride, scale, HEADS, d, CHUNK, WIDE, WEIGHTED),
        )

    @triton.jit
    def _sums_kernel(
        q_pointer,
        k_pointer,
        weight_pointer,
        offsets_pointer,
        sums_pointer,
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

    @triton.jit
    def _received_kernel(
        q_pointer,
        k_pointer,
        weight_pointer,
        offsets_pointer,
        sums_pointer,
        out_pointer,
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
                there = _key_bias(weight_pointer, start + i, i < length, WEIGHTED) > float("-inf")
                s = tl.dot(q, k.T, input_precision=PRECISION) * scale + bias[None, :] - sums[:, None]
                total += tl.sum(tl.where(there[:, None], tl.exp2(s), 0.0), 0)
                count += there.to(tl.float32)
            queries = tl.maximum(tl.sum(count, 0), 1.0)
            tl.store(out_pointer + (start + j) * HEADS + head, total / (queries * HEADS), mask=j < length)


@torch.library.custom_op("adaptivit::class_row", mutates_args=())
def _class_row(q: Tensor, k: Tensor, offsets: Tensor, longest: int, weight: Tensor | None) -> Tensor:
    heads, width = q.shape[1:]
    out = torch.empty(len(q), heads, dtype=torch.float32, device=q.device)
    _class_row_kernel[(len(offsets) - 1, heads)](
        *(q, k, as_pointer(weight, q), offsets, out, q.stride(0), q.stride(1), LOG2E * width**-0.5),
        HEADS=heads,
        d=width,
        CHUNK=32,
        WIDE=power_of_two(longest),
        WEIGHTED=weight_kind(weight),
        num_warps=8,
    )
    return out


@torch.library.custom_op("adaptivit::received", mutates_args=())
def _received(q: Tensor, k: Tensor, offsets: Tensor, longest: int, weight: Tensor | None) -> Tensor:
    heads, width = q.shape[1:]
    sums, out = (torch.empty(len(q), heads, dtype=torch.float32, device=q.device) for _ in range(2))
    scale, seen = LOG2E * width**-0.5, as_pointer(weight, q)
    sizes = {
        "HEADS": heads,
        "d": width,
        "WIDE": power_of_two(width),
        "TM": 64,
        "TN": 64,
        "WEIGHTED": weight_kind(weight),
        "PRECISION": precision(q.dtype),
    }
    images, tiles = len(offsets) - 1, triton.cdiv(longest, 64)
    strides = (q.stride(0), q.stride(1), scale)
    _sums_kernel[(tiles, images * heads)](q, k, seen, offsets, sums, *strides, **sizes)
    _received_kernel[(tiles, images * heads)](q, k, seen, offsets, sums, out, *strides, **sizes)
    return out


@_class_row.register_fake
@_received.register_fake
def _(q, k, offsets, longest, weight):
    return q.new_empty(q.shape[:2], dtype=torch.float32)


def class_row(q: Tensor, k: Tensor, offsets: Tensor, longest: int, weight: Tensor | Log2 | None = None) -> Tensor:
    if not usable(q.device):
        assert not isinstance(weight, Log2)
        return reference(q, k, offsets, weight, "class")
    return _class_row(*alike(q, k), offsets, longest, log2_weight(weight)).sum(1)


def received(q: Tensor, k: Tensor, offsets: Tensor, longest: int, weight: Tensor | Log2 | None = None) -> Tensor:
    if not usable(q.device):
        assert not isinstance(weight, Log2)
        return reference(q, k, offsets, weight, "all")
    return _received(*alike(q, k), offsets, longest, log2_weight(weight)).sum(1)
