# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rows that meet: what a Merge says, carried out on a packed batch, and what it says where sizes add.

Shapes: B images, N slots, D width; R rows before, R' after, as in compact.py. live [B, N] bool: who has a row, which is
place [B N]; into [B, N] the slot that each token goes to, its own if it stays, -1 if it leaves and joins nobody.

    row'_j = sum of scale_i row_i over the live i with into_i = j      for the live j with into_j = j

in float32, rounded once. A row that is not finite reaches those that it joins (as NaN) and nobody else. Sizes can
be brought to the rows on the way, as the attention kernels take weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import pack_index
from .launch import multiprocessors, power_of_two, precision, tl, triton, usable

if triton is not None:
    from .pack_index import _order_of

PIECE = 64  # columns of a program
REGISTERS = 128  # of a thread at most, so that four programs fit on a multiprocessor


@dataclass(frozen=True)
class Tile:
    """Rows of a tile, those that join them at once, warps, and whether every program finds the order of its image
    itself, which saves a launch, and is work done several times over."""

    m: int
    joining: int
    warps: int
    orders: bool


def tile_for(images: int) -> Tile:
    """Measured on an H200 with 1, 32 and 256 images of 197 tokens (benchmarks/LOG.md)."""
    return Tile(64, 16, 4, images <= 8)


Merged = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def reference(
    rows: Tensor, live: Tensor, into: Tensor, scale: Tensor, place: Tensor, count: int | None = None
) -> Merged:
    """The rows after [R', D], who stays [B, N], and place, cells, offsets as in compact.py."""
    batch, slots = live.shape
    slot = torch.arange(slots, device=live.device)
    stay = live & (into == slot)
    after, cells, offsets, _ = pack_index.reference(stay, place, count)
    first = torch.arange(batch, device=live.device)[:, None] * slots
    target = after[(first + into.clamp_min(0)).flatten()]
    joins = ((live & (into >= 0)).flatten() & (target >= 0)).nonzero()[:, 0]
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    moved = wide[place[joins]] * scale.flatten()[joins][:, None]
    met = moved.new_zeros(len(cells), rows.shape[1]).index_add(0, target[joins], moved)
    return met.to(rows.dtype), stay, after, cells, offsets


