# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Who stays, put into a row: the places of a packed batch, on the device.

Shapes: B images, N slots, cell = image * N + slot; R rows that there is room for: B n where every image keeps the same
number n of tokens and the host knows it (`count`), B N otherwise.

    place [B N]      the row of each cell, -1 where it has none
    cells [R]        the cell of each row, 0 behind the last live one
    offsets [B + 1]  image b has the rows offsets[b] to offsets[b + 1]; the last is the number of live rows
    index [R]        the row that each of them was before, 0 behind the last live one

A given count is believed: whoever is too many in an image has no row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .launch import power_of_two, run_on, tl, triton, usable

Order = tuple[Tensor, Tensor, Tensor, Tensor]


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
    there = all_cells[:room] < running[-1]
    cells = torch.where(there, cells, 0)
    index = torch.where(there, before.long()[cells], 0)
    return place, cells.int(), offsets, index.int()


@dataclass(frozen=True)
class Meeting:
    """Who goes where in a Merge, for the kernel that adds the rows up: lists of an image begin at its first cell."""

    live: Tensor  # [B, N] bool: has a row
    into: Tensor  # [B, N] slot of those that it joins
    scale: Tensor  # [B, N] float32
    stay: Tensor  # [B, N] bool, written: into is its own slot
    own: Tensor  # [R] float32, written: scale of each row that stays
    source: Tensor  # [B N] int32, written: rows of those that join another
    target: Tensor  # [B N] int32, written: the new rows that they join
    part: Tensor  # [B N] float32, written: their scale
    number: Tensor  # [B] int32, written: how many there are
    size: Tensor | None = None  # [B, N] float32 of each token from now on
    weight: Tensor | None = None  # [R] float32, written: its binary logarithm for each row that stays


if triton is not None:

    @triton.jit
    def _stays(stay_pointer, into_pointer, cell, slot, inside, MEETS: tl.constexpr):
        stay = tl.load(stay_pointer + cell, mask=inside, other=0) != 0
        if MEETS:
            stay = stay & (tl.load(into_pointer + cell, mask=inside, other=-1) == slot)
        return stay

    @triton.jit
    def _count_kernel(stay_pointer, into_pointer, counts_pointer, slots, WIDE: tl.constexpr, MEETS: tl.constexpr):
        slot = tl.arange(0, WIDE)
        image = tl.program_id(0)
        stay = _stays(stay_pointer, into_pointer, image * slots + slot, slot, slot < slots, MEETS)
        tl.store(counts_pointer + image, tl.sum(stay.to(tl.int32), 0))

    @triton.jit
    def _order_of(
        image,
        stay_pointer,
        before_pointer,
        counts_pointer,
        place_pointer,
        cells_pointer,
        offsets_pointer,
        index_pointer,
        into_pointer,
        scale_pointer,
        stays_pointer,
        own_pointer,
        source_pointer,
        target_pointer,
        part_pointer,
        number_pointer,
        size_pointer,
        weight_pointer,
        batch,
        slots,
        count,
        WIDE: tl.constexpr,
        IMAGES: tl.constexpr,
        COUNTED: tl.constexpr,
        EQUAL: tl.constexpr,
        MEETS: tl.constexpr,
        SIZED: tl.constexpr,
    ):
        """Write the order of one image; its first row, how many it has, and how many join others."""
        slot = tl.arange(0, WIDE)
        inside = slot < slots
        cell = image * slots + slot
        stay = _stays(stay_pointer, into_pointer, cell, slot, inside, MEETS)
        rank = tl.cumsum(stay.to(tl.int32), 0) - 1
        if EQUAL:
            base = image * count
            stay = stay & (rank < count)
            stop = base + count
        else:
            others = tl.arange(0, IMAGES)
            if COUNTED:
                counts = tl.load(counts_pointer + others, mask=others < batch, other=0)
            else:  # few enough for everyone to count them all
                at = others[:, None] * slots + slot[None, :]
                there = (others < batch)[:, None] & inside[None, :]
                counts = tl.sum(_stays(stay_pointer, into_pointer, at, slot[None, :], there, MEETS).to(tl.int32), 1)
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
        if MEETS:
            scale = tl.load(scale_pointer + cell, mask=inside, other=0.0)
            tl.store(stays_pointer + cell, stay.to(tl.uint8), mask=inside)
            tl.store(own_pointer + row, scale, mask=stay)
            into = tl.load(into_pointer + cell, mask=inside, other=-1).to(tl.int32)
            known = (into >= 0) & (into < slots)
            target = tl.gather(place, tl.where(known, into, 0), 0)
            live = tl.load(stay_pointer + cell, mask=inside, other=0) != 0
            joins = live & (stay == 0) & known & (target >= 0)
            at = image * slots + tl.cumsum(joins.to(tl.int32), 0) - 1
            tl.store(source_pointer + at, before, mask=joins)
            tl.store(target_pointer + at, target, mask=joins)
            tl.store(part_pointer + at, scale, mask=joins)
            number = tl.sum(joins.to(tl.int32), 0)
            tl.store(number_pointer + image, number)
            if SIZED:
                size = tl.load(size_pointer + cell, mask=inside, other=1.0)
                tl.store(weight_pointer + row, tl.log2(size), mask=stay)
        return base, stop - base, number

    @triton.jit
    def _order_kernel(
        stay_pointer,
        before_pointer,
        counts_pointer,
        place_pointer,
        cells_pointer,
        offsets_pointer,
        index_pointer,
        into_pointer,
        scale_pointer,
        stays_pointer,
        own_pointer,
        source_pointer,
        target_pointer,
        part_pointer,
        number_pointer,
        size_pointer,
        weight_pointer,
        batch,
        slots,
        count,
        WIDE: tl.constexpr,
        IMAGES: tl.constexpr,
        COUNTED: tl.constexpr,
        EQUAL: tl.constexpr,
        MEETS: tl.constexpr,
        SIZED: tl.constexpr,
    ):
        _order_of(
            *(tl.program_id(0), stay_pointer, before_pointer, counts_pointer, place_pointer, cells_pointer),
            *(offsets_pointer, index_pointer, into_pointer, scale_pointer, stays_pointer, own_pointer, source_pointer),
            *(target_pointer, part_pointer, number_pointer, size_pointer, weight_pointer, batch, slots, count),
            *(WIDE, IMAGES, COUNTED, EQUAL, MEETS, SIZED),
        )


