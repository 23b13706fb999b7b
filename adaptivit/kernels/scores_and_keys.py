# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""What folding looks at, in one launch: the class token's attention row (evidence.py) and unit keys (similar.py).

Shapes as there. Neither waits for the other: the first programs do the one, those behind them the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import LOG2E, Log2, alike, as_pointer, log2_weight, power_of_two, tl, triton, weight_kind

if triton is not None:
    from .attention_scores import _class_row_of
    from .nearest_token import _units_of

    @triton.jit
    def _looks_kernel(
        q_pointer,
        k_pointer,
        weight_pointer,
        cells_pointer,
        offsets_pointer,
        row_pointer,
        units_pointer,
        batch,
        slots,
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
        number = tl.program_id(0)
        if number < batch * HEADS:
            _class_row_of(
                *(number // HEADS, number % HEADS, q_pointer, k_pointer, weight_pointer, offsets_pointer, row_pointer),
                *(row_stride, head_stride, scale, HEADS, d, CHUNK, LONGEST, WEIGHTED),
            )
        else:
            _units_of(
                *(number - batch * HEADS, k_pointer, cells_pointer, offsets_pointer, units_pointer, 0, batch, slots),
                *(row_stride, head_stride, 1, 0, 0, HEADS, d, WIDE, TM, True),
            )


@torch.library.custom_op("adaptivit::looks", mutates_args=())
def _looks(
    q: Tensor, k: Tensor, cells: Tensor, offsets: Tensor, longest: int, weight: Tensor | None, slots: int
) -> tuple[Tensor, Tensor]:
    rows, heads, width = k.shape
    batch, wide = len(offsets) - 1, power_of_two(width)
    row = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    units = torch.empty(batch * slots, 2, width, dtype=torch.float16, device=k.device)
    tall = max(1, 2048 // wide)
    if rows:
        _looks_kernel[(batch * heads + triton.cdiv(rows, tall),)](
            *(q, k, as_pointer(weight, q), cells, offsets, row, units, batch, slots),
            *(q.stride(0), q.stride(1), LOG2E * width**-0.5),
            HEADS=heads,
            d=width,
            WIDE=wide,
            LONGEST=power_of_two(longest),
            CHUNK=32,
            TM=tall,
            WEIGHTED=weight_kind(weight),
            num_warps=8,
        )
    return row, units


@_looks.register_fake
def _(q, k, cells, offsets, longest, weight, slots):
    units = k.new_empty((offsets.shape[0] - 1) * slots, 2, k.shape[-1], dtype=torch.float16)
    return q.new_empty(q.shape[:2], dtype=torch.float32), units


def looks(
    q: Tensor, k: Tensor, cells: Tensor, offsets: Tensor, longest: int, weight: Tensor | Log2 | None, slots: int
) -> tuple[Tensor, Tensor]:
    """class_row [R] and units [B N, 2, d], with the kernel. For inference where it can run."""
    row, units = _looks(*alike(q, k), cells, offsets, longest, log2_weight(weight), slots)
    return row.sum(1), units
