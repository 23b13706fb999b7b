"""Packed: the rows of live tokens only, image after image, no padding. What halts is really gone.

Shapes: B images, N slots, D width, H heads, d head width; M live rows in all, rows are [M, D]. `cells` [M] says whose
they are: cell = image * N + slot. Neighbours of equal length attend at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..decision import Drop, Merge, Skip
from ..kernels import attention
from .base import Layout, widened
from .similarity import Cosines, Similarity, mean_key

FEW = 32  # images that keep their order


class Packed(Layout):
    name = "packed"
    static_shapes = False

    def __init__(self, x: Tensor, head_tokens: int) -> None:
        super().__init__(x, head_tokens)
        batch, slots, width = x.shape
        self.rows = x.reshape(batch * slots, width)
        self.cells = torch.arange(batch * slots, device=x.device)  # [M]
        self.lengths = [slots] * batch  # on the host
        self._parked = x[:, :head_tokens]  # [B, head_tokens, D] last values of those that left
        self._aside: tuple[Tensor, Tensor, list[int], Tensor, Tensor | None] | None = None

    def _select(self, stay: Tensor) -> Tensor:
        """Keep the rows with stay [B, N]; returns their index [M'] among the present rows.

        Many images are put in the order of their length: those of equal length are then neighbours, and attention
        takes them at once. Of few, hardly any two are equally long.
        """
        if self.batch <= FEW:  # in as few calls as can be: one image is mostly calls
            index = stay.flatten().index_select(0, self.cells).nonzero()[:, 0]
            self.rows, self.cells = self.rows.index_select(0, index), self.cells.index_select(0, index)
            self.lengths = [len(index)] if self.batch == 1 else stay.sum(-1).tolist()
            return index
        lengths = stay.sum(-1)
        order = lengths.argsort(stable=True)
        position, slot = stay[order].nonzero(as_tuple=True)
        cells = order[position] * self.slots + slot
        place = torch.empty(stay.numel(), dtype=torch.long, device=cells.device)
        place[self.cells] = torch.arange(len(self.cells), device=cells.device)
        index = place[cells]
        self.rows, self.cells = self.rows[index], cells
        self.lengths = lengths[order].tolist()
        return index

    def drop(self, decision: Drop) -> None:
        stay = self.alive & ~decision.leaving
        self._park(stay, decision.zero_on_exit)
        self._select(stay)  # a Drop's own weight is 0 or 1: the same as being here or not
        self.alive = self.active = stay

    def _park(self, stay: Tensor, zeroed: bool) -> None:
        """Remember the last value of tokens that leave and that the head will read."""
        if self.keeps_prefix and self.head_tokens < self.slots:
            return
        leaving = self.alive & ~stay
        if leaving[:, : self.head_tokens].any():
            index = leaving.flatten()[self.cells].nonzero()[:, 0]
            last = torch.zeros_like(self.rows[index]) if zeroed else self.rows[index]
            parked = self._put(self._parked.flatten(0, 1), last, self.cells[index])
            self._parked = parked.unflatten(0, (self.batch, self.head_tokens))

    def skip(self, decision: Skip) -> None:
        here = self.alive & ~decision.skipped
        rows, cells, lengths = self.rows, self.cells, self.lengths
        self._aside = (rows, cells, lengths, self._select(here), decision.gate)
        self.active = here

    def unskip(self) -> None:
        if self._aside is None:
            return
        rows, cells, lengths, index, gate = self._aside
        moved = self.rows
        if gate is not None:
            before = rows[index]
            moved = before + gate.flatten()[self.cells][:, None].to(before.dtype) * (moved - before)
        self.rows = rows.index_copy(0, index, moved.to(rows.dtype))
        self.cells, self.lengths, self.active, self._aside = cells, lengths, self.alive, None

    def merge(self, decision: Merge) -> None:
        batch, slots = self.alive.shape
        place = torch.zeros(batch * slots, dtype=torch.long, device=self.cells.device)
        place[self.cells] = torch.arange(len(self.cells), device=self.cells.device)
        into, scale = decision.target.flatten()[self.cells], decision.source_weight.flatten()[self.cells]
        target = place[torch.where(into < 0, self.cells, self.cells // slots * slots + into)]
        moved = widened(self.rows) * (scale * (into >= 0))[:, None]
        stay = self.alive & (decision.target == torch.arange(slots, device=self.alive.device))
        self._park(stay, zeroed=False)
        self.rows = torch.zeros_like(moved).index_add(0, target, moved).to(self.rows.dtype)
        self._select(stay)
        self.alive = self.active = stay
        self.size = self.size if decision.size is None else decision.size

    def _buckets(self) -> Iterator[tuple[slice, int, int]]:
        """(rows, images, length) of each run of images of one length."""
        start = 0
        for length, run in itertools.groupby(self.lengths):
            images = len(list(run))
            if length:
                yield slice(start, start + images * length), images, length
            start += images * length

    def _row_weight(self) -> Tensor | None:
        return None if self.size is None else self.size.flatten()[self.cells]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        weight, parts = self._row_weight(), []
        if self.batch <= FEW and len(set(self.lengths)) > 1:
            return self._attend_one_by_one(q, k, v, weight, dropout)
        for rows, images, n in self._buckets():
            qb, kb, vb = (t[rows].unflatten(0, (images, n)).transpose(1, 2) for t in (q, k, v))
            bias = None if weight is None else weight[rows].log().to(q.dtype).reshape(images, 1, 1, n)
            parts.append(attention.fused(qb, kb, vb, bias, dropout=dropout).transpose(1, 2).flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else v

    def _attend_one_by_one(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, dropout: float) -> Tensor:
        """The same for images that all differ: cut in one go, since on a CPU every little call counts."""
        bias = None if weight is None else weight.log().to(q.dtype)[None, None, None].split(self.lengths, -1)
        qs, ks, vs = (t.transpose(0, 1)[None].split(self.lengths, 2) for t in (q, k, v))  # [1, H, n, d] each
        parts = [
            attention.fused(qs[i], ks[i], vs[i], None if bias is None else bias[i], dropout=dropout).transpose(1, 2)[0]
            for i, n in enumerate(self.lengths)
            if n
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def row_slots(self) -> Tensor:
        return self.cells % self.slots

    def expand(self, values: Tensor) -> Tensor:
        return values[self.cells // self.slots]

    def to_grid(self, values: Tensor) -> Tensor:
        out = values.new_zeros((self.batch * self.slots, *values.shape[1:]))
        return out.index_copy(0, self.cells, values).unflatten(0, (self.batch, self.slots))

    def mean(self, values: Tensor, weight: Tensor | None = None) -> Tensor:
        image = self.cells // self.slots
        w = (
            torch.ones(len(values), 1, device=values.device)
            if weight is None
            else weight.flatten()[self.cells][:, None]
        )
        total = torch.zeros(self.batch, values.shape[1] + 1, device=values.device)
        total = total.index_add(0, image, torch.cat([values.float() * w, w], 1))
        return total[:, :-1] / total[:, -1:].clamp_min(1.0 if weight is None else 1e-6)

    def query(self, q: Tensor, k: Tensor, v: Tensor, empty: Tensor) -> Tensor:
        weight = self._row_weight()
        out = empty.expand(self.batch, -1, -1)
        for rows, images, n in self._buckets():
            image = self.cells[rows].reshape(images, n)[:, 0] // self.slots
            kb, vb = (t[rows].unflatten(0, (images, n)).transpose(1, 2) for t in (k, v))
            w = torch.ones(images, n, device=q.device) if weight is None else weight[rows].reshape(images, n)
            out = out.index_copy(0, image, attention.weighted(q[image][:, :, None], kb, vb, w)[:, :, 0])
        return out

    def attention_rows(self, q: Tensor, k: Tensor, queries: str) -> Tensor:
        weight, received = self._row_weight(), []
        for rows, images, n in self._buckets():
            qb, kb = (t[rows].unflatten(0, (images, n)).transpose(1, 2) for t in (q, k))
            w = None if weight is None else weight[rows].reshape(images, n)
            if queries == "class":  # nothing is received from a class token that has left
                there = self.cells[rows].reshape(images, n)[:, :1] % self.slots == 0
                a = attention.probabilities(qb[:, :, :1], kb, w).mean((1, 2)) * there
            else:
                a = attention.probabilities(qb, kb, w).mean((1, 2))
            received.append(a.flatten())
        return self.to_grid(torch.cat(received) if received else q.new_zeros(0, dtype=torch.float32))

    def similarity(self, k: Tensor) -> Similarity:
        keys, parts = mean_key(k), []
        for rows, images, n in self._buckets():
            parts.append((keys[rows].unflatten(0, (images, n)), self.cells[rows].reshape(images, n)))
        return Cosines(parts, self.active)

    def head_rows(self) -> Tensor:
        if self.keeps_prefix and self.head_tokens < self.slots and self.batch <= FEW and self._aside is None:
            if self.batch == 1:
                return self.rows[None, : self.head_tokens]
            starts = torch.tensor([0, *itertools.accumulate(self.lengths[:-1])], device=self.cells.device)
            return self.rows[starts[:, None] + torch.arange(self.head_tokens, device=self.cells.device)]
        out = self._parked.flatten(0, 1)
        if self._aside is not None:
            out = self._put(out, self._aside[0], self._aside[1])
        return self._put(out, self.rows, self.cells).unflatten(0, (self.batch, self.head_tokens))

    def _put(self, out: Tensor, rows: Tensor, cells: Tensor) -> Tensor:
        """out [B * read, D] with those of the rows in it whose slots the head reads."""
        slot = cells % self.slots
        index = (slot < self.head_tokens).nonzero()[:, 0]
        return out.index_copy(0, cells[index] // self.slots * self.head_tokens + slot[index], rows[index].to(out.dtype))
