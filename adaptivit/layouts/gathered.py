"""Gathered: the same number of live rows in every image, so that all shapes are known beforehand. For policies that
keep a fixed number of tokens (MoD, A-MoD, DynamicViT, EViT, ToMe, fold, static depth). Where the fused kernels run,
GatheredOnDevice (device.py) does the same.

Shapes: B images, N slots, D width, H heads, d head width; n live tokens an image, rows are [B, n, D]. `places` [B, n]
says which slot each row is, in rising order, so that the tokens that a head reads come first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..decision import Drop, Merge, Skip
from ..kernels import attention, attention_scores, ragged_attention, scores_and_keys
from ..kernels.launch import run_on
from .base import Layout, same_count, take, widened
from .similarity import Cosines, Match, Similarity, SimilarityOnDevice, mean_key


class Gathered(Layout):
    name = "gathered"

    def __init__(self, x: Tensor, head_tokens: int) -> None:
        super().__init__(x, head_tokens)
        self.places = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])  # [B, n]
        self._whole = True  # no token has left: rows are the grid
        self._parked = x[:, :head_tokens]  # [B, head_tokens, D] last values of those that left
        self._starts: dict[int, Tensor] = {}
        self._aside: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None

    @property
    def empty(self) -> bool:
        return not self.places.shape[1]

    def _select(self, stay: Tensor, count: int | None) -> Tensor:
        """Keep the rows with stay [B, N]; returns their positions [B, n'] among the present rows."""
        n = same_count(stay, count)
        index = (~stay.gather(1, self.places)).long().argsort(dim=-1, stable=True)[:, :n]
        self.rows, self.places = take(self.rows, index), self.places.gather(1, index)
        self._whole = False
        return index

    def drop(self, decision: Drop) -> None:
        stay = self.alive & ~decision.leaving
        self._park(decision.leaving if decision.zero_on_exit else None)
        self._select(stay, decision.tokens_left)
        self.alive = self.active = stay

    def _park(self, zeroed: Tensor | None = None) -> None:
        """Remember the last value of tokens that leave and that the head will read, zeros for those of `zeroed`."""
        if self.keeps_prefix and self.head_tokens < self.slots:
            return
        last = self.head_rows()
        if zeroed is not None:
            last = last.masked_fill((self.alive & zeroed)[:, : self.head_tokens, None], 0.0)
        self._parked = last

    def skip(self, decision: Skip) -> None:
        rows, places = self.rows, self.places
        here = self.alive & ~decision.skipped
        index = self._select(here, decision.tokens_left)
        self._aside = (rows, places, index, decision.gate)
        self.active = here

    def unskip(self) -> None:
        if self._aside is None:
            return
        rows, places, index, gate = self._aside
        moved = self.rows
        if gate is not None:
            before = take(rows, index)
            moved = before + gate.gather(1, self.places)[..., None].to(before.dtype) * (moved - before)
        self.rows = rows.scatter(1, index[..., None].expand_as(moved), moved.to(rows.dtype))
        self.places, self.active, self._aside = places, self.alive, None

    def merge(self, decision: Merge) -> None:
        slot = torch.arange(self.slots, device=self.alive.device)
        into, scale = decision.target.gather(1, self.places), decision.source_weight.gather(1, self.places)
        position = torch.arange(self.places.shape[1], device=self.alive.device).expand_as(self.places)
        place = torch.zeros_like(decision.target).scatter(1, self.places, position)  # [B, N] slot -> position
        target = torch.where(into < 0, position, place.gather(1, into.clamp_min(0)))
        moved = widened(self.rows) * (scale * (into >= 0))[..., None]
        self._park()
        met = torch.zeros_like(moved).scatter_add(1, target[..., None].expand_as(moved), moved)
        self.rows = met.to(self.rows.dtype)
        stay = self.alive & (decision.target == slot)
        self._select(stay, decision.tokens_left)
        self.alive = self.active = stay
        self.size = self.size if decision.size is None else decision.size

    def _row_weight(self) -> Tensor | None:
        return None if self.size is None else self.size.gather(1, self.places)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        if not self.places.shape[1]:
            return v
        weight = self._row_weight()
        if run_on(q):
            flat = None if weight is None else weight.flatten()
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            out = ragged_attention.attend(q, k, v, self._offsets(), self.places.shape[1], flat)
            return out.unflatten(0, self.places.shape)
        bias = None if weight is None else weight.log().to(q.dtype)[:, None, None, :]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return attention.fused(q, k, v, bias, dropout=dropout).transpose(1, 2)

    def _offsets(self) -> Tensor:
        """[B + 1] where each image's rows begin."""
        n = self.places.shape[1]
        if n not in self._starts:
            self._starts[n] = n * torch.arange(self.batch + 1, device=self.places.device, dtype=torch.int32)
        return self._starts[n]

    def row_slots(self) -> Tensor:
        return self.places

    def expand(self, values: Tensor) -> Tensor:
        return values[:, None].expand(-1, self.places.shape[1], *values.shape[1:])

    def to_grid(self, values: Tensor) -> Tensor:
        shape = self.places.shape + (1,) * (values.ndim - 2)
        out = values.new_zeros((self.batch, self.slots, *values.shape[2:]))
        return out.scatter(1, self.places.reshape(shape).expand_as(values), values)

    def mean(self, values: Tensor, weight: Tensor | None = None) -> Tensor:
        if weight is None:
            return values.float().sum(1) / max(values.shape[1], 1)
        w = weight.gather(1, self.places)[..., None]
        return (values.float() * w).sum(1) / w.sum(1).clamp_min(1e-6)

    def query(self, q: Tensor, k: Tensor, v: Tensor, empty: Tensor) -> Tensor:
        if not self.places.shape[1]:
            return empty.expand(self.batch, -1, -1)
        weight = self._row_weight()
        weight = torch.ones(self.places.shape, device=q.device) if weight is None else weight
        return attention.weighted(q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), weight)[:, :, 0]

    def attention_rows(self, q: Tensor, k: Tensor, queries: str) -> Tensor:
        if not self.places.shape[1]:
            return self.active.float()
        if run_on(q):
            look = scores_and_keys.class_row if queries == "class" else attention_scores.received
            weight = self._row_weight()
            flat = None if weight is None else weight.flatten()
            row = look(q.flatten(0, 1), k.flatten(0, 1), self._offsets(), self.places.shape[1], flat)
            row = self.to_grid(row.view(self.places.shape))
            return row * self.active[:, :1] if queries == "class" else row
        q, k, weight = q.transpose(1, 2), k.transpose(1, 2), self._row_weight()
        if queries == "class":  # nothing is received from a class token that has left
            there = self.places[:, :1] == 0
            return self.to_grid(attention.probabilities(q[:, :, :1], k, weight).mean((1, 2)) * there)
        return self.to_grid(attention.probabilities(q, k, weight).mean((1, 2)))

    def similarity(self, k: Tensor) -> Similarity:
        cells = torch.arange(self.batch, device=k.device)[:, None] * self.slots + self.places
        if run_on(k):
            return SimilarityOnDevice(k.flatten(0, 1), cells.flatten().int(), self._offsets(), self.active)
        return Cosines([(mean_key(k), cells)], self.active)

    def match(self, k: Tensor) -> Match:
        if run_on(k):
            cells = torch.arange(self.batch, device=k.device)[:, None] * self.slots + self.places
            return SimilarityOnDevice(k.flatten(0, 1), cells.flatten().int(), self._offsets(), self.active)
        return super().match(k)

    def alive_rows(self) -> Tensor:
        return self.rows

    def head_rows(self) -> Tensor:
        if self._whole or (self.keeps_prefix and self.head_tokens < self.slots and self._aside is None):
            return self.rows[:, : self.head_tokens]
        out = self._parked
        if self._aside is not None:
            out = self._put(out, self._aside[0], self._aside[1])
        if self.empty and not torch.is_grad_enabled():
            return out
        return self._put(out, self.rows, self.places)

    def _put(self, out: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """out [B, head_tokens, D] with those of the rows in it whose slots the head reads."""
        place = places[:, : self.head_tokens, None].clamp_max(self.head_tokens).expand(-1, -1, out.shape[-1])
        room = torch.cat([out, out[:, :1]], 1)  # one place more, for rows that the head does not read
        return room.scatter(1, place, rows[:, : self.head_tokens].to(out.dtype))[:, : self.head_tokens]
