"""Padded: as many rows of every image as the longest has live ones. For export: plain tensors, no lists on the host.

Shapes: B images, N slots, D width, H heads, d head width; n live tokens of the longest image, rows are [B, n, D].
`places` [B, n] says which slot each row is, live ones first and in rising order; `stays` [B, n] which of them are live.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..decision import Drop, Merge, Skip
from ..kernels import attention
from .base import Layout, take
from .similarity import Cosines, Similarity, mean_key


class Padded(Layout):
    name = "padded"

    def __init__(self, x: Tensor, head_tokens: int) -> None:
        super().__init__(x, head_tokens)
        self.places = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        self.stays: Tensor | None = None  # all of them
        self._parked = x[:, :head_tokens]  # [B, head_tokens, D] last values of those that left

    def _select(self, stay: Tensor) -> None:
        """Keep as many rows as the longest image has tokens that stay [B, N]."""
        width, least = self.places.shape[1], max(2, self.head_tokens if self.head_tokens < self.slots else 0)
        n = stay.sum(-1).max().clamp_min(least).item()
        torch._check(n >= least)  # torch.export has to be told that there is something left
        torch._check(n <= width)
        kept = stay.gather(1, self.places)
        order = kept.long() * (2 * self.slots) - torch.arange(width, device=stay.device)
        index = order.topk(n, dim=1).indices  # type: ignore[arg-type]
        self.rows, self.places, self.stays = take(self.rows, index), self.places.gather(1, index), kept.gather(1, index)

    def drop(self, decision: Drop) -> None:
        leaving = self.alive & decision.leaving
        if not (self.keeps_prefix and self.head_tokens < self.slots):
            last = self.head_rows()
            self._parked = (
                last.masked_fill(leaving[:, : self.head_tokens, None], 0.0) if decision.zero_on_exit else last
            )
        self.alive = self.active = self.alive & ~leaving
        self._select(self.alive)

    def skip(self, decision: Skip) -> None:
        raise NotImplementedError("Tokens that sit out a block come back; `gathered` and `masked` do that.")

    def unskip(self) -> None:
        pass

    def merge(self, decision: Merge) -> None:
        into, scale = decision.target.gather(1, self.places), decision.source_weight.gather(1, self.places)
        position = torch.arange(self.places.shape[1], device=into.device).expand_as(self.places)
        place = torch.zeros_like(decision.target).scatter(1, self.places, position)  # [B, N] slot -> position
        joins = (into >= 0) if self.stays is None else (into >= 0) & self.stays
        target = torch.where(joins, place.gather(1, into.clamp_min(0)), position)
        moved = torch.where(joins[..., None], self.rows * scale[..., None].to(self.rows.dtype), 0.0)
        self._parked = self.head_rows()
        self.rows = torch.zeros_like(self.rows).scatter_add(1, target[..., None].expand_as(moved), moved)
        self.alive = self.active = self.alive & (decision.target == torch.arange(self.slots, device=into.device))
        self.size = self.size if decision.size is None else decision.size
        self._select(self.alive)

    def _weight(self) -> Tensor | None:
        """[B, n] of every row as a key: None for all ones, bool, or float32."""
        if self.size is None:
            return self.stays
        size = self.size.gather(1, self.places)
        return size if self.stays is None else size * self.stays

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        weight = self._weight()
        bias = None
        if weight is not None:  # an image without any key sees everything rather than divide by zero
            if weight.dtype == torch.bool:
                weight = weight | ~weight.any(-1, keepdim=True)
            else:
                weight = torch.where((weight > 0).any(-1, keepdim=True), weight, torch.ones_like(weight)).log()
            bias = weight[:, None, None, :].to(weight.dtype if weight.dtype == torch.bool else q.dtype)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return attention.fused(q, k, v, bias, dropout=dropout).transpose(1, 2)

    def row_slots(self) -> Tensor:
        return self.places

    def expand(self, values: Tensor) -> Tensor:
        return values[:, None].expand(-1, self.places.shape[1], *values.shape[1:])

    def _masked(self, values: Tensor) -> Tensor:
        if self.stays is None:
            return values
        mask = self.stays.reshape(self.stays.shape + (1,) * (values.ndim - 2))
        return torch.where(mask, values, torch.zeros_like(values))

    def to_grid(self, values: Tensor) -> Tensor:
        out = values.new_zeros((self.batch, self.slots, *values.shape[2:]))
        places = self.places.reshape(self.places.shape + (1,) * (values.ndim - 2))
        return out.scatter(1, places.expand_as(values), self._masked(values))

    def mean(self, values: Tensor, weight: Tensor | None = None) -> Tensor:
        w = (self.active.float() if weight is None else weight * self.active).gather(1, self.places)[..., None]
        return (self._masked(values).float() * w).sum(1) / w.sum(1).clamp_min(1.0 if weight is None else 1e-6)

    def query(self, q: Tensor, k: Tensor, v: Tensor, empty: Tensor) -> Tensor:
        weight = self._weight()
        weight = torch.ones(self.places.shape, device=q.device) if weight is None else weight
        out = attention.weighted(q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), weight)[:, :, 0]
        return torch.where(self.active.any(-1)[:, None, None], out, empty)

    def attention_rows(self, q: Tensor, k: Tensor, queries: str) -> Tensor:
        q, k, weight = q.transpose(1, 2), k.transpose(1, 2), self._weight()
        if queries == "class":  # nothing is received from a class token that has left; it comes first while it is here
            return self.to_grid(attention.probabilities(q[:, :, :1], k, weight)[:, :, 0].mean(1) * self.active[:, :1])
        a = attention.probabilities(q, k, weight).mean(1)
        a = a if self.stays is None else a * self.stays[..., None]
        return self.to_grid(a.sum(1) / self.active.sum(-1, keepdim=True).clamp_min(1))

    def similarity(self, k: Tensor) -> Similarity:
        image = torch.arange(self.batch, device=k.device)[:, None]
        return Cosines([(mean_key(k), image * self.slots + self.places)], self.active)

    def head_rows(self) -> Tensor:
        rows, places, stays = self.rows, self.places, self.stays
        if self.head_tokens < self.slots:  # who is live and read stands among the first
            rows, places = rows[:, : self.head_tokens], places[:, : self.head_tokens]
            stays = None if stays is None else stays[:, : self.head_tokens]
        if stays is None:
            return rows
        place = torch.where(stays & (places < self.head_tokens), places, self.head_tokens)[..., None].expand_as(rows)
        room = torch.cat([self._parked, self._parked[:, :1]], 1)  # one place more, for rows that are not read
        return room.scatter(1, place, rows.to(room.dtype))[:, : self.head_tokens]
