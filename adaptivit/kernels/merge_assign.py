# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Merge patches that leave into their most similar staying patch: ranking, targets, weights and sizes in one kernel.

Shapes: B images, N slots; all [B, N]. units [B N, 2, d] (scores_and_keys.py); active: tokens that take part; patches:
those that may leave and be joined. Either `leaving` says which patches leave, or all leave but the `count` with the
highest merge score (topk.py, merge_score.py).

    target         of a leaving active patch the most similar active patch that stays, of equal ones the first; -1 where
                   there is none, and of other tokens that leave; of tokens that stay the own slot
    source_weight  merge_weight_i / sum of merge_weight over the tokens with i's target; 0 without a target
    size'          of tokens that stay the sum of the sizes that join, their own included

One program an image does all of it: leaving patches are few, and are gathered into one tile, whose cosines with all
others are in registers. With few images its time is that of a chain of waits, so they are few: tokens are ranked by one
comparison of whole numbers each (_key), counted up across threads once, at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import nearest_token
from .launch import jit, operation, pointers, power_of_two, tl, usable
from .merge_score import MergeScore, _merge_weight, _score
from .nearest_token import _cosines, _unit


class MergeAssignment(NamedTuple):
    """Where tokens go in a merge, [B, N] each."""

    target: Tensor  # long
    source_weight: Tensor
    size: Tensor  # afterwards
    # the active tokens [B, N] bool, and how many of them are left in every image [B] int32, where they are counted
    left_counts: tuple[Tensor, Tensor] | None = None


def reference(units: Tensor, leaving: Tensor, patches: Tensor, active: Tensor) -> Tensor:
    """target alone; for ranking, weights and sizes see topk.py and merge.py."""
    _, slot = nearest_token.nearest_reference(units, patches & ~leaving, active)
    own = torch.arange(active.shape[1], device=active.device).expand_as(active)
    return torch.where(leaving, torch.where(patches, slot, -1), own)


@jit
def _merge_assign_kernel(
    units_pointer,  # [B N, 2, d]
    patches_pointer,  # [B, N]
    active_pointer,  # [B, N]
    leaving_pointer,  # [B, N], or None: by rank
    attention_pointer,  # [B, N], or None: leaving is given
    cosine_pointer,  # [B, N], or None: ranked by attention alone
    size_pointer,  # [B, N]
    merge_weight_pointer,  # [B, N], or None: the size, or by attention
    target_pointer,  # [B, N]
    source_weight_pointer,  # [B, N]
    new_size_pointer,  # [B, N]
    left_pointer,  # [B]
    list_pointer,  # [B, N] room for the slots of leaving patches
    slots,
    count,
    d: tl.constexpr,
    WIDE: tl.constexpr,
    ALL: tl.constexpr,  # slots, rounded up
    TM: tl.constexpr,
    TN: tl.constexpr,
    PART: tl.constexpr,
    POWER: tl.constexpr,
    VALUE: tl.constexpr,
):
    SAME: tl.constexpr = attention_pointer is None and merge_weight_pointer is None  # weights are the sizes
    first_cell = tl.program_id(0).to(tl.int64) * slots
    units_pointer += first_cell * (2 * d)
    slot = tl.arange(0, ALL)
    inside = slot < slots
    cell = first_cell + slot
    patch = tl.load(patches_pointer + cell, mask=inside, other=0) != 0
    active = tl.load(active_pointer + cell, mask=inside, other=0) != 0
    if leaving_pointer is None:
        score = tl.load(attention_pointer + cell, mask=inside, other=0.0)
        if cosine_pointer is not None:
            score = _score(score, tl.load(cosine_pointer + cell, mask=inside, other=0.0), POWER)
        leaves = patch & (_above(score, patch, target_pointer + first_cell, slot, slots, ALL, PART) >= count)
    else:
        leaves = tl.load(leaving_pointer + cell, mask=inside, other=0) != 0
    moves = leaves & patch & active
    number = tl.sum(moves.to(tl.int32), 0)
    tl.store(left_pointer + tl.program_id(0), tl.sum((active & (leaves == 0)).to(tl.int32), 0))
    tl.store(list_pointer + first_cell + tl.cumsum(moves.to(tl.int32), 0) - 1, slot, mask=moves)
    tl.store(target_pointer + cell, tl.where(leaves, -1, slot).to(tl.int64), mask=inside)
    stays = (patch & active & (leaves == 0)).to(tl.int32)
    total = tl.zeros((ALL,), dtype=tl.float32)  # of sizes that join each
    whole = tl.zeros((ALL,), dtype=tl.float32)  # of their weights
    tl.debug_barrier()  # what was written is read by other threads from here on
    for first in range(0, number, TM):
        nth = first + tl.arange(0, TM)
        real = nth < number
        source = tl.load(list_pointer + first_cell + nth, mask=real, other=0)
        high, low = _unit(units_pointer, source, real, d, WIDE)
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
        tl.store(target_pointer + first_cell + source, winner.to(tl.int64), mask=real)
        # sums by comparing every two tokens: in the same order at every call
        hit = winner[:, None] == slot[None, :]
        size = tl.load(size_pointer + first_cell + source, mask=real, other=0.0)
        total += tl.sum(tl.where(hit, size[:, None], 0.0), 0)
        if attention_pointer is not None:
            seen = tl.load(attention_pointer + first_cell + source, mask=real, other=0.0)
            weight = tl.where(real, _merge_weight(seen, size, VALUE), 0.0)
            whole += tl.sum(tl.where(hit, weight[:, None], 0.0), 0)
        elif merge_weight_pointer is not None:
            weight = tl.load(merge_weight_pointer + first_cell + source, mask=real, other=0.0)
            whole += tl.sum(tl.where(hit, weight[:, None], 0.0), 0)
    tl.debug_barrier()
    target = tl.load(target_pointer + cell, mask=inside, other=-1).to(tl.int32)
    size = tl.load(size_pointer + cell, mask=inside, other=0.0)
    weight = size
    if attention_pointer is not None:
        weight = _merge_weight(tl.load(attention_pointer + cell, mask=inside, other=0.0), size, VALUE)
    elif merge_weight_pointer is not None:
        weight = tl.load(merge_weight_pointer + cell, mask=inside, other=0.0)
    if SAME:
        whole = total
    whole = tl.gather(whole + weight, tl.maximum(target, 0), 0)
    scale = tl.where(active & (target >= 0), weight / tl.maximum(whole, 1e-12), 0.0)
    tl.store(source_weight_pointer + cell, scale, mask=inside)
    tl.store(new_size_pointer + cell, tl.where(active & (target == slot), total + size, size), mask=inside)


