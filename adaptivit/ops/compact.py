# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Who stays, put into a row: the places of a packed batch, on the device.

Shapes: B images, N slots, cell = image * N + slot; R = B N rows that there is room for.

    place [B N]      the row of each cell, -1 where it has none
    cells [R]        the cell of each row, 0 behind the last live one
    offsets [B + 1]  image b has the rows offsets[b] to offsets[b + 1]; the last is the number of live rows
    index [R]        the row that each of them was before, 0 behind the last live one
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import power_of_two, tl, triton, usable

Order = tuple[Tensor, Tensor, Tensor, Tensor]


def reference(stay: Tensor, before: Tensor) -> Order:
    """stay [B, N] bool and the places before [B N] -> place, cells, offsets, index, all int32."""
    batch, slots = stay.shape
    flat = stay.flatten()
    running = flat.cumsum(0)
    place = torch.where(flat, running - 1, -1).int()
    offsets = torch.cat([running.new_zeros(1), running[slots - 1 :: slots]]).int()
    # every row that is not live gathers row 0
    target = torch.where(flat, running - 1, batch * slots)
    all_cells = torch.arange(batch * slots, device=stay.device)
    cells = running.new_zeros(batch * slots + 1).scatter(0, target, all_cells)[:-1]
    cells = torch.where(all_cells < running[-1], cells, 0)
    index = torch.where(all_cells < running[-1], before.long()[cells], 0)
    return place, cells.int(), offsets, index.int()


if triton is not None:

    @triton.jit
    def _count_kernel(stay_pointer, counts_pointer, slots, WIDE: tl.constexpr):
        slot = tl.arange(0, WIDE)
        image = tl.program_id(0)
        stay = tl.load(stay_pointer + image * slots + slot, mask=slot < slots, other=0)
        tl.store(counts_pointer + image, tl.sum((stay != 0).to(tl.int32), 0))

    @triton.jit
    def _order_kernel(
        stay_pointer,
        before_pointer,
        counts_pointer,
        place_pointer,
        cells_pointer,
        offsets_pointer,
        index_pointer,
        batch,
        slots,
        WIDE: tl.constexpr,
        IMAGES: tl.constexpr,
        COUNTED: tl.constexpr,
    ):
        image = tl.program_id(0)
        slot = tl.arange(0, WIDE)
        inside = slot < slots
        cell = image * slots + slot
        others = tl.arange(0, IMAGES)
        if COUNTED:
            counts = tl.load(counts_pointer + others, mask=others < batch, other=0)
        else:  # few enough for everyone to count them all
            at = others[:, None] * slots + slot[None, :]
            all_stay = tl.load(stay_pointer + at, mask=(others < batch)[:, None] & inside[None, :], other=0)
            counts = tl.sum((all_stay != 0).to(tl.int32), 1)
        base = tl.sum(tl.where(others < image, counts, 0), 0)
        total = tl.sum(counts, 0)
        stay = tl.load(stay_pointer + cell, mask=inside, other=0) != 0
        row = base + tl.cumsum(stay.to(tl.int32), 0) - 1
        tl.store(place_pointer + cell, tl.where(stay, row, -1), mask=inside)
        tl.store(cells_pointer + row, cell, mask=stay)
        tl.store(index_pointer + row, tl.load(before_pointer + cell, mask=stay, other=0), mask=stay)
        behind = inside & (cell >= total)
        tl.store(cells_pointer + cell, tl.zeros((WIDE,), dtype=tl.int32), mask=behind)
        tl.store(index_pointer + cell, tl.zeros((WIDE,), dtype=tl.int32), mask=behind)
        tl.store(offsets_pointer + image + 1, base + tl.sum(stay.to(tl.int32), 0))
        if image == 0:
            tl.store(offsets_pointer, 0)


@torch.library.custom_op("adaptivit::order", mutates_args=())
def _order(stay: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, slots = stay.shape
    place, cells, index = (before.new_empty(batch * slots) for _ in range(3))
    offsets = before.new_empty(batch + 1)
    flags, wide, images = stay.view(torch.uint8), power_of_two(slots), power_of_two(batch, 1)
    counted = wide * images > 16384
    counts = before.new_empty(batch) if counted else before
    if counted:
        _count_kernel[(batch,)](flags, counts, slots, WIDE=wide)
    _order_kernel[(batch,)](
        *(flags, before, counts, place, cells, offsets, index, batch, slots),
        WIDE=wide,
        IMAGES=images,
        COUNTED=counted,
    )
    return place, cells, offsets, index


@_order.register_fake
def _(stay, before):
    place, cells, index = (before.new_empty(stay.shape[0] * stay.shape[1]) for _ in range(3))
    return place, cells, before.new_empty(stay.shape[0] + 1), index


def order(stay: Tensor, before: Tensor) -> Order:
    """As the reference, with the kernels where they can run."""
    return _order(stay, before) if usable(stay.device) else reference(stay, before)
