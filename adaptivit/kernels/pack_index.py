# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The places of a packed batch's rows, computed on the device from the tokens that stay.

Shapes: B images, N slots, cell = image * N + slot; R rows that there is room for: B n where every image keeps the same
number n of tokens and the host knows it (`count`), B N otherwise.

    place [B N]      the row of each cell, -1 where it has none
    cells [R]        the cell of each row, 0 behind the last live one
    offsets [B + 1]  image b has the rows offsets[b] to offsets[b + 1]; the last is the number of live rows
    index [R]        the row that each of them was before, 0 behind the last live one

A given count is believed: tokens beyond it have no row.

A merge needs more (Merging): a token stays if its target is its own slot, and those that join another are listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch import jit, operation, pointers, power_of_two, tl, usable

Order = tuple[Tensor, Tensor, Tensor, Tensor]  # place, cells, offsets, index


def reference(stay: Tensor, before: Tensor, count: int | None = None) -> Order:
    """stay [B, N] bool and the places before [B N] -> place, cells, offsets, index, all int32."""
    batch, slots = stay.shape
    flat = stay.flatten()
    running = flat.cumsum(0)
    place = torch.where(flat, running - 1, -1).int()
    offsets = torch.cat([running.new_zeros(1), running[slots - 1 :: slots]]).int()
    room = batch * slots if count is None else batch * count
    # every row that is not live gathers row 0
    target = torch.where(flat, running - 1, batch * slots)
    all_cells = torch.arange(batch * slots, device=stay.device)
    cells = running.new_zeros(batch * slots + 1).scatter(0, target, all_cells)[:room]
    live = all_cells[:room] < running[-1]
    cells = torch.where(live, cells, 0)
    index = torch.where(live, before.long()[cells], 0)
    return place, cells.int(), offsets, index.int()


class Merging(NamedTuple):
    """A Merge by token, and as lists for the kernel that adds rows; an image's begin at its first cell."""

    target: Tensor  # [B, N] slot of the token that it joins
    source_weight: Tensor  # [B, N] float32
    stay: Tensor  # [B, N] bool, written, as all below: the target is its own slot
    own: Tensor  # [R] float32: source_weight of each row that stays
    source: Tensor  # [B N] int32: rows that join another
    joined: Tensor  # [B N] int32: the new rows that they join
    part: Tensor  # [B N] float32: their source_weight
    number: Tensor  # [B] int32: how many there are


class Sizes(NamedTuple):
    """The tokens' sizes after a Merge."""

    size: Tensor  # [B, N] float32
    weight: Tensor  # [R] float32, written: its binary logarithm for each row that stays


@jit
def _stays(stay_pointer, target_pointer, cell, slot, inside):
    """Whether tokens stay: stay_pointer says it, or, in a merge, which tokens have a row."""
    stay = tl.load(stay_pointer + cell, mask=inside, other=0) != 0
    if target_pointer is not None:
        stay = stay & (tl.load(target_pointer + cell, mask=inside, other=-1) == slot)
    return stay


@jit
def _count_kernel(
    stay_pointer,  # [B, N]
    target_pointer,  # [B, N] or None
    counts_pointer,  # [B]
    slots,
    WIDE: tl.constexpr,
):
    slot = tl.arange(0, WIDE)
    image = tl.program_id(0)
    stay = _stays(stay_pointer, target_pointer, image * slots + slot, slot, slot < slots)
    tl.store(counts_pointer + image, tl.sum(stay.to(tl.int32), 0))


