# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""ToMe's choice of pairs: who merges into whom, and in which order the others stand from then on.

Shapes: B images, N slots; n tokens left in each, which stand in a row: order [B, n] are their slots. A are those at
even positions, B those at odd ones; best and partner, [B, |A|] each, are every A's highest cosine to a B and that B's
slot.

    the r A's with the highest cosine, of equals the first, leave: into = partner; of all others into = the own slot
    order' [B, n - r]   prefix tokens by slot, then the A's that stay, then the other B's

The A's that stay keep their order; without prefix tokens they stand by falling cosine (as in the authors' code).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import power_of_two, tl, triton, usable


def reference(
    best: Tensor, partner: Tensor, order: Tensor, present: Tensor, r: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """into [B, N] and order' [B, n - r]."""
    a, b = order[:, ::2], order[:, 1::2]
    edge = best.argsort(dim=-1, descending=True, stable=True)
    gone, stay = edge[:, :r], edge[:, r:]
    if prefix:
        stay = stay.sort(dim=-1).values
    own = torch.arange(present.shape[1], device=a.device).expand(present.shape)
    into = own.scatter(1, a.gather(1, gone), partner.gather(1, gone))
    both = torch.cat([a.gather(1, stay), b], 1)
    if prefix > 1:
        both = both.gather(1, (both >= prefix).long().argsort(dim=-1, stable=True))
        both = torch.cat([both[:, :prefix].sort(dim=-1).values, both[:, prefix:]], 1)
    return into, both


if triton is not None:

    @triton.jit
    def _standing(row, scores, i, count, stride, prefix):
        """Slot and score of the i-th A: those without a partner (NaN, -inf) come behind, prefix tokens last of all."""
        inside = i < count
        a = tl.load(row + 2 * i * stride, mask=inside, other=0)
        best = tl.load(scores + i, mask=inside, other=0.0)
        best = tl.where(best > -2.0, best, -2.0)
        return a, tl.where(inside & (a >= prefix), best, -3.0)

    @triton.jit
    def _pairs_kernel(
        best_pointer,
        partner_pointer,
        order_pointer,
        present_pointer,
        into_pointer,
        next_pointer,
        image_stride,
        stride,
        slots,
        n,
        r,
        prefix,
        WIDE: tl.constexpr,
        ALL: tl.constexpr,
        PART: tl.constexpr,
        RANKED: tl.constexpr,
    ):
        image = tl.program_id(0)
        i = tl.arange(0, WIDE)
        count = (n + 1) // 2
        inside = i < count
        row = order_pointer + image.to(tl.int64) * image_stride
        scores = best_pointer + image.to(tl.int64) * count
        a, best = _standing(row, scores, i, count, stride, prefix)
        rank = tl.zeros((WIDE,), dtype=tl.int32)
        for other in range(0, count, PART):
            j = other + tl.arange(0, PART)
            _, theirs = _standing(row, scores, j, count, stride, prefix)
            above = (theirs[None, :] > best[:, None]) | ((theirs[None, :] == best[:, None]) & (j[None, :] < i[:, None]))
            rank += tl.sum((above & (j < count)[None, :]).to(tl.int32), 1)
        partner = tl.load(partner_pointer + image.to(tl.int64) * count + i, mask=inside, other=0)
        gone = inside & (rank < r)
        into = into_pointer + image.to(tl.int64) * slots
        tl.store(into + a, tl.where(gone, partner, a), mask=inside)
        others = i < n // 2
        b = tl.load(row + (2 * i + 1) * stride, mask=others, other=0)
        tl.store(into + b, b, mask=others)
        slot = tl.arange(0, ALL)
        here = tl.load(present_pointer + image.to(tl.int64) * slots + slot, mask=slot < slots, other=1)
        tl.store(into + slot, slot.to(tl.int64), mask=here == 0)
        stays = inside & (rank >= r) & (a >= prefix)
        if RANKED:
            position = rank - r
        else:
            position = tl.cumsum(stays.to(tl.int32), 0) - 1 + prefix
        following = next_pointer + image.to(tl.int64) * (n - r)
        tl.store(following + position, a, mask=stays)
        tl.store(following + a, a, mask=inside & (a < prefix))
        tl.store(following + b, b, mask=others & (b < prefix))
        rest = others & (b >= prefix)
        behind = prefix + tl.sum(stays.to(tl.int32), 0) + tl.cumsum(rest.to(tl.int32), 0) - 1
        tl.store(following + behind, b, mask=rest)


@torch.library.custom_op("adaptivit::pairs", mutates_args=())
def _pairs(best: Tensor, partner: Tensor, order: Tensor, present: Tensor, r: int, prefix: int) -> tuple[Tensor, Tensor]:
    batch, slots = present.shape
    n = order.shape[1]
    into, following = order.new_empty(batch, slots), order.new_empty(batch, n - r)
    wide = power_of_two((n + 1) // 2)
    _pairs_kernel[(batch,)](
        *(
            best,
            partner,
            order,
            present.contiguous().view(torch.uint8),
            into,
            following,
            *order.stride(),
            slots,
            n,
            r,
            prefix,
        ),
        WIDE=wide,
        ALL=power_of_two(slots),
        PART=16,
        RANKED=prefix == 0,
        num_warps=4 if wide <= 128 else 8,
    )
    return into, following


@_pairs.register_fake
def _(best, partner, order, present, r, prefix):
    return order.new_empty(present.shape), order.new_empty(order.shape[0], order.shape[1] - r)


def pairs(best: Tensor, partner: Tensor, order: Tensor, present: Tensor, r: int, prefix: int) -> tuple[Tensor, Tensor]:
    """As the reference, with the kernel where it can run; prefix tokens are in no pair (their `best` is -inf)."""
    run = _pairs if usable(best.device) else reference
    return run(best.detach(), partner, order, present, r, prefix)
