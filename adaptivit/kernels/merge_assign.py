# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Patches that leave fold into their likeness: whom each joins, what is its part in the mean, what sizes come of it.

Shapes: B images, N slots; all [B, N]. units [B N, 2, d] as in similar.py; here: who takes part; patches: who may leave
and be joined; leaving, or score and count: all patches but the `count` with the highest score leave (select.py). Score
and merge_weight may be found on the way (worth.py).

    into   of a leaving patch that is here the most similar patch here that stays, of equals the first; -1 where there
           is none, and of others that leave; of whoever does not leave the own slot
    scale  say_i / sum of merge_weight over those that go where i goes; 0 for whoever goes nowhere or is not here
    size'  of who stays the sum of the sizes of those that come, its own included

One program an image does all of it: those that leave are few, and are gathered into one tile, whose cosines with
everybody are in registers. With few images its time is that of a chain of waits, so that they are few: everybody is
ranked by one comparison of whole numbers each (_key), and counted up across threads once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import nearest_token
from .launch import power_of_two, tl, triton, usable
from .merge_score import MergeScore

if triton is not None:
    from .merge_score import _merge_weight, _score
    from .nearest_token import _cosines, _unit


Left = tuple[Tensor, Tensor]  # of those who are here [B, N] bool, how many are left in every image [B] int32


class MergeAssignment(NamedTuple):
    target: Tensor  # [B, N] long
    source_weight: Tensor  # [B, N]
    size: Tensor  # [B, N] afterwards
    left_counts: Left | None = None  # where the kernel has counted them


def reference(units: Tensor, leaving: Tensor, patches: Tensor, here: Tensor) -> Tensor:
    """into; for who leaves, scale and size' see the references of select.py and merge.py."""
    _, slot = nearest_token.nearest_reference(units, patches & ~leaving, here)
    own = torch.arange(here.shape[1], device=here.device).expand_as(here)
    return torch.where(leaving, torch.where(patches, slot, -1), own)


