# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""ToMe's choice of pairs: which tokens merge into which, and the order of the others from then on.

Shapes: B images, N slots; n tokens left in each, in some order: order [B, n] are their slots. A are those at even
positions, B those at odd ones; best and partner, [B, |A|] each, are every A's highest cosine to a B and that B's slot.

    the r A's with the highest cosine, of equal ones the first, leave: target = partner; of all others the own slot
    order' [B, n - r]   prefix tokens by slot, then the A's that stay, then the other B's

The A's that stay keep their order; without prefix tokens they are ordered by falling cosine (as in the authors' code).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import jit, operation, pointers, power_of_two, tl, usable


def reference(
    best: Tensor, partner: Tensor, order: Tensor, active: Tensor, r: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """target [B, N] and order' [B, n - r]."""
    a, b = order[:, ::2], order[:, 1::2]
    edge = best.argsort(dim=-1, descending=True, stable=True)
    gone, stay = edge[:, :r], edge[:, r:]
    if prefix:
        stay = stay.sort(dim=-1).values
    own = torch.arange(active.shape[1], device=a.device).expand(active.shape)
    target = own.scatter(1, a.gather(1, gone), partner.gather(1, gone))
    both = torch.cat([a.gather(1, stay), b], 1)
    if prefix > 1:
        both = both.gather(1, (both >= prefix).long().argsort(dim=-1, stable=True))
        both = torch.cat([both[:, :prefix].sort(dim=-1).values, both[:, prefix:]], 1)
    return target, both


@jit
def _ranked(row, scores, i, count, stride, prefix):
    """Slot and score of the i-th A: those without a partner (NaN, -inf) come behind, prefix tokens last of all."""
    inside = i < count
    a = tl.load(row + 2 * i * stride, mask=inside, other=0)
    best = tl.load(scores + i, mask=inside, other=0.0)
    best = tl.where(best > -2.0, best, -2.0)
    return a, tl.where(inside & (a >= prefix), best, -3.0)


@jit
def _match_kernel(
    best_pointer,  # [B, |A|]
    partner_pointer,  # [B, |A|]
    order_pointer,  # [B, n]
    active_pointer,  # [B, N]
    target_pointer,  # [B, N]
    next_pointer,  # [B, n - r]
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
    a, best = _ranked(row, scores, i, count, stride, prefix)
    rank = tl.zeros((WIDE,), dtype=tl.int32)
    for other in range(0, count, PART):
        j = other + tl.arange(0, PART)
        _, theirs = _ranked(row, scores, j, count, stride, prefix)
        above = (theirs[None, :] > best[:, None]) | ((theirs[None, :] == best[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum((above & (j < count)[None, :]).to(tl.int32), 1)
    partner = tl.load(partner_pointer + image.to(tl.int64) * count + i, mask=inside, other=0)
    gone = inside & (rank < r)
    target = target_pointer + image.to(tl.int64) * slots
    tl.store(target + a, tl.where(gone, partner, a), mask=inside)
    others = i < n // 2
    b = tl.load(row + (2 * i + 1) * stride, mask=others, other=0)
    tl.store(target + b, b, mask=others)
    slot = tl.arange(0, ALL)
    active = tl.load(active_pointer + image.to(tl.int64) * slots + slot, mask=slot < slots, other=1)
    tl.store(target + slot, slot.to(tl.int64), mask=active == 0)
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


def _outputs(best, partner, order, active, r, prefix) -> tuple[Tensor, Tensor]:
    return order.new_empty(active.shape), order.new_empty(order.shape[0], order.shape[1] - r)


@operation("bipartite_match", _outputs)
def _bipartite_match(
    out: tuple[Tensor, Tensor], best: Tensor, partner: Tensor, order: Tensor, active: Tensor, r: int, prefix: int
) -> None:
    (batch, slots), n = active.shape, order.shape[1]
    wide = power_of_two((n + 1) // 2)
    _match_kernel[(batch,)](
        *pointers(best, partner, order, active.contiguous(), *out),
        *(*order.stride(), slots, n, r, prefix),
        WIDE=wide,
        ALL=power_of_two(slots),
        PART=16,
        RANKED=prefix == 0,
        num_warps=4 if wide <= 128 else 8,
    )


def bipartite_match(
    best: Tensor, partner: Tensor, order: Tensor, active: Tensor, r: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """As the reference, with the kernel where it can run; prefix tokens are in no pair (their `best` is -inf)."""
    run = _bipartite_match if usable(best.device) else reference
    target, following = run(best.detach(), partner, order, active, r, prefix)
    return target, following