@jit
def _pack_image(
    image,
    stay_pointer,  # [B, N]
    before_pointer,  # [B N]
    counts_pointer,  # [B] or None
    order,  # place [B N], cells [R], offsets [B + 1], index [R]
    merging,  # as in Merging, or None
    sizes,  # as in Sizes, or None: Triton 3.6 takes no None within a tuple
    batch,
    slots,
    count,
    WIDE: tl.constexpr,
    IMAGES: tl.constexpr,
    EQUAL: tl.constexpr,
):
    """Write the order of one image; its first row, how many it has, and how many join others."""
    place_pointer, cells_pointer, offsets_pointer, index_pointer = order
    target_pointer = None
    if merging is not None:
        target_pointer = merging[0]
    slot = tl.arange(0, WIDE)
    inside = slot < slots
    cell = image * slots + slot
    stay = _stays(stay_pointer, target_pointer, cell, slot, inside)
    rank = tl.cumsum(stay.to(tl.int32), 0) - 1
    if EQUAL:
        base = image * count
        stay = stay & (rank < count)
        stop = base + count
    else:
        others = tl.arange(0, IMAGES)
        if counts_pointer is not None:
            counts = tl.load(counts_pointer + others, mask=others < batch, other=0)
        else:  # few enough for every program to count them all
            at = others[:, None] * slots + slot[None, :]
            known = (others < batch)[:, None] & inside[None, :]
            counts = tl.sum(_stays(stay_pointer, target_pointer, at, slot[None, :], known).to(tl.int32), 1)
        base = tl.sum(tl.where(others < image, counts, 0), 0)
        total = tl.sum(counts, 0)
        stop = base + tl.sum(stay.to(tl.int32), 0)
        behind = inside & (cell >= total)
        tl.store(cells_pointer + cell, tl.zeros((WIDE,), dtype=tl.int32), mask=behind)
        tl.store(index_pointer + cell, tl.zeros((WIDE,), dtype=tl.int32), mask=behind)
    row = base + rank
    place = tl.where(stay, row, -1)
    before = tl.load(before_pointer + cell, mask=inside, other=0)
    tl.store(place_pointer + cell, place, mask=inside)
    tl.store(cells_pointer + row, cell, mask=stay)
    tl.store(index_pointer + row, before, mask=stay)
    tl.store(offsets_pointer + image + 1, stop)
    if image == 0:
        tl.store(offsets_pointer, 0)
    number = 0
    if merging is not None:
        _, scale_pointer, stays_pointer, own_pointer = merging[:4]
        source_pointer, joined_pointer, part_pointer, number_pointer = merging[4:]
        scale = tl.load(scale_pointer + cell, mask=inside, other=0.0)
        tl.store(stays_pointer + cell, stay.to(tl.uint8), mask=inside)
        tl.store(own_pointer + row, scale, mask=stay)
        target = tl.load(target_pointer + cell, mask=inside, other=-1).to(tl.int32)
        known = (target >= 0) & (target < slots)
        joined = tl.gather(place, tl.where(known, target, 0), 0)
        live = tl.load(stay_pointer + cell, mask=inside, other=0) != 0
        joins = live & (stay == 0) & known & (joined >= 0)
        at = image * slots + tl.cumsum(joins.to(tl.int32), 0) - 1
        tl.store(source_pointer + at, before, mask=joins)
        tl.store(joined_pointer + at, joined, mask=joins)
        tl.store(part_pointer + at, scale, mask=joins)
        number = tl.sum(joins.to(tl.int32), 0)
        tl.store(number_pointer + image, number)
        if sizes is not None:
            size = tl.load(sizes[0] + cell, mask=inside, other=1.0)
            tl.store(sizes[1] + row, tl.log2(size), mask=stay)
    return base, stop - base, number


@jit
def _pack_kernel(
    stay_pointer,
    before_pointer,
    counts_pointer,
    order,
    merging,
    sizes,
    batch,
    slots,
    count,
    WIDE: tl.constexpr,
    IMAGES: tl.constexpr,
    EQUAL: tl.constexpr,
):
    given = (stay_pointer, before_pointer, counts_pointer)
    _pack_image(tl.program_id(0), *given, order, merging, sizes, batch, slots, count, WIDE, IMAGES, EQUAL)


@dataclass(frozen=True)
class Packing:
    """What _pack_image takes but for the image."""

    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int

    def run(self) -> None:
        """The kernel by itself, a program an image."""
        _pack_kernel[(len(self.arguments[0]),)](*self.arguments, **self.constants, num_warps=self.warps)


def packing(
    out: Order,
    stay: Tensor,
    before: Tensor,
    count: int | None,
    merging: Merging | None = None,
    sizes: Sizes | None = None,
    left: Tensor | None = None,
) -> Packing:
    """In a merge `stay` says which tokens have a row. `left` [B] int32: how many stay, where it is known."""
    batch, slots = stay.shape
    equal, wide, images = count is not None, power_of_two(slots), power_of_two(batch, 1)
    counts = None if equal else left
    if counts is None and not equal and wide * images > 16384:
        counts = before.new_empty(batch)
        target = None if merging is None else merging.target
        _count_kernel[(batch,)](*pointers(stay, target, counts), slots, WIDE=wide)
    tile = wide * (1 if equal or counts is not None else images)
    lists = (None if merging is None else pointers(*merging), None if sizes is None else tuple(sizes))
    arguments = (*pointers(stay, before, counts), out, *lists, batch, slots, count or 0)
    constants = {"WIDE": wide, "IMAGES": 1 if equal else images, "EQUAL": equal}
    return Packing(arguments, constants, 4 if tile <= 4096 else 8)


def outputs(stay: Tensor, before: Tensor, count: int | None) -> Order:
    """Memory for place, cells, offsets and index."""
    batch, slots = stay.shape
    cells, index = (before.new_empty(batch * (slots if count is None else count)) for _ in range(2))
    return before.new_empty(batch * slots), cells, before.new_empty(batch + 1), index


@operation("pack_index", outputs)
def _pack_index(out: tuple[Tensor, Tensor, Tensor, Tensor], stay: Tensor, before: Tensor, count: int | None) -> None:
    packing(out, stay, before, count).run()


def pack_index(stay: Tensor, before: Tensor, count: int | None = None) -> Order:
    """As the reference, with the kernels where they can run."""
    if not usable(stay.device):
        return reference(stay, before, count)
    place, cells, offsets, index = _pack_index(stay, before, count)
    return place, cells, offsets, index
