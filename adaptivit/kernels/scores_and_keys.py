# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The class token's attention row, and keys as unit vectors; both in one launch where a policy reads both.

Shapes as in ragged_attention.py: q, k [R, H, d], offsets [B + 1], weight [R] bool, float32 or None; N slots, and cells
[R] = image * N + slot of every row.

    class_row_j = 1/H sum_h a_hij with i the first row of the image             [R] float32, EViT's evidence
    unit_i      = x_i / |x_i|,  x_i = 1/H sum_h k_hi                            [B N, 2, d], in place of the cell

Each head has programs of its own that give its part [R, H], so that few images fill a GPU too. A unit vector is stored
as two float16, 64 u = high + low: 64, so that low is no denormal number (nearest_token.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_scores import _key_bias
from .launch import (
    LOG2E,
    Log2,
    alike,
    jit,
    log2_weight,
    operation,
    pointers,
    power_of_two,
    tl,
    triton,
    usable,
    weight_kind,
)


def class_row_reference(q: Tensor, k: Tensor, offsets: Tensor, weight: Tensor | None = None) -> Tensor:
    """[R]; rows of no image, and those of an image without any weight, are zero."""
    out = torch.zeros(len(q), device=q.device)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if start < stop:
            s = torch.einsum("hc,jhc->hj", q[start].double(), k[start:stop].double()) * q.shape[-1] ** -0.5
            w = torch.ones(stop - start, device=q.device) if weight is None else weight[start:stop]
            out[start:stop] = (s + w.double().log()).softmax(-1).nan_to_num(0.0).mean(0).to(out.dtype)
    return out


def unit_keys_reference(k: Tensor, cells: Tensor, offsets: Tensor, slots: int) -> Tensor:
    """[B N, 2, d]; zero where there is no row."""
    cells = cells[: int(offsets[-1])].long()
    x = k[: len(cells)].to(torch.promote_types(k.dtype, torch.float32)).mean(1)
    unit = 64 * (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12))
    high = unit.half()
    out = torch.zeros((len(offsets) - 1) * slots, 2, k.shape[-1], dtype=torch.float16, device=k.device)
    return out.index_copy(0, cells, torch.stack([high, (unit - high.to(unit.dtype)).half()], -2))


@jit
def _class_row_of(
    image,
    head,
    q_pointer,  # [R, H, d], as k
    k_pointer,
    weight_pointer,  # [R] or None
    offsets_pointer,  # [B + 1]
    out_pointer,  # [R, H]
    row_stride,
    head_stride,
    scale,
    HEADS: tl.constexpr,
    d: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """One head's part of the class token's row of an image."""
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


@jit
def _unit_keys_of(
    tile,
    k_pointer,  # [R, H, d]
    cells_pointer,  # [R]
    offsets_pointer,  # [B + 1]
    out_pointer,  # [B N, 2, d]
    batch,
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    d: tl.constexpr,
    WIDE: tl.constexpr,
    TM: tl.constexpr,
):
    """The unit keys of a tile of TM rows."""
    rows = tl.load(offsets_pointer + batch)
    if tile * TM < rows:
        row = tile * TM + tl.arange(0, TM)
        live = row < rows
        cell = tl.load(cells_pointer + row, mask=live, other=0).to(tl.int64)
        c = tl.arange(0, WIDE)
        inside = live[:, None] & (c < d)[None, :]
        place = row.to(tl.int64)[:, None] * row_stride + c[None, :]
        x = tl.zeros((TM, WIDE), dtype=tl.float32)
        for head in tl.static_range(HEADS):
            x += tl.load(k_pointer + place + head * head_stride, mask=inside, other=0.0).to(tl.float32)
        x = x / HEADS
        length = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)
        unit = x / length[:, None] * 64.0
        high = unit.to(tl.float16)
        to = out_pointer + cell[:, None] * (2 * d) + c[None, :]
        tl.store(to, high, mask=inside)
        tl.store(to + d, (unit - high.to(tl.float32)).to(tl.float16), mask=inside)