@dataclass(frozen=True)
class Call:
    """What _order_of is given but for the image, and what it writes."""

    made: Order
    given: tuple[Any, ...]
    sizes: dict[str, Any]
    warps: int


def call(
    stay: Tensor, before: Tensor, count: int | None, meeting: Meeting | None = None, left: Tensor | None = None
) -> Call:
    """With a meeting, `stay` says who is live, and who stays follows from where the others go; `left` [B] int32 is how
    many that are, where it is known."""
    batch, slots = stay.shape
    equal, meets = count is not None, meeting is not None
    place, offsets = before.new_empty(batch * slots), before.new_empty(batch + 1)
    cells, index = (before.new_empty(batch * (slots if count is None else count)) for _ in range(2))
    flags, wide, images = stay.view(torch.uint8), power_of_two(slots), power_of_two(batch, 1)
    counted = not equal and (left is not None or wide * images > 16384)
    tile = wide * (1 if equal or counted else images)
    counts = before if not counted else before.new_empty(batch) if left is None else left
    lists = [before] * 10
    if meeting is not None:
        m = meeting
        lists = [m.into, m.scale, m.stay.view(torch.uint8), m.own, m.source, m.target, m.part, m.number]
        lists += [before if t is None else t for t in (m.size, m.weight)]
    if counted and left is None:
        _count_kernel[(batch,)](flags, lists[0], counts, slots, WIDE=wide, MEETS=meets)
    sizes = {"WIDE": wide, "IMAGES": 1 if equal else images, "COUNTED": counted, "EQUAL": equal, "MEETS": meets}
    sizes["SIZED"] = meeting is not None and meeting.size is not None
    given = (flags, before, counts, place, cells, offsets, index, *lists, batch, slots, count or 0)
    return Call((place, cells, offsets, index), given, sizes, 4 if tile <= 4096 else 8)


def arrange(order: Call) -> Order:
    """The kernel."""
    _order_kernel[(len(order.made[2]) - 1,)](*order.given, **order.sizes, num_warps=order.warps)
    return order.made


