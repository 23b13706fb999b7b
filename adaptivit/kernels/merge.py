# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A Merge of a packed batch's rows, and the weights of a merge to size-weighted means.

Shapes: B images, N slots, D width; R rows before, R' after, as in pack_index.py. alive [B, N] bool: tokens that have a
row, which is place [B N]; target [B, N] the slot that each token joins, its own if it stays, -1 if it leaves.

    row'_j = sum of w_i row_i over the alive i with target_i = j      for the alive j with target_j = j

with w the source_weight, in float32, rounded once. A row that is not finite reaches the rows that it joins (as NaN) and
no other. Sizes can be brought to the rows on the way, as the attention kernels take weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import pack_index
from .launch import jit, multiprocessors, operation, pointers, power_of_two, precision, tl, triton, usable
from .pack_index import _pack_image

PIECE = 64  # columns of a program
REGISTERS = 128  # of a thread at most, so that four programs fit on a multiprocessor


class Tile(NamedTuple):
    """How the rows of a merge are divided."""

    m: int  # rows of a tile
    joining: int  # rows that join them at once
    warps: int
    packs: bool  # every program packs its image itself, which saves a launch and repeats work


def tile_for(images: int) -> Tile:
    """Measured on an H200 with 1, 32 and 256 images of 197 tokens (docs/results/log.md)."""
    return Tile(64, 16, 4, images <= 8)


Merged = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def reference(
    rows: Tensor, alive: Tensor, target: Tensor, source_weight: Tensor, place: Tensor, count: int | None = None
) -> Merged:
    """The rows after [R', D], the tokens that stay [B, N], and place, cells, offsets as in pack_index.py."""
    batch, slots = alive.shape
    stay = alive & (target == torch.arange(slots, device=alive.device))
    after, cells, offsets, _ = pack_index.reference(stay, place, count)
    first = torch.arange(batch, device=alive.device)[:, None] * slots
    joined = after[(first + target.clamp_min(0)).flatten()]
    joins = ((alive & (target >= 0)).flatten() & (joined >= 0)).nonzero()[:, 0]
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    moved = wide[place[joins]] * source_weight.flatten()[joins][:, None]
    merged = moved.new_zeros(len(cells), rows.shape[1]).index_add(0, joined[joins], moved)
    return merged.to(rows.dtype), stay, after, cells, offsets


