# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Who is most alike: keys as unit vectors, and for every token its most similar other one, by their cosine.

Shapes: B images, N slots, cell = image * N + slot; R rows that there is room for, H heads, d head width. `index` says
whose the rows are: [R] cells, image after image, with offsets [B + 1] as in ragged.py; or [B, n] slots, as many of
every image, with offsets None.

    u_i = x_i / |x_i|,  x_i = 1/H sum_h k_hi            units [B N, 2, d], in place of the cell
    nearest(i) = argmax_j u_i . u_j  over j != i that are asked for, of equals the first

A unit vector is stored as two float16, 64 u = high + low (64, so that low is no denormal number), and a cosine is
high.high + high.low + low.high on the tensor cores, summed in float32: about as exact as float32 (what is left out,
low.low, is at most 2^-22), in a fraction of its time. The cosines are never stored. NaN is like nobody.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import multiprocessors, power_of_two, tl, triton, usable

NEAREST, MATCH = 0, 1  # what is asked of the kernel


def _cells(index: Tensor, offsets: Tensor | None, slots: int) -> Tensor:
    """The cell of every live row, for the references alone."""
    if offsets is not None:
        return index[: int(offsets[-1])].long()
    return (torch.arange(len(index), device=index.device)[:, None] * slots + index).flatten()


def _halves(unit: Tensor) -> Tensor:
    """[..., d] -> [..., 2, d] float16: 64 times a number, and what is missing from that."""
    high = (64 * unit).half()
    return torch.stack([high, (64 * unit - high.to(unit.dtype)).half()], -2)


def units_reference(k: Tensor, index: Tensor, offsets: Tensor | None, batch: int, slots: int) -> Tensor:
    """[R, H, d] -> [B N, 2, d]; zero where there is no row."""
    cells = _cells(index, offsets, slots)
    x = k[: len(cells)].to(torch.promote_types(k.dtype, torch.float32)).mean(1)
    unit = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    out = torch.zeros(batch * slots, 2, k.shape[-1], dtype=torch.float16, device=k.device)
    return out.index_copy(0, cells, _halves(unit))