@torch.library.custom_op("adaptivit::order", mutates_args=())
def _order(stay: Tensor, before: Tensor, count: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return arrange(call(stay, before, count))


@_order.register_fake
def _(stay, before, count):
    batch, slots = stay.shape
    cells, index = (before.new_empty(batch * (slots if count is None else count)) for _ in range(2))
    return before.new_empty(batch * slots), cells, before.new_empty(batch + 1), index


_kept: dict[tuple[Any, ...], Tensor] = {}
KEPT = 64  # so many; others are made in every pass


def _constant(like: Tensor, key: tuple[Any, ...], make: Callable[[], Tensor], now: Callable[[], Tensor]) -> Tensor:
    """What `make` gives, made once and kept for good, since a CUDA graph reads it where it is; not to be written to.
    Not while something is traced or recorded, when it would not be a tensor that holds it: then what `now` gives."""
    if key in _kept:
        return _kept[key]
    passing = torch.compiler.is_compiling() or (like.is_cuda and torch.cuda.is_current_stream_capturing())
    if passing or type(like) not in (Tensor, Parameter) or len(_kept) >= KEPT:
        return now()
    with torch.inference_mode(False):
        made = make()
    if type(made) is Tensor:
        _kept[key] = made
    return made


@torch.library.custom_op("adaptivit::steps", mutates_args=())
def _steps(like: Tensor, stop: int, step: int) -> Tensor:
    """An operation of its own, since torch.compile would write a plain arange anew for each of its readers."""
    return torch.arange(0, stop, step, device=like.device, dtype=torch.int32)


@_steps.register_fake
def _(like, stop, step):
    return like.new_empty(-(-stop // step), dtype=torch.int32)


def steps(like: Tensor, stop: int, step: int) -> Tensor:
    """[stop / step] 0, step, 2 step ..., int32, not to be written to."""
    made = functools.partial(torch.arange, 0, stop, step, device=like.device, dtype=torch.int32)
    return _constant(like, (like.device, stop, step), made, functools.partial(_steps, like, stop, step))


def filled(like: Tensor, shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
    """One value everywhere, not to be written to; kept where kernels of ours read it."""
    made = functools.partial(torch.full, tuple(shape), value, dtype=dtype, device=like.device)
    return _constant(like, (like.device, *shape, value, dtype), made, made) if run_on(like) else made()


if triton is not None:

    @triton.jit
    def _stack_kernel(masks, out_pointer, cells, TILE: tl.constexpr):
        """A program copies a part of one of them."""
        which = tl.program_id(1)
        source = masks[0]
        for n in tl.static_range(1, len(masks)):
            if which == n:
                source = masks[n]
        cell = tl.program_id(0) * TILE + tl.arange(0, TILE)
        value = tl.load(source + cell, mask=cell < cells, other=0)
        tl.store(out_pointer + which.to(tl.int64) * cells + cell, value, mask=cell < cells)


@torch.library.custom_op("adaptivit::stacked", mutates_args=())
def _stacked(masks: Sequence[Tensor]) -> Tensor:
    out = torch.empty(len(masks), *masks[0].shape, dtype=torch.bool, device=masks[0].device)
    cells = masks[0].numel()
    if out.numel():
        given = tuple(mask.contiguous().view(torch.uint8) for mask in masks)
        _stack_kernel[(triton.cdiv(cells, 1024), len(masks))](given, out.view(torch.uint8), cells, TILE=1024)
    return out


@_stacked.register_fake
def _(masks):
    return masks[0].new_empty(len(masks), *masks[0].shape)


def stacked(masks: Sequence[Tensor]) -> Tensor:
    """torch.stack of masks in one launch, where they come from kernels of ours: torch.compile would copy each by
    itself, as soon as it is there (and where it has made them, it writes the copy with them)."""
    plain = not run_on(masks[0]) or any(mask.dtype != torch.bool for mask in masks)
    return torch.stack(list(masks)) if plain else _stacked(masks)


@torch.library.custom_op("adaptivit::joined", mutates_args=())
def _joined(masks: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(masks))


@_joined.register_fake
def _(masks):
    return masks[0].new_empty(sum(len(m) for m in masks), *masks[0].shape[1:])


def joined(masks: Sequence[Tensor]) -> Tensor:
    """torch.cat in one launch; see stacked."""
    return _joined(masks) if run_on(masks[0]) else torch.cat(list(masks))


def order(stay: Tensor, before: Tensor, count: int | None = None) -> Order:
    """As the reference, with the kernels where they can run."""
    return _order(stay, before, count) if usable(stay.device) else reference(stay, before, count)