def mean_weights_reference(
    target: Tensor, size: Tensor, alive: Tensor, merge_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """source_weight and the new sizes, [B, N] each, for means weighted by `merge_weight` (default: the sizes)."""
    goes = target.clamp_min(0)
    absent = (target < 0) | ~alive
    size_, weight = (t.masked_fill(absent, 0.0) for t in (size, size if merge_weight is None else merge_weight))
    new_size, whole = (torch.zeros_like(t).scatter_add(1, goes, t) for t in (size_, weight))
    stays = (target == torch.arange(size.shape[1], device=size.device)) & alive
    return weight / whole.gather(1, goes).clamp_min(1e-12), torch.where(stays, new_size, size)


@jit
def _places(index_pointer, own_pointer, start, i, length):
    """Where the i-th rows of an image were, and their own weight."""
    index = tl.load(index_pointer + start + i, mask=i < length, other=0)
    return index, tl.load(own_pointer + start + i, mask=i < length, other=0.0)


@jit
def _joining(rows_pointer, source_pointer, joined_pointer, part_pointer, first_cell, k, number, c, D: tl.constexpr):
    """Of the k-th rows that join another [TL]: the row that each joins, its weight, its columns c [TL, TC] with 0
    for what is not finite (0 times NaN is NaN), and how many that are."""
    known = k < number
    joined = tl.load(joined_pointer + first_cell + k, mask=known, other=-1)
    part = tl.load(part_pointer + first_cell + k, mask=known, other=0.0)
    source = tl.load(source_pointer + first_cell + k, mask=known, other=0).to(tl.int64)
    mask = known[:, None] & (c < D)[None, :]
    y = tl.load(rows_pointer + source[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
    finite = tl.abs(y) < float("inf")
    return joined, part, tl.where(finite, y, 0.0), tl.sum(tl.sum((finite == 0).to(tl.int32), 1), 0)


@jit
def _added(out, row, joined, part, clean, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """Rows [TM, TC] and what joins them, multiplied in as a matrix of weights [TM, TL]; a float32 weight is two
    numbers that the tensor cores take as they are."""
    scale = tl.where(row[:, None] == joined[None, :], part[None, :], 0.0)
    if EXACT:
        out = tl.dot(scale, clean, out, input_precision=PRECISION)
    else:
        high = (scale.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        out = tl.dot(high, clean, out, input_precision="tf32")
        out = tl.dot(scale - high, clean, out, input_precision="tf32")
    return out


@jit
def _spoilt(
    out, row, rows_pointer, source_pointer, joined_pointer, part_pointer, first_cell, number, c, D: tl.constexpr
):
    """NaN where something that is not finite joins; one after the other, which is hardly ever needed."""
    for k in range(number):
        source = tl.load(source_pointer + first_cell + k).to(tl.int64)
        y = tl.load(rows_pointer + source * D + c, mask=c < D, other=0.0).to(tl.float32)
        joined = (row == tl.load(joined_pointer + first_cell + k))[:, None]
        out = tl.where(joined & ((tl.abs(y) < float("inf")) == 0)[None, :], float("nan"), out)
    return out


@jit
def _merge_kernel(
    rows_pointer,  # [R, D]
    out_pointer,  # [R', D]
    stay_pointer,  # as in pack_index.py, to slots and count
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
    PACKS: tl.constexpr,
    D: tl.constexpr,
    TM: tl.constexpr,
    TL: tl.constexpr,
    TC: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One image, TC columns, every so many tiles of TM rows."""
    image = tl.program_id(0)
    offsets_pointer, index_pointer = order[2:]
    own_pointer, source_pointer, joined_pointer, part_pointer, number_pointer = merging[3:]
    if PACKS:  # no other image needs to be looked at: every program finds, and writes, the same
        given = (stay_pointer, before_pointer, counts_pointer, order, merging, sizes)
        start, length, number = _pack_image(image, *given, batch, slots, count, WIDE, IMAGES, EQUAL)
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
    lists = (rows_pointer, source_pointer, joined_pointer, part_pointer, image * slots)
    # mostly all that join, for all rows
    joined, part, clean, spoils = _joining(*lists, tl.arange(0, TL), number, c, D)
    for first in range(begin, length, tl.num_programs(2) * TM):
        i = first + tl.arange(0, TM)
        row = start + i
        mask = (i < length)[:, None] & (c < D)[None, :]
        x = tl.load(rows_pointer + index.to(tl.int64)[:, None] * D + c[None, :], mask=mask, other=0.0)
        out = x.to(tl.float32) * own[:, None]
        index, own = _places(index_pointer, own_pointer, start, i + tl.num_programs(2) * TM, length)  # the next
        if number > 0:
            out = _added(out, row, joined, part, clean, EXACT, PRECISION)
        for other in range(TL, number, TL):
            to, share, more, bad = _joining(*lists, other + tl.arange(0, TL), number, c, D)
            out = _added(out, row, to, share, more, EXACT, PRECISION)
            spoils += bad
        if spoils > 0:
            out = _spoilt(out, row, *lists, number, c, D)
        value = out.to(out_pointer.dtype.element_ty)
        tl.store(out_pointer + row.to(tl.int64)[:, None] * D + c[None, :], value, mask=mask)


@jit
def _mean_weights_kernel(
    target_pointer,  # [B, N]
    size_pointer,  # [B, N]
    alive_pointer,  # [B, N]
    merge_weight_pointer,  # [B, N] or None: the sizes
    source_weight_pointer,  # [B, N]
    new_size_pointer,  # [B, N]
    slots,
    TM: tl.constexpr,
    TN: tl.constexpr,
):
    """Sums by comparing every two tokens of an image: in the same order at every call."""
    cell = tl.program_id(1) * slots
    i = tl.program_id(0) * TM + tl.arange(0, TM)
    target = tl.load(target_pointer + cell + i, mask=i < slots, other=-1).to(tl.int32)
    total = tl.zeros((TM,), dtype=tl.float32)  # of sizes over the tokens that join i
    whole = tl.zeros((TM,), dtype=tl.float32)  # of weights over those with i's target; no sum where that is -1
    for first in range(0, slots, TN):
        j = first + tl.arange(0, TN)
        goes = tl.load(target_pointer + cell + j, mask=j < slots, other=-1).to(tl.int32)
        known = (tl.load(alive_pointer + cell + j, mask=j < slots, other=0) != 0) & (goes >= 0)
        size = tl.load(size_pointer + cell + j, mask=known, other=0.0)
        weight = size
        if merge_weight_pointer is not None:
            weight = tl.load(merge_weight_pointer + cell + j, mask=known, other=0.0)
        total += tl.sum(tl.where(goes[None, :] == i[:, None], size[None, :], 0.0), 1)
        whole += tl.sum(tl.where(goes[None, :] == target[:, None], weight[None, :], 0.0), 1)
    alive = tl.load(alive_pointer + cell + i, mask=i < slots, other=0) != 0
    size = tl.load(size_pointer + cell + i, mask=i < slots, other=0.0)
    weight = size
    if merge_weight_pointer is not None:
        weight = tl.load(merge_weight_pointer + cell + i, mask=i < slots, other=0.0)
    scale = tl.where(alive & (target >= 0), weight / tl.maximum(whole, 1e-12), 0.0)
    tl.store(source_weight_pointer + cell + i, scale, mask=i < slots)
    tl.store(new_size_pointer + cell + i, tl.where(alive & (target == i), total, size), mask=i < slots)


def _outputs(rows, alive, target, source_weight, place, count, size, left):
    """rows after, stay, place, cells, offsets, weight (empty where there are no sizes)."""
    after, cells, offsets, _ = pack_index.outputs(alive, place, count)
    weight = rows.new_empty(0 if size is None else cells.shape[0], dtype=torch.float32)
    return rows.new_empty(cells.shape[0], rows.shape[1]), torch.empty_like(alive), after, cells, offsets, weight


@operation("merge", _outputs)
def _merge(
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    rows: Tensor,
    alive: Tensor,
    target: Tensor,
    source_weight: Tensor,
    place: Tensor,
    count: int | None,
    size: Tensor | None,
    left: Tensor | None,
) -> None:
    merged, stay, after, cells, offsets, weight = out
    (batch, slots), (room, width) = alive.shape, merged.shape
    tile, exact, longest = tile_for(batch), rows.dtype == torch.float32, slots if count is None else count
    own, part = (merged.new_empty(n, dtype=torch.float32) for n in (room, batch * slots))
    source, joined, number = (place.new_empty(n) for n in (batch * slots, batch * slots, batch))
    merging = pack_index.Merging(target, source_weight, stay, own, source, joined, part, number)
    sizes = None if size is None else pack_index.Sizes(size, weight)
    order = (after, cells, offsets, torch.empty_like(cells))
    packing = pack_index.packing(order, alive, place, count, merging, sizes, left)
    packs = tile.packs and (count is not None or left is not None)
    if not packs:
        packing.run()
    across = triton.cdiv(width, PIECE)
    # few images: several programs share the rows of each
    shared = triton.cdiv(4 * multiprocessors(rows.device), batch * across)
    _merge_kernel[(batch, across, max(1, min(triton.cdiv(longest, tile.m), shared)))](
        *(rows, merged, *packing.arguments),
        **packing.constants,
        PACKS=packs,
        D=width,
        TM=tile.m,
        TL=tile.joining,
        TC=PIECE,
        EXACT=exact,
        PRECISION=precision(rows.dtype),
        num_warps=tile.warps,
        **({} if exact or torch.version.hip else {"maxnreg": REGISTERS}),
    )


@operation("mean_weights", lambda target, size, *_: (torch.empty_like(size), torch.empty_like(size)))
def _mean_weights(
    out: tuple[Tensor, Tensor], target: Tensor, size: Tensor, alive: Tensor, merge_weight: Tensor | None
) -> None:
    batch, slots = target.shape
    tall = 8
    _mean_weights_kernel[(triton.cdiv(slots, tall), batch)](
        *pointers(target, size, alive, merge_weight, *out),
        slots,
        TM=tall,
        TN=min(256, power_of_two(slots)),
        num_warps=1,
    )


def merge(
    rows: Tensor,
    alive: Tensor,
    target: Tensor,
    source_weight: Tensor,
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
        return reference(rows, alive, target, source_weight, place, count), None
    size = None if size is None else size.float().contiguous()
    given = (t.contiguous() for t in (alive, target, source_weight.float()))
    merged, stay, after, cells, offsets, weight = _merge(rows, *given, place, count, size, left)
    return (merged, stay, after, cells, offsets), None if size is None else weight


def mean_weights(
    target: Tensor, size: Tensor, alive: Tensor, merge_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As the reference, with the kernel where it can run and no gradient is wanted."""
    if not usable(target.device) or size.dtype != torch.float32 or torch.is_grad_enabled():
        return mean_weights_reference(target, size, alive, merge_weight)
    given = (t if t is None else t.contiguous() for t in (target, size, alive, merge_weight))
    source_weight, new_size = _mean_weights(*given)
    return source_weight, new_size