@jit
def _key(score, known, slot):
    """Whole numbers in the order of the scores. NaN is above all, and a token that is not known below all.

    Of equal scores the first slot is highest."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # 0 and -0 are equal
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = tl.where(score != score, 0x7FFFFFFF, rank).to(tl.int64)
    return tl.where(known, rank * 4294967296 + (0x7FFFFFFF - slot), -0x8000000000000000)


@jit
def _above(score, known, room_pointer, slot, slots, ALL: tl.constexpr, PART: tl.constexpr):
    """[ALL] how many known tokens are above each of them. room_pointer [slots] int64 is written to."""
    mine = _key(score, known, slot)
    tl.store(room_pointer + slot, mine, mask=slot < slots)
    tl.debug_barrier()  # what was written is read by other threads from here on
    above = tl.zeros((ALL, PART), dtype=tl.int32)
    for first in range(0, slots, PART):
        j = first + tl.arange(0, PART)
        other = tl.load(room_pointer + j, mask=j < slots, other=-0x8000000000000000)
        above += (other[None, :] > mine[:, None]).to(tl.int32)
    tl.debug_barrier()  # and is written to again
    return tl.sum(above, 1)


class Tile(NamedTuple):
    """Leaving patches, patches that they may join, tokens that all are ranked against at once; warps."""

    m: int
    n: int
    part: int
    warps: int


def tile_for(padded: int, images: int, wide: int) -> Tile:
    """By slots and head width, rounded up, and the number of programs; measured on an H200 with 1, 32 and 256 images of
    197 tokens (docs/results/log.md), more tokens were not timed. Wider heads take more shared memory."""
    if padded <= 256:
        return Tile(16, 128 if wide <= 64 else 64, 32, 8) if images <= 128 else Tile(16, 64, 16, 4)
    return Tile(16, 64, max(8, 8192 // padded), 8 if padded <= 512 else 16)


def _outputs(units, patches, active, *_) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """target, source_weight, size' and how many tokens are left."""
    target, left = (
        active.new_empty(n, dtype=d) for n, d in ((active.shape, torch.long), (active.shape[:1], torch.int))
    )
    weight, size = (active.new_empty(active.shape, dtype=torch.float32) for _ in range(2))
    return target, weight, size, left


@operation("merge_assign", _outputs)
def _merge_assign(
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    units: Tensor,
    patches: Tensor,
    active: Tensor,
    leaving: Tensor | None,
    attention: Tensor | None,
    cosine: Tensor | None,
    size: Tensor,
    merge_weight: Tensor | None,
    count: int,
    power: float,
    value: float,
) -> None:
    (batch, slots), width = active.shape, units.shape[-1]
    padded, wide = power_of_two(slots), power_of_two(width)
    tile = tile_for(padded, batch, wide)
    if active.numel():
        tensors = (units, patches, active, leaving, attention, cosine, size, merge_weight, *out)
        _merge_assign_kernel[(batch,)](
            *pointers(*tensors, torch.empty_like(out[0], dtype=torch.int32)),
            *(slots, count),
            d=width,
            WIDE=wide,
            ALL=padded,
            TM=tile.m,
            TN=tile.n,
            PART=tile.part,
            POWER=power,
            VALUE=value,
            num_warps=tile.warps,
        )


def merge_assign(
    units: Tensor,
    patches: Tensor,
    active: Tensor,
    size: Tensor,
    merge_weight: Tensor | None,
    leaving: Tensor | None,
    score: MergeScore | None,
    count: int,
) -> MergeAssignment | None:
    """Rank, assign, weigh and count in one kernel. None where it cannot run, or a gradient is wanted: then topk,
    nearest and mean_weights run in turn (layouts/similarity.py)."""
    attention, cosine = (None, None) if score is None else (score.attention, score.cosine)
    powers = (0.0, 0.0) if score is None else (score.power, score.value)
    numbers = (attention, cosine, size, merge_weight)
    if not usable(active.device) or torch.is_grad_enabled():
        return None
    if any(t is not None and t.dtype != torch.float32 for t in numbers):
        return None
    given = (t if t is None else t.contiguous() for t in (patches, active, leaving, *numbers))
    target, source_weight, new_size, left = _merge_assign(units, *given, count, *powers)
    return MergeAssignment(target, source_weight, new_size, (active, left))