@jit
def _scores_and_keys_kernel(
    q_pointer,  # [R, H, d] or None: no class row
    k_pointer,  # [R, H, d]
    weight_pointer,  # [R] or None
    cells_pointer,  # [R] or None: no unit keys
    offsets_pointer,  # [B + 1]
    row_pointer,  # [R, H]
    units_pointer,  # [B N, 2, d]
    batch,
    row_stride,
    head_stride,
    scale,
    HEADS: tl.constexpr,
    d: tl.constexpr,
    WIDE: tl.constexpr,
    LONGEST: tl.constexpr,
    CHUNK: tl.constexpr,
    TM: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """The first programs compute class rows, a head of an image each, those behind them unit keys."""
    number = tl.program_id(0)
    if q_pointer is not None:
        if number < batch * HEADS:
            _class_row_of(
                *(number // HEADS, number % HEADS, q_pointer, k_pointer, weight_pointer, offsets_pointer),
                *(row_pointer, row_stride, head_stride, scale, HEADS, d, CHUNK, LONGEST, WEIGHTED),
            )
        number -= batch * HEADS
    if cells_pointer is not None:  # noqa: SIM102 - known when it is compiled
        if number >= 0:
            _unit_keys_of(
                *(number, k_pointer, cells_pointer, offsets_pointer, units_pointer, batch),
                *(row_stride, head_stride, HEADS, d, WIDE, TM),
            )


def _outputs(q, k, cells, offsets, longest, weight, slots) -> tuple[Tensor, Tensor]:
    row = k.new_empty((0,) if q is None else k.shape[:2], dtype=torch.float32)
    cell = 0 if cells is None else (offsets.shape[0] - 1) * slots
    return row, k.new_empty(cell, 2, k.shape[-1], dtype=torch.float16)


@operation("scores_and_keys", _outputs)
def _scores_and_keys(
    out: tuple[Tensor, Tensor],
    q: Tensor | None,
    k: Tensor,
    cells: Tensor | None,
    offsets: Tensor,
    longest: int,
    weight: Tensor | None,
    slots: int,
) -> None:
    """Without q, or without cells, that output is empty."""
    (rows, heads, width), batch = k.shape, len(offsets) - 1
    wide = power_of_two(width)
    tall = max(1, 2048 // wide)
    programs = (0 if q is None else batch * heads) + (0 if cells is None else triton.cdiv(rows, tall))
    if rows:
        _scores_and_keys_kernel[(programs,)](
            *pointers(q, k, weight, cells, offsets, *out),
            *(batch, k.stride(0), k.stride(1), LOG2E * width**-0.5),
            HEADS=heads,
            d=width,
            WIDE=wide,
            LONGEST=power_of_two(longest),
            CHUNK=32,
            TM=tall,
            WEIGHTED=weight_kind(weight),
            num_warps=4 if q is None else 8,
        )


def class_row(q: Tensor, k: Tensor, offsets: Tensor, longest: int, weight: Tensor | Log2 | None = None) -> Tensor:
    """[R] as the reference, with the kernel where it can run; `longest` bounds the rows of an image."""
    if not usable(q.device):
        assert not isinstance(weight, Log2)
        return class_row_reference(q, k, offsets, weight)
    q, k = alike(q, k)
    row: Tensor = _scores_and_keys(q, k, None, offsets, longest, log2_weight(weight), 0)[0]
    return row.sum(1)


def unit_keys(k: Tensor, cells: Tensor, offsets: Tensor, slots: int) -> Tensor:
    """[B N, 2, d] as the reference; cells without a row are not written."""
    if not usable(k.device):
        return unit_keys_reference(k, cells, offsets, slots)
    k = k if k.stride(-1) == 1 else k.contiguous()
    units: Tensor = _scores_and_keys(None, k, cells, offsets, 0, None, slots)[1]
    return units


def class_row_and_unit_keys(
    q: Tensor, k: Tensor, cells: Tensor, offsets: Tensor, longest: int, weight: Tensor | Log2 | None, slots: int
) -> tuple[Tensor, Tensor]:
    """Both in one launch, where the kernels can run."""
    q, k = alike(q, k)
    row, units = _scores_and_keys(q, k, cells, offsets, longest, log2_weight(weight), slots)
    return row.sum(1), units