def reference_join(
    into: Tensor, size: Tensor, present: Tensor, merge_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """source_weight and the new sizes, [B, N] each, for means weighted by `merge_weight` (default: the sizes)."""
    goes = into.clamp_min(0)
    nobody = (into < 0) | ~present
    brought, part = (t.masked_fill(nobody, 0.0) for t in (size, size if merge_weight is None else merge_weight))
    total, whole = (torch.zeros_like(t).scatter_add(1, goes, t) for t in (brought, part))
    scale = part / whole.gather(1, goes).clamp_min(1e-12)
    stays = into == torch.arange(size.shape[1], device=size.device)
    return scale, torch.where(stays & present, total, size)


if triton is not None:

    @triton.jit
    def _places(index_pointer, own_pointer, start, i, length):
        """Where the i-th rows of an image were, and their own scale."""
        index = tl.load(index_pointer + start + i, mask=i < length, other=0)
        return index, tl.load(own_pointer + start + i, mask=i < length, other=0.0)

    @triton.jit
    def _joining(rows_pointer, source_pointer, target_pointer, part_pointer, first_cell, k, number, c, D: tl.constexpr):
        """Of the k-th of those that join [TL]: the row that each joins, its scale, columns c [TL, TC] of its own with 0
        for what is not finite (0 times NaN is NaN), and how many that are."""
        there = k < number
        target = tl.load(target_pointer + first_cell + k, mask=there, other=-1)
        part = tl.load(part_pointer + first_cell + k, mask=there, other=0.0)
        source = tl.load(source_pointer + first_cell + k, mask=there, other=0).to(tl.int64)
        mask = there[:, None] & (c < D)[None, :]
        y = tl.load(rows_pointer + source[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        finite = tl.abs(y) < float("inf")
        return target, part, tl.where(finite, y, 0.0), tl.sum(tl.sum((finite == 0).to(tl.int32), 1), 0)

    @triton.jit
    def _added(out, row, target, part, clean, EXACT: tl.constexpr, PRECISION: tl.constexpr):
        """Rows [TM, TC] and what joins them, multiplied in as a matrix of scales [TM, TL]; a float32 scale is two
        numbers that the tensor cores take as they are."""
        scale = tl.where(row[:, None] == target[None, :], part[None, :], 0.0)
        if EXACT:
            out = tl.dot(scale, clean, out, input_precision=PRECISION)
        else:
            high = (scale.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            out = tl.dot(high, clean, out, input_precision="tf32")
            out = tl.dot(scale - high, clean, out, input_precision="tf32")
        return out

    @triton.jit
    def _spoilt(
        out, row, rows_pointer, source_pointer, target_pointer, part_pointer, first_cell, number, c, D: tl.constexpr
    ):
        """NaN where something that is not finite joins; one after the other, which is hardly ever needed."""
        for k in range(number):
            source = tl.load(source_pointer + first_cell + k).to(tl.int64)
            y = tl.load(rows_pointer + source * D + c, mask=c < D, other=0.0).to(tl.float32)
            joined = (row == tl.load(target_pointer + first_cell + k))[:, None]
            out = tl.where(joined & ((tl.abs(y) < float("inf")) == 0)[None, :], float("nan"), out)
        return out

    @triton.jit
    def _merge_kernel(
        rows_pointer,
        out_pointer,
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
        ORDERS: tl.constexpr,
        D: tl.constexpr,
        TM: tl.constexpr,
        TL: tl.constexpr,
        TC: tl.constexpr,
        EXACT: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """One image, TC columns, every so many tiles of TM rows."""
        image = tl.program_id(0)
        if ORDERS:  # no other image needs to be looked at: every program finds, and writes, the same
            start, length, number = _order_of(
                *(image, stay_pointer, before_pointer, counts_pointer, place_pointer, cells_pointer, offsets_pointer),
                *(index_pointer, into_pointer, scale_pointer, stays_pointer, own_pointer, source_pointer),
                *(target_pointer, part_pointer, number_pointer, size_pointer, weight_pointer, batch, slots, count),
                *(WIDE, IMAGES, COUNTED, EQUAL, MEETS, SIZED),
            )
            tl.debug_barrier()  # what was written is read by other threads from here on
        else:
            start, length = image * count, count
            if not EQUAL:
                start = tl.load(offsets_pointer + image)
                length = tl.load(offsets_pointer + image + 1) - start
            number = tl.load(number_pointer + image)
        c = tl.program_id(1) * TC + tl.arange(0, TC)
        begin = tl.program_id(2) * TM
        index, own = _places(index_pointer, own_pointer, start, begin + tl.arange(0, TM), length)
        lists = (rows_pointer, source_pointer, target_pointer, part_pointer, image * slots)
        # mostly all that join, for all rows
        target, part, clean, spoils = _joining(*lists, tl.arange(0, TL), number, c, D)
        for first in range(begin, length, tl.num_programs(2) * TM):
            i = first + tl.arange(0, TM)
            row = start + i
            there = i < length
            mask = there[:, None] & (c < D)[None, :]
            x = tl.load(rows_pointer + index.to(tl.int64)[:, None] * D + c[None, :], mask=mask, other=0.0)
            out = x.to(tl.float32) * own[:, None]
            index, own = _places(index_pointer, own_pointer, start, i + tl.num_programs(2) * TM, length)  # the next
            if number > 0:
                out = _added(out, row, target, part, clean, EXACT, PRECISION)
            for other in range(TL, number, TL):
                to, share, more, bad = _joining(*lists, other + tl.arange(0, TL), number, c, D)
                out = _added(out, row, to, share, more, EXACT, PRECISION)
                spoils += bad
            if spoils > 0:
                out = _spoilt(out, row, *lists, number, c, D)
            value = out.to(out_pointer.dtype.element_ty)
            tl.store(out_pointer + row.to(tl.int64)[:, None] * D + c[None, :], value, mask=mask)

    @triton.jit
    def _join_kernel(
        into_pointer,
        size_pointer,
        present_pointer,
        merge_weight_pointer,
        scale_pointer,
        after_pointer,
        slots,
        TM: tl.constexpr,
        TN: tl.constexpr,
        SAYS: tl.constexpr,
    ):
        """Sums by comparing everybody with everybody of the image: in the same order at every call."""
        cell = tl.program_id(1) * slots
        i = tl.program_id(0) * TM + tl.arange(0, TM)
        into = tl.load(into_pointer + cell + i, mask=i < slots, other=-1).to(tl.int32)
        total = tl.zeros((TM,), dtype=tl.float32)  # of those that come to i
        whole = tl.zeros((TM,), dtype=tl.float32)  # of those that go where i goes
        for first in range(0, slots, TN):
            j = first + tl.arange(0, TN)
            goes = tl.load(into_pointer + cell + j, mask=j < slots, other=-1).to(tl.int32)
            there = tl.load(present_pointer + cell + j, mask=j < slots, other=0) != 0
            there = there & (goes >= 0)
            size = tl.load(size_pointer + cell + j, mask=there, other=0.0)
            merge_weight = size
            if SAYS:
                merge_weight = tl.load(merge_weight_pointer + cell + j, mask=there, other=0.0)
            total += tl.sum(tl.where(goes[None, :] == i[:, None], size[None, :], 0.0), 1)
            # whoever goes nowhere has brought nothing, so that all those are no sum
            whole += tl.sum(tl.where(goes[None, :] == into[:, None], merge_weight[None, :], 0.0), 1)
        present = tl.load(present_pointer + cell + i, mask=i < slots, other=0) != 0
        size = tl.load(size_pointer + cell + i, mask=i < slots, other=0.0)
        merge_weight = size
        if SAYS:
            merge_weight = tl.load(merge_weight_pointer + cell + i, mask=i < slots, other=0.0)
        scale = tl.where(present & (into >= 0), merge_weight / tl.maximum(whole, 1e-12), 0.0)
        tl.store(scale_pointer + cell + i, scale, mask=i < slots)
        tl.store(after_pointer + cell + i, tl.where(present & (into == i), total, size), mask=i < slots)


@torch.library.custom_op("adaptivit::merge", mutates_args=())
def _merge(
    rows: Tensor,
    live: Tensor,
    into: Tensor,
    scale: Tensor,
    place: Tensor,
    count: int | None,
    size: Tensor | None,
    left: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The kernel; weights are empty where there are no sizes."""
    batch, slots = live.shape
    tile, longest = tile_for(batch), slots if count is None else count
    room, width, tall, exact = batch * longest, rows.shape[1], tile.m, rows.dtype == torch.float32
    stay = torch.empty_like(live)
    out = torch.empty(room, width, dtype=rows.dtype, device=rows.device)
    own = torch.empty(room, dtype=torch.float32, device=rows.device)
    source, target = (place.new_empty(batch * slots) for _ in range(2))
    part, number = torch.empty(batch * slots, dtype=torch.float32, device=rows.device), place.new_empty(batch)
    weight = torch.empty(0 if size is None else room, dtype=torch.float32, device=rows.device)
    meeting = pack_index.Meeting(live, into, scale, stay, own, source, target, part, number, size, weight)
    order = pack_index.call(live, place, count, meeting, left)
    alone = not tile.orders or (count is None and left is None)
    after, cells, offsets, _ = pack_index.arrange(order) if alone else order.made
    across = triton.cdiv(width, PIECE)
    # few images: several programs share the rows of each
    shared = triton.cdiv(4 * multiprocessors(rows.device), batch * across)
    _merge_kernel[(batch, across, max(1, min(triton.cdiv(longest, tall), shared)))](
        *(rows, out, *order.given),
        **order.sizes,
        ORDERS=not alone,
        D=width,
        TM=tall,
        TL=tile.joining,
        TC=PIECE,
        EXACT=exact,
        PRECISION=precision(rows.dtype),
        num_warps=tile.warps,
        **({} if exact or torch.version.hip else {"maxnreg": REGISTERS}),
    )
    return out, stay, after, cells, offsets, weight


@_merge.register_fake
def _(rows, live, into, scale, place, count, size, left):
    batch, slots = live.shape
    room = batch * (slots if count is None else count)
    out, stay = rows.new_empty(room, rows.shape[1]), torch.empty_like(live)
    weight = rows.new_empty(0 if size is None else room, dtype=torch.float32)
    return out, stay, place.new_empty(batch * slots), place.new_empty(room), place.new_empty(batch + 1), weight


@torch.library.custom_op("adaptivit::join", mutates_args=())
def _join(into: Tensor, size: Tensor, present: Tensor, merge_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, slots = into.shape
    scale, after = torch.empty_like(size), torch.empty_like(size)
    tall = 8
    _join_kernel[(triton.cdiv(slots, tall), batch)](
        *(into, size, present.view(torch.uint8), size if merge_weight is None else merge_weight, scale, after, slots),
        TM=tall,
        TN=min(256, power_of_two(slots)),
        SAYS=merge_weight is not None,
        num_warps=1,
    )
    return scale, after


@_join.register_fake
def _(into, size, present, merge_weight):
    return torch.empty_like(size), torch.empty_like(size)


def merge(
    rows: Tensor,
    live: Tensor,
    into: Tensor,
    scale: Tensor,
    place: Tensor,
    count: int | None = None,
    size: Tensor | None = None,
    left: Tensor | None = None,
) -> tuple[Merged, Tensor | None]:
    """As the reference, with the kernels where they can run; rows behind the last live one are not written.

    With `size` [B, N] the kernel also gives its binary logarithm for every row [R'], else None. `left` [B] int32: how
    many tokens stay in every image, where that is known, so that they need no counting.
    """
    if not usable(rows.device) or rows.dtype == torch.float64:
        return reference(rows, live, into, scale, place, count), None
    size = None if size is None else size.float().contiguous()
    given = (t.contiguous() for t in (live, into, scale.float()))
    *merged, weight = _merge(rows, *given, place, count, size, left)
    out, stay, after, cells, offsets = merged
    return (out, stay, after, cells, offsets), None if size is None else weight


def join(into: Tensor, size: Tensor, present: Tensor, merge_weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As the reference, with the kernel where it can run and no gradient is wanted."""
    if not usable(into.device) or size.dtype != torch.float32 or torch.is_grad_enabled():
        return reference_join(into, size, present, merge_weight)
    return _join(
        *(t.contiguous() for t in (into, size, present)), None if merge_weight is None else merge_weight.contiguous()
    )