if triton is not None:

    @triton.jit
    def _meet_kernel(
        units_pointer,
        patches_pointer,
        here_pointer,
        leaving_pointer,
        score_pointer,  # with WORTH: attention seen
        alike_pointer,
        size_pointer,
        merge_weight_pointer,
        into_pointer,
        scale_pointer,
        after_pointer,
        left_pointer,
        list_pointer,  # [B, N] room for the slots of those that leave
        slots,
        count,
        power,
        value,
        d: tl.constexpr,
        WIDE: tl.constexpr,
        ALL: tl.constexpr,  # slots, rounded up
        TM: tl.constexpr,  # of those that leave
        TN: tl.constexpr,  # of those that they may join
        PART: tl.constexpr,  # of those that everybody is compared with at once
        RANKED: tl.constexpr,
        SUMS: tl.constexpr,
        SAYS: tl.constexpr,
        WORTH: tl.constexpr,
        LIKENESS: tl.constexpr,
        POWER_HALF: tl.constexpr,
        VALUE_HALF: tl.constexpr,
    ):
        first_cell = tl.program_id(0).to(tl.int64) * slots
        units_pointer += first_cell * (2 * d)
        slot = tl.arange(0, ALL)
        inside = slot < slots
        cell = first_cell + slot
        patch = tl.load(patches_pointer + cell, mask=inside, other=0) != 0
        here = tl.load(here_pointer + cell, mask=inside, other=0) != 0
        if RANKED:
            score = tl.load(score_pointer + cell, mask=inside, other=0.0)
            if WORTH:
                alike = score
                if LIKENESS:
                    alike = tl.load(alike_pointer + cell, mask=inside, other=0.0)
                score = _score(score, alike, power, LIKENESS, POWER_HALF)
            leaves = patch & (_above(score, patch, into_pointer + first_cell, slot, slots, ALL, PART) >= count)
        else:
            leaves = tl.load(leaving_pointer + cell, mask=inside, other=0) != 0
        asks = leaves & patch & here
        number = tl.sum(asks.to(tl.int32), 0)
        tl.store(left_pointer + tl.program_id(0), tl.sum((here & (leaves == 0)).to(tl.int32), 0))
        tl.store(list_pointer + first_cell + tl.cumsum(asks.to(tl.int32), 0) - 1, slot, mask=asks)
        tl.store(into_pointer + cell, tl.where(leaves, -1, slot).to(tl.int64), mask=inside)
        stays = (patch & here & (leaves == 0)).to(tl.int32)
        total = tl.zeros((ALL,), dtype=tl.float32)  # of sizes that come to each
        whole = tl.zeros((ALL,), dtype=tl.float32)  # of what they merge_weight
        tl.debug_barrier()  # what was written is read by other threads from here on
        for first in range(0, number, TM):
            nth = first + tl.arange(0, TM)
            real = nth < number
            who = tl.load(list_pointer + first_cell + nth, mask=real, other=0)
            high, low = _unit(units_pointer, who, real, d, WIDE)
            top = tl.full((TM, TN), float("-inf"), dtype=tl.float32)
            whose = tl.full((TM, TN), -1, dtype=tl.int32)
            for other in range(0, slots, TN):
                rival = other + tl.arange(0, TN)
                allowed = (tl.gather(stays, tl.minimum(rival, ALL - 1), 0) != 0) & (rival < slots)
                s = _cosines(units_pointer, high, low, rival, allowed, d, WIDE)
                better = (s > top) & allowed[None, :]
                top = tl.where(better, s, top)
                whose = tl.where(better, rival[None, :], whose)
            best = tl.max(top, 1)
            winner = tl.min(tl.where((top == best[:, None]) & (whose >= 0), whose, 2147483647), 1)
            winner = tl.where(real & (best > float("-inf")), winner, -1)
            tl.store(into_pointer + first_cell + who, winner.to(tl.int64), mask=real)
            if SUMS:  # by comparing everybody with everybody: in the same order at every call
                hit = winner[:, None] == slot[None, :]
                brought = tl.load(size_pointer + first_cell + who, mask=real, other=0.0)
                total += tl.sum(tl.where(hit, brought[:, None], 0.0), 0)
                if SAYS:
                    if WORTH:
                        seen = tl.load(score_pointer + first_cell + who, mask=real, other=0.0)
                        said = tl.where(real, _merge_weight(seen, brought, value, VALUE_HALF), 0.0)
                    else:
                        said = tl.load(merge_weight_pointer + first_cell + who, mask=real, other=0.0)
                    whole += tl.sum(tl.where(hit, said[:, None], 0.0), 0)
        if SUMS:
            tl.debug_barrier()
            into = tl.load(into_pointer + cell, mask=inside, other=-1).to(tl.int32)
            size = tl.load(size_pointer + cell, mask=inside, other=0.0)
            merge_weight = size
            if SAYS:
                if WORTH:
                    merge_weight = _merge_weight(
                        tl.load(score_pointer + cell, mask=inside, other=0.0), size, value, VALUE_HALF
                    )
                else:
                    merge_weight = tl.load(merge_weight_pointer + cell, mask=inside, other=0.0)
                there = tl.gather(whole + merge_weight, tl.maximum(into, 0), 0)
            else:
                there = tl.gather(total + size, tl.maximum(into, 0), 0)
            scale = tl.where(here & (into >= 0), merge_weight / tl.maximum(there, 1e-12), 0.0)
            tl.store(scale_pointer + cell, scale, mask=inside)
            tl.store(after_pointer + cell, tl.where(here & (into == slot), total + size, size), mask=inside)

    @triton.jit
    def _key(score, there, slot):
        """Whole numbers that are in the order of the scores, NaN above all, of equals the first slot above the others;
        whoever is not there is below."""
        bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # 0 and -0 are equal
        rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        rank = tl.where(score != score, 0x7FFFFFFF, rank).to(tl.int64)
        return tl.where(there, rank * 4294967296 + (0x7FFFFFFF - slot), -0x8000000000000000)

    @triton.jit
    def _above(score, there, room_pointer, slot, slots, ALL: tl.constexpr, PART: tl.constexpr):
        """[ALL] how many of them are above each of those that are there (select.py). room_pointer [slots] int64 is
        written to."""
        mine = _key(score, there, slot)
        tl.store(room_pointer + slot, mine, mask=slot < slots)
        tl.debug_barrier()  # what was written is read by other threads from here on
        above = tl.zeros((ALL, PART), dtype=tl.int32)
        for first in range(0, slots, PART):
            j = first + tl.arange(0, PART)
            other = tl.load(room_pointer + j, mask=j < slots, other=-0x8000000000000000)
            above += (other[None, :] > mine[:, None]).to(tl.int32)
        tl.debug_barrier()  # and is written to again
        return tl.sum(above, 1)