def _closest(one: Tensor, two: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """units [B, n, 2, d] and [B, m, 2, d], allowed [B, n, m] -> the highest cosine and whose it is, -inf and -1."""
    cosine = one.double().sum(2) @ two.double().sum(2).transpose(1, 2) / 4096
    cosine = cosine.masked_fill(~allowed | cosine.isnan(), float("-inf"))
    if not cosine.shape[-1]:
        return cosine.new_full(cosine.shape[:2], float("-inf")).float(), allowed.new_full(
            cosine.shape[:2], -1, dtype=torch.long
        )
    best, j = cosine.max(-1)
    return best.float(), torch.where(best > float("-inf"), j, -1)


def nearest_reference(units: Tensor, among: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    """[B, N] cosine and slot."""
    u = units.unflatten(0, here.shape).masked_fill(~here[..., None, None], 0.0)
    own = torch.eye(here.shape[1], dtype=torch.bool, device=here.device)
    return _closest(u, u, here[:, :, None] & (among & here)[:, None, :] & ~own)


def match_reference(units: Tensor, a: Tensor, b: Tensor, slots: int, least: int) -> tuple[Tensor, Tensor]:
    """[B, n] cosine and slot."""
    u = units.unflatten(0, (len(a), slots))
    one, two = (u.gather(1, s[..., None, None].expand(-1, -1, *u.shape[2:])) for s in (a, b))
    best, j = _closest(one, two, (a >= least)[:, :, None] & (b >= least)[:, None, :])
    return best, torch.where(j < 0, -1, b.gather(1, j.clamp_min(0)))


if triton is not None:

    @triton.jit
    def _units_of(
        tile,
        k_pointer,
        index_pointer,
        offsets_pointer,
        out_pointer,
        rows,  # there is room for
        batch,
        slots,
        row_stride,
        head_stride,
        image_length,
        image_stride,
        index_stride,
        HEADS: tl.constexpr,
        d: tl.constexpr,
        WIDE: tl.constexpr,
        TM: tl.constexpr,
        RAGGED: tl.constexpr,
    ):
        if RAGGED:
            rows = tl.load(offsets_pointer + batch)
        if tile * TM < rows:
            row = tile * TM + tl.arange(0, TM)
            there = row < rows
            if RAGGED:
                cell = tl.load(index_pointer + row, mask=there, other=0).to(tl.int64)
            else:
                image = row // image_length
                at = image.to(tl.int64) * image_stride + (row % image_length) * index_stride
                slot = tl.load(index_pointer + at, mask=there, other=0)
                cell = image.to(tl.int64) * slots + slot
            c = tl.arange(0, WIDE)
            inside = there[:, None] & (c < d)[None, :]
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

    @triton.jit
    def _units_kernel(
        k_pointer,
        index_pointer,
        offsets_pointer,
        out_pointer,
        rows,
        batch,
        slots,
        row_stride,
        head_stride,
        image_length,
        image_stride,
        index_stride,
        HEADS: tl.constexpr,
        d: tl.constexpr,
        WIDE: tl.constexpr,
        TM: tl.constexpr,
        RAGGED: tl.constexpr,
    ):
        _units_of(
            *(tl.program_id(0), k_pointer, index_pointer, offsets_pointer, out_pointer, rows, batch, slots),
            *(row_stride, head_stride, image_length, image_stride, index_stride, HEADS, d, WIDE, TM, RAGGED),
        )

    @triton.jit
    def _slot_of(list_pointer, image, i, inside, start, slots, image_stride, stride, RAGGED: tl.constexpr):
        """The slot of the i-th of a list of tokens."""
        if RAGGED:
            slot = tl.load(list_pointer + start + i, mask=inside, other=0).to(tl.int32) - image * slots
        else:
            at = list_pointer + image.to(tl.int64) * image_stride + i * stride
            slot = tl.load(at, mask=inside, other=0).to(tl.int32)
        return tl.where(inside, slot, 0)

    @triton.jit
    def _unit(units_pointer, slot, known, d: tl.constexpr, WIDE: tl.constexpr):
        """The two halves of unit vectors [n, WIDE] of an image's slots, zero where they are not known."""
        c = tl.arange(0, WIDE)
        at = slot[:, None] * (2 * d) + c[None, :]
        inside = known[:, None] & (c < d)[None, :]
        high = tl.load(units_pointer + at, mask=inside, other=0.0)
        return high, tl.load(units_pointer + at + d, mask=inside, other=0.0)

    @triton.jit
    def _cosines(units_pointer, high, low, rival, allowed, d: tl.constexpr, WIDE: tl.constexpr):
        """4096 times the cosines [n, m] of vectors with those of the slots `rival` [m] of their image."""
        their_high, their_low = _unit(units_pointer, rival, allowed, d, WIDE)
        s = tl.dot(low, their_high.T)
        s = tl.dot(high, their_low.T, s)
        return tl.dot(high, their_high.T, s)

    @triton.jit
    def _closest_kernel(
        units_pointer,
        offsets_pointer,
        one_pointer,  # who asks
        two_pointer,  # who is asked for
        among_pointer,  # [B, N]: who is asked for (NEAREST)
        here_pointer,  # [B, N] (NEAREST)
        value_pointer,
        slot_pointer,
        tiles,
        slots,
        least,
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
        WHAT: tl.constexpr,
        RAGGED: tl.constexpr,
    ):
        image = tl.program_id(0) // tiles
        first = tl.program_id(0) % tiles * TM
        start = 0
        if RAGGED:
            start = tl.load(offsets_pointer + image)
            n = tl.load(offsets_pointer + image + 1) - start
            m = n
        base = image.to(tl.int64) * slots
        units_pointer += base * (2 * d)
        among_pointer += base
        here_pointer += base
        i = first + tl.arange(0, TM)
        inside = i < n
        slot = _slot_of(one_pointer, image, i, inside, start, slots, one_image, one_stride, RAGGED)
        high, low = _unit(units_pointer, slot, inside, d, WIDE)  # of all rows: nothing waits for the masks
        if WHAT == 1:
            asks = inside & (slot >= least)
        else:
            inside = inside & (tl.load(here_pointer + slot, mask=inside, other=0) != 0)
            asks = inside
        top = tl.full((TM, TN), float("-inf"), dtype=tl.float32)
        whose = tl.full((TM, TN), -1, dtype=tl.int32)
        for other in range(0, tl.where(first < n, m, 0), TN):
            j = other + tl.arange(0, TN)
            there = j < m
            rival = _slot_of(two_pointer, image, j, there, start, slots, two_image, two_stride, RAGGED)
            s = _cosines(units_pointer, high, low, rival, there, d, WIDE)
            if WHAT == 1:
                allowed = there & (rival >= least)
            else:
                allowed = tl.load(here_pointer + rival, mask=there, other=0) != 0
                allowed = allowed & (tl.load(among_pointer + rival, mask=there, other=0) != 0)
            # columns of a tile keep their own best, so that nothing is compared across threads before the end
            better = (s > top) & allowed[None, :] & (slot[:, None] != rival[None, :])
            top = tl.where(better, s, top)
            whose = tl.where(better, j[None, :], whose)
        best = tl.max(top, 1)
        j = tl.min(tl.where((top == best[:, None]) & (whose >= 0), whose, 2147483647), 1)
        found = asks & (best > float("-inf"))
        winner = _slot_of(two_pointer, image, j, found, start, slots, two_image, two_stride, RAGGED)
        winner = tl.where(found, winner, -1)
        best = tl.where(found, best * (1.0 / 4096.0), float("-inf"))
        if WHAT == 1:
            out = image.to(tl.int64) * n + i
            tl.store(value_pointer + out, best, mask=inside)
            tl.store(slot_pointer + out, winner.to(tl.int64), mask=inside)
        else:
            # the cells of this tile that have no row, whoever comes to their turn here
            value_pointer += base
            slot_pointer += base
            absent = (i < slots) & (tl.load(here_pointer + i, mask=i < slots, other=1) == 0)
            tl.store(value_pointer + slot, best, mask=inside)
            tl.store(slot_pointer + slot, winner.to(tl.int64), mask=inside)
            tl.store(value_pointer + i, tl.full((TM,), float("-inf"), dtype=tl.float32), mask=absent)
            tl.store(slot_pointer + i, tl.full((TM,), -1, dtype=tl.int64), mask=absent)


TALL, WARPS = 64, 4  # tokens that ask
# Tokens that are asked for, and stages: few registers; where there are few programs, fewer turns of the loop.
MANY, FEW = (32, 3), (128, 2)


def _launch(
    what: int,
    units: Tensor,
    one: Tensor,
    two: Tensor,
    offsets: Tensor | None,
    slots: int,
    answers: tuple[Tensor, Tensor],
    masks: tuple[Tensor, Tensor] | None = None,  # among, here
    least: int = 0,
) -> None:
    images = len(one) if offsets is None else len(offsets) - 1
    n, m = (t.shape[1] if offsets is None else slots for t in (one, two))
    width = units.shape[-1]
    # masked answers are written for all slots, so that tiles go over all of them
    tiles = triton.cdiv(n if masks is None else slots, TALL)
    flags = (units,) * 2 if masks is None else tuple(t.contiguous().view(torch.uint8) for t in masks)
    strides = (0, 0, 0, 0) if offsets is not None else (*one.stride(), *two.stride())
    if not images * tiles:
        return
    few = images * tiles <= 2 * multiprocessors(units.device) and width <= 128  # wider ones need too much memory
    broad, stages = FEW if few else MANY
    _closest_kernel[(images * tiles,)](
        *(
            units,
            units if offsets is None else offsets,
            one,
            two,
            *flags,
            *answers,
            tiles,
            slots,
            least,
            n,
            m,
            *strides,
        ),
        d=width,
        WIDE=power_of_two(width),
        TM=TALL,
        TN=broad,
        WHAT=what,
        RAGGED=offsets is not None,
        num_warps=WARPS,
        num_stages=stages,
    )


@torch.library.custom_op("adaptivit::units", mutates_args=())
def _units(k: Tensor, index: Tensor, offsets: Tensor | None, batch: int, slots: int) -> Tensor:
    rows, heads, width = k.shape
    out = torch.empty(batch * slots, 2, width, dtype=torch.float16, device=k.device)
    ragged, wide = offsets is not None, power_of_two(width)
    tall = max(1, 2048 // wide)
    if rows:
        _units_kernel[(triton.cdiv(rows, tall),)](
            *(k, index, k if offsets is None else offsets, out, rows, batch, slots, k.stride(0), k.stride(1)),
            *((1, 0, 0) if ragged else (index.shape[1], *index.stride())),
            HEADS=heads,
            d=width,
            WIDE=wide,
            TM=tall,
            RAGGED=ragged,
            num_warps=4,
        )
    return out


@_units.register_fake
def _(k, index, offsets, batch, slots):
    return k.new_empty(batch * slots, 2, k.shape[-1], dtype=torch.float16)


@torch.library.custom_op("adaptivit::nearest", mutates_args=())
def _nearest(
    units: Tensor, index: Tensor, offsets: Tensor | None, among: Tensor, here: Tensor
) -> tuple[Tensor, Tensor]:
    value = torch.empty(here.shape, dtype=torch.float32, device=here.device)
    slot = torch.empty(here.shape, dtype=torch.long, device=here.device)
    _launch(NEAREST, units, index, index, offsets, here.shape[1], (value, slot), (among, here))
    return value, slot


@_nearest.register_fake
def _(units, index, offsets, among, here):
    return here.new_empty(here.shape, dtype=torch.float32), here.new_empty(here.shape, dtype=torch.long)


@torch.library.custom_op("adaptivit::match", mutates_args=())
def _match(units: Tensor, a: Tensor, b: Tensor, slots: int, least: int) -> tuple[Tensor, Tensor]:
    value = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    slot = torch.empty(a.shape, dtype=torch.long, device=a.device)
    _launch(MATCH, units, a, b, None, slots, (value, slot), least=least)
    return value, slot


@_match.register_fake
def _(units, a, b, slots, least):
    return a.new_empty(a.shape, dtype=torch.float32), a.new_empty(a.shape, dtype=torch.long)


def units(k: Tensor, index: Tensor, offsets: Tensor | None, batch: int, slots: int) -> Tensor:
    """As the reference; cells without a row are not written."""
    if not usable(k.device):
        return units_reference(k, index, offsets, batch, slots)
    return _units(k if k.stride(-1) == 1 else k.contiguous(), index, offsets, batch, slots)


def nearest(units: Tensor, index: Tensor, offsets: Tensor | None, among: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    """For every token that is `here` [B, N] its most similar other one that is here and `among` [B, N]: cosine and
    slot, [B, N] each; -inf and -1 where there is none."""
    return (
        _nearest(units, index, offsets, among, here) if usable(here.device) else nearest_reference(units, among, here)
    )


def match(units: Tensor, a: Tensor, b: Tensor, slots: int, least: int) -> tuple[Tensor, Tensor]:
    """For every token of a list of slots a [B, n] the most similar one of b [B, m]: cosine and slot [B, n], -inf and -1
    where there is none. Slots below `least` take no part."""
    return _match(units, a, b, slots, least) if usable(a.device) else match_reference(units, a, b, slots, least)
