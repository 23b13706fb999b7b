# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""For every token the most similar other one, by the cosine of their unit keys.

Shapes: B images, N slots, cell = image * N + slot; d head width; units [B N, 2, d] (scores_and_keys.py). In a packed
batch image b has the rows offsets[b] to offsets[b + 1], of the cells in `cells` [R].

    nearest(i) = argmax_j u_i . u_j  over the candidates j != i, of equal ones the first

A cosine is high.high + high.low + low.high on the tensor cores, summed in float32: about as exact as float32 (what is
left out, low.low, is at most 2^-22), in a fraction of its time. The cosines are never stored. NaN is never nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import jit, multiprocessors, operation, pointers, power_of_two, tl, triton, usable

MANY, FEW = (32, 3), (128, 2)  # candidates at a time, and stages; FEW where there are few programs
TALL, WARPS = 64, 4  # tokens of a program


def _closest(one: Tensor, two: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """The highest cosine of each row of `one` and its index in `two`; -inf and -1 where none is allowed.

    one [B, n, 2, d], two [B, m, 2, d], allowed [B, n, m]."""
    cosine = one.double().sum(2) @ two.double().sum(2).transpose(1, 2) / 4096
    cosine = cosine.masked_fill(~allowed | cosine.isnan(), float("-inf"))
    if not cosine.shape[-1]:
        none = cosine.new_full(cosine.shape[:2], float("-inf")).float()
        return none, torch.full_like(none, -1, dtype=torch.long)
    best, j = cosine.max(-1)
    return best.float(), torch.where(best > float("-inf"), j, -1)


def nearest_reference(units: Tensor, candidates: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """[B, N] cosine and slot."""
    u = units.unflatten(0, active.shape).masked_fill(~active[..., None, None], 0.0)
    own = torch.eye(active.shape[1], dtype=torch.bool, device=active.device)
    return _closest(u, u, active[:, :, None] & (candidates & active)[:, None, :] & ~own)


def match_reference(units: Tensor, a: Tensor, b: Tensor, slots: int, first: int) -> tuple[Tensor, Tensor]:
    """[B, n] cosine and slot."""
    u = units.unflatten(0, (len(a), slots))
    one, two = (u.gather(1, s[..., None, None].expand(-1, -1, *u.shape[2:])) for s in (a, b))
    best, j = _closest(one, two, (a >= first)[:, :, None] & (b >= first)[:, None, :])
    return best, torch.where(j < 0, -1, b.gather(1, j.clamp_min(0)))


@jit
def _slot_of(list_pointer, image, i, inside, start, slots, image_stride, stride, RAGGED: tl.constexpr):
    """The slot of the i-th token of a list [B, n] of slots, or of a packed batch's cells [R]."""
    if RAGGED:
        slot = tl.load(list_pointer + start + i, mask=inside, other=0).to(tl.int32) - image * slots
    else:
        at = list_pointer + image.to(tl.int64) * image_stride + i * stride
        slot = tl.load(at, mask=inside, other=0).to(tl.int32)
    return tl.where(inside, slot, 0)


@jit
def _unit(units_pointer, slot, known, d: tl.constexpr, WIDE: tl.constexpr):
    """The two halves of unit vectors [n, WIDE] of an image's slots, zero where they are not known."""
    c = tl.arange(0, WIDE)
    at = slot[:, None] * (2 * d) + c[None, :]
    inside = known[:, None] & (c < d)[None, :]
    high = tl.load(units_pointer + at, mask=inside, other=0.0)
    return high, tl.load(units_pointer + at + d, mask=inside, other=0.0)


@jit
def _cosines(units_pointer, high, low, rival, allowed, d: tl.constexpr, WIDE: tl.constexpr):
    """4096 times the cosines [n, m] of vectors with those of the slots `rival` [m] of their image."""
    their_high, their_low = _unit(units_pointer, rival, allowed, d, WIDE)
    s = tl.dot(low, their_high.T)
    s = tl.dot(high, their_low.T, s)
    return tl.dot(high, their_high.T, s)


@jit
def _nearest_kernel(
    units_pointer,  # [B N, 2, d]
    offsets_pointer,  # [B + 1], or None: lists of slots
    one_pointer,  # [R] cells, or [B, n] slots
    two_pointer,  # [R] the same cells, or [B, m] slots of the candidates
    candidates_pointer,  # [B, N], or None: all of the list
    active_pointer,  # [B, N], or None
    value_pointer,  # [B, N], or [B, n]
    slot_pointer,  # [B, N], or [B, n]
    tiles,
    slots,
    first_slot,
    n,
    m,
    one_image,
    one_stride,
    two_image,
    two_stride,
    d: tl.constexpr,
    WIDE: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
):
    RAGGED: tl.constexpr = offsets_pointer is not None
    image = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * TM
    start = 0
    if RAGGED:
        start = tl.load(offsets_pointer + image)
        n = tl.load(offsets_pointer + image + 1) - start
        m = n
    base = image.to(tl.int64) * slots
    units_pointer += base * (2 * d)
    i = first + tl.arange(0, TM)
    inside = i < n
    slot = _slot_of(one_pointer, image, i, inside, start, slots, one_image, one_stride, RAGGED)
    high, low = _unit(units_pointer, slot, inside, d, WIDE)  # of all rows: nothing waits for the masks
    if RAGGED:
        inside = inside & (tl.load(active_pointer + base + slot, mask=inside, other=0) != 0)
        wants = inside
    else:
        wants = inside & (slot >= first_slot)
    top = tl.full((TM, TN), float("-inf"), dtype=tl.float32)
    whose = tl.full((TM, TN), -1, dtype=tl.int32)
    for other in range(0, tl.where(first < n, m, 0), TN):
        j = other + tl.arange(0, TN)
        known = j < m
        rival = _slot_of(two_pointer, image, j, known, start, slots, two_image, two_stride, RAGGED)
        s = _cosines(units_pointer, high, low, rival, known, d, WIDE)
        if RAGGED:
            allowed = tl.load(active_pointer + base + rival, mask=known, other=0) != 0
            allowed = allowed & (tl.load(candidates_pointer + base + rival, mask=known, other=0) != 0)
        else:
            allowed = known & (rival >= first_slot)
        # columns of a tile keep their own best, so that nothing is compared across threads before the end
        better = (s > top) & allowed[None, :] & (slot[:, None] != rival[None, :])
        top = tl.where(better, s, top)
        whose = tl.where(better, j[None, :], whose)
    best = tl.max(top, 1)
    j = tl.min(tl.where((top == best[:, None]) & (whose >= 0), whose, 2147483647), 1)
    found = wants & (best > float("-inf"))
    winner = _slot_of(two_pointer, image, j, found, start, slots, two_image, two_stride, RAGGED)
    winner = tl.where(found, winner, -1)
    best = tl.where(found, best * (1.0 / 4096.0), float("-inf"))
    if RAGGED:
        value_pointer += base
        slot_pointer += base
        absent = (i < slots) & (tl.load(active_pointer + base + i, mask=i < slots, other=1) == 0)
        tl.store(value_pointer + slot, best, mask=inside)
        tl.store(slot_pointer + slot, winner.to(tl.int64), mask=inside)
        # cells that are not active: by the program whose turn it would be in an image of all slots
        tl.store(value_pointer + i, tl.full((TM,), float("-inf"), dtype=tl.float32), mask=absent)
        tl.store(slot_pointer + i, tl.full((TM,), -1, dtype=tl.int64), mask=absent)
    else:
        out = image.to(tl.int64) * n + i
        tl.store(value_pointer + out, best, mask=inside)
        tl.store(slot_pointer + out, winner.to(tl.int64), mask=inside)


def _launch(
    out: tuple[Tensor, Tensor],
    units: Tensor,
    one: Tensor,
    two: Tensor,
    slots: int,
    ragged: tuple[Tensor, Tensor, Tensor] | None = None,  # offsets, candidates, active
    first: int = 0,
) -> None:
    width, images = units.shape[-1], len(one) if ragged is None else len(ragged[0]) - 1
    n, m = (one.shape[1], two.shape[1]) if ragged is None else (slots, slots)
    tiles = triton.cdiv(n, TALL)
    strides = (*one.stride(), *two.stride()) if ragged is None else (0, 0, 0, 0)
    offsets, *masks = ragged or (None, None, None)
    few = images * tiles <= 2 * multiprocessors(units.device) and width <= 128  # wider ones need too much memory
    broad, stages = FEW if few else MANY
    if images * tiles:
        _nearest_kernel[(images * tiles,)](
            *pointers(units, offsets, one, two, *masks, *out),
            *(tiles, slots, first, n, m, *strides),
            d=width,
            WIDE=power_of_two(width),
            TM=TALL,
            TN=broad,
            num_warps=WARPS,
            num_stages=stages,
        )


def _outputs(like: Tensor) -> tuple[Tensor, Tensor]:
    return like.new_empty(like.shape, dtype=torch.float32), like.new_empty(like.shape, dtype=torch.long)


@operation("nearest", lambda *given: _outputs(given[-1]))
def _nearest(
    out: tuple[Tensor, Tensor], units: Tensor, cells: Tensor, offsets: Tensor, candidates: Tensor, active: Tensor
) -> None:
    masks = (candidates.contiguous(), active.contiguous())
    _launch(out, units, cells, cells, active.shape[1], (offsets, *masks))


@operation("match", lambda units, a, *_: _outputs(a))
def _match(out: tuple[Tensor, Tensor], units: Tensor, a: Tensor, b: Tensor, slots: int, first: int) -> None:
    _launch(out, units, a, b, slots, first=first)


def nearest(units: Tensor, cells: Tensor, offsets: Tensor, candidates: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """For every active token [B, N] its most similar other active one out of `candidates` [B, N]: cosine and slot,
    [B, N] each; -inf and -1 where there is none."""
    if not usable(active.device):
        return nearest_reference(units, candidates, active)
    cosine, slot = _nearest(units, cells, offsets, candidates, active)
    return cosine, slot


def match(units: Tensor, a: Tensor, b: Tensor, slots: int, first: int) -> tuple[Tensor, Tensor]:
    """For every token of a list of slots a [B, n] the most similar one of b [B, m]: cosine and slot [B, n], -inf and -1
    where there is none. Slots below `first` take no part."""
    if not usable(a.device):
        return match_reference(units, a, b, slots, first)
    cosine, slot = _match(units, a, b, slots, first)
    return cosine, slot