@dataclass(frozen=True)
class Tile:
    """Those that leave, those that they may join, those that everybody is compared with at once; warps."""

    m: int
    n: int
    part: int
    warps: int


def tile_for(every: int, images: int, wide: int) -> Tile:
    """By the slots, how many programs there are, and the width of a head, slots and width rounded up; measured on an
    H200 with 1, 32 and 256 images of 197 tokens (benchmarks/LOG.md), more tokens were not timed. Wider heads take more
    shared memory."""
    if every <= 256:
        return Tile(16, 128 if wide <= 64 else 64, 32, 8) if images <= 128 else Tile(16, 64, 16, 4)
    return Tile(16, 64, max(8, 8192 // every), 8 if every <= 512 else 16)


@torch.library.custom_op("adaptivit::meet", mutates_args=())
def _meet(
    units: Tensor,
    patches: Tensor,
    here: Tensor,
    leaving: Tensor | None,
    score: Tensor | None,
    count: int,
    size: Tensor | None,
    merge_weight: Tensor | None,
    alike: Tensor | None = None,
    power: float | None = None,
    value: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel; without sizes `into` and how many are left alone, and two empty tensors. With power and value, of a
    Worth, score is the attention that was seen."""
    batch, slots = here.shape
    width, every = units.shape[-1], power_of_two(slots)
    tile = tile_for(every, batch, power_of_two(width))
    into = torch.empty(batch, slots, dtype=torch.long, device=here.device)
    scale, after = (here.new_empty(here.shape if size is not None else (0,), dtype=torch.float32) for _ in range(2))
    left = torch.empty(batch, dtype=torch.int32, device=here.device)
    flags = [t.view(torch.uint8) for t in (patches, here, patches if leaving is None else leaving)]
    numbers = [after if t is None else t for t in (score, alike, size, merge_weight)]
    worth = power is not None
    if into.numel():
        _meet_kernel[(batch,)](
            *(units, *flags, *numbers, into, scale, after, left, torch.empty_like(into, dtype=torch.int32)),
            *(slots, count, power or 0.0, value),
            d=width,
            WIDE=power_of_two(width),
            ALL=every,
            TM=tile.m,
            TN=tile.n,
            PART=tile.part,
            RANKED=leaving is None,
            SUMS=size is not None,
            SAYS=merge_weight is not None or worth,
            WORTH=worth,
            LIKENESS=alike is not None,
            POWER_HALF=power == 0.5,
            VALUE_HALF=value == 0.5,
            num_warps=tile.warps,
        )
    return into, scale, after, left


@_meet.register_fake
def _(units, patches, here, leaving, score, count, size, merge_weight, alike=None, power=None, value=0.5):
    into = here.new_empty(here.shape, dtype=torch.long)
    shape = here.shape if size is not None else (0,)
    scale, after = (here.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return into, scale, after, here.new_empty(here.shape[0], dtype=torch.int32)


def targets(units: Tensor, leaving: Tensor, patches: Tensor, here: Tensor) -> Tensor:
    """into alone, as the reference."""
    if not usable(here.device):
        return reference(units, leaving, patches, here)
    return _meet(units, *(t.contiguous() for t in (patches, here, leaving)), None, 0, None, None)[0]


def assign(
    units: Tensor,
    patches: Tensor,
    here: Tensor,
    size: Tensor,
    merge_weight: Tensor | None,
    leaving: Tensor | None,
    score: Tensor | MergeScore | None,
    count: int,
) -> MergeAssignment | None:
    """Assign, weigh and count in one kernel (`merge_weight`: the sizes). None where it cannot run, or a
    gradient is wanted: then top, targets and merge.join run in turn (layouts/similarity.py)."""
    worth = score if isinstance(score, MergeScore) else None
    score, alike = (score, None) if not isinstance(score, MergeScore) else (score.seen, score.alike)
    floats = all(t is None or t.dtype == torch.float32 for t in (score, alike, size, merge_weight))
    if not usable(here.device) or not floats or torch.is_grad_enabled():
        return None
    given = [None if t is None else t.contiguous() for t in (leaving, score, size, merge_weight, alike)]
    into, scale, after, left = _meet(
        units,
        patches.contiguous(),
        here.contiguous(),
        *given[:2],
        count,
        *given[2:],
        *(() if worth is None else (worth.power, worth.value)),
    )
    return MergeAssignment(into, scale, after, (here, left))
