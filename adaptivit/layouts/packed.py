"""Packed: the rows of live tokens only, image after image, no padding. What halts is really gone.

Shapes: B images, N slots, D width, H heads, d head width; M live rows in all, rows are [M, D], sorted by cell
(cell = image * N + slot). Attention runs per image, and at once for images of equal length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..decision import Drop, Merge, Skip
from ..ops import attention
from .base import Layout


class Packed(Layout):
    name = "packed"

    def __init__(self, x: Tensor, read: int) -> None:
        super().__init__(x, read)
        batch, slots, width = x.shape
        self.rows = x.reshape(batch * slots, width)
        self.cells = torch.arange(batch * slots, device=x.device)  # [M]
        self.lengths = [slots] * batch  # on the host
        self._parked = x[:, :read]  # [B, read, D] last values of those that left
        self._aside: tuple[Tensor, Tensor, list[int], Tensor, Tensor | None] | None = None

    def _select(self, stay: Tensor) -> Tensor:
        """Keep the rows with stay [B, N]; returns their index [M'] among the present rows."""
        index = stay.flatten()[self.cells].nonzero()[:, 0]
        self.rows, self.cells = self.rows[index], self.cells[index]
        self.lengths = stay.sum(-1).tolist()
        return index

    def drop(self, decision: Drop) -> None:
        leaving = decision.leaving & self.live
        stay = self.live & ~leaving
        self._park(leaving, decision.zeroed)
        if self.weight is not None:  # a Drop's own weight is 0 or 1: the same as being here or not
            self.weight = self.weight.masked_fill(leaving, 0.0)
        self._select(stay)
        self.live = self.here = stay

    def _park(self, leaving: Tensor, zeroed: bool) -> None:
        """Remember the last value of tokens that leave and that the head will read."""
        wanted = leaving[:, : self.read]
        if wanted.any():
            index = leaving.clone()
            index[:, self.read :] = False
            last = self.rows[index.flatten()[self.cells]]
            self._parked = self._parked.clone()
            self._parked[wanted] = torch.zeros_like(last) if zeroed else last

    def sit_out(self, decision: Skip) -> None:
        here = self.live & ~decision.sitting
        rows, cells, lengths = self.rows, self.cells, self.lengths
        self._aside = (rows, cells, lengths, self._select(here), decision.gate)
        self.here = here

    def come_back(self) -> None:
        if self._aside is None:
            return
        rows, cells, lengths, index, gate = self._aside
        moved = self.rows
        if gate is not None:
            before = rows[index]
            moved = before + gate.flatten()[self.cells][:, None].to(before.dtype) * (moved - before)
        self.rows = rows.index_copy(0, index, moved.to(rows.dtype))
        self.cells, self.lengths, self.here, self._aside = cells, lengths, self.live, None

    def merge(self, decision: Merge) -> None:
        batch, slots = self.live.shape
        place = torch.full((batch * slots,), -1, device=self.cells.device)
        place[self.cells] = torch.arange(len(self.cells), device=self.cells.device)
        image = self.cells // slots
        target = place[image * slots + decision.into.flatten()[self.cells]]
        moved = self.rows * decision.scale.flatten()[self.cells][:, None].to(self.rows.dtype)
        stay = self.live & (decision.into == torch.arange(slots, device=self.live.device))
        self._park(self.live & ~stay, zeroed=False)
        self.rows = torch.zeros_like(self.rows).index_add(0, target, moved)
        self._select(stay)
        self.live = self.here = stay
        self.weight = decision.weight * stay

    def _images(self) -> list[tuple[int, list[int]]]:
        """(length, row offsets) of the images that have rows, images of equal length together."""
        buckets: dict[int, list[int]] = {}
        start = 0
        for length in self.lengths:
            if length:
                buckets.setdefault(length, []).append(start)
            start += length
        return list(buckets.items())

    def _bias(self, length: int, starts: list[int], row_weight: Tensor | None) -> Tensor | None:
        """[b, 1, 1, n] log w, where tokens have sizes."""
        if row_weight is None:
            return None
        return torch.stack([row_weight[s : s + length] for s in starts]).log()[:, None, None, :]

    def _row_weight(self) -> Tensor | None:
        return None if self.weight is None else self.weight.flatten()[self.cells]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        buckets, weight = self._images(), self._row_weight()
        if not buckets:
            return v
        parts: list[tuple[int, Tensor]] = []
        for n, starts in buckets:
            if n * len(starts) == len(q):  # one length for all: no copy at all
                qb, kb, vb = (t.unflatten(0, (len(starts), n)).transpose(1, 2) for t in (q, k, v))
            elif len(starts) == 1:
                qb, kb, vb = (t[None, starts[0] : starts[0] + n].transpose(1, 2) for t in (q, k, v))
            else:
                qb, kb, vb = (torch.stack([t[s : s + n] for s in starts]).transpose(1, 2) for t in (q, k, v))
            bias = self._bias(n, starts, weight)
            out = attention.fused(qb, kb, vb, None if bias is None else bias.to(qb.dtype), dropout=dropout)
            out = out.transpose(1, 2)
            if n * len(starts) == len(q):
                return out.flatten(0, 1)
            parts.extend(zip(starts, out.unbind(0), strict=True))
        return torch.cat([part for _, part in sorted(parts, key=lambda p: p[0])])

    def add(self, delta: Tensor) -> None:
        self.rows = self.rows + delta

    def expand(self, values: Tensor) -> Tensor:
        return values[self.cells // self.slots]

    def grid(self, values: Tensor) -> Tensor:
        out = values.new_zeros((self.batch * self.slots, *values.shape[1:]))
        return out.index_copy(0, self.cells, values).unflatten(0, (self.batch, self.slots))

    def mean(self, values: Tensor) -> Tensor:
        image = self.cells // self.slots
        total = values.new_zeros(self.batch, values.shape[1], dtype=torch.float32)
        total = total.index_add(0, image, values.float())
        return total / self.here.sum(-1, keepdim=True).clamp_min(1)

    def query(self, q: Tensor, k: Tensor, v: Tensor, empty: Tensor) -> Tensor:
        weight, start, out = self._row_weight(), 0, []
        for image, n in enumerate(self.lengths):
            if n == 0:
                out.append(empty)
                continue
            rows = slice(start, start + n)
            w = torch.ones(1, n, device=q.device) if weight is None else weight[None, rows]
            keys, values = k[None, rows].transpose(1, 2), v[None, rows].transpose(1, 2)
            out.append(attention.weighted(q[image][None, :, None], keys, values, w)[0, :, 0])
            start += n
        return torch.stack(out)

    def attention_rows(self, q: Tensor, k: Tensor, queries: str) -> Tensor:
        weight, received = self._row_weight(), q.new_zeros(len(q), dtype=torch.float32)
        for n, starts in self._images():
            for s in starts:
                rows = slice(s, s + n)
                if queries == "class" and int(self.cells[s]) % self.slots:
                    continue  # the class token itself has left
                queried = q[None, s : s + 1] if queries == "class" else q[None, rows]
                w = None if weight is None else weight[None, rows]
                a = attention.probabilities(queried.transpose(1, 2), k[None, rows].transpose(1, 2), w)
                received[rows] = a.mean((0, 1, 2))
        return self.grid(received)

    def leading(self) -> Tensor:
        wanted = self.live[:, : self.read]
        now = self.grid(self.rows)[:, : self.read] if self.read == self.slots else self._first()
        return torch.where(wanted[..., None], now, self._parked)

    def _first(self) -> Tensor:
        """[B, read, D] the present rows of the first slots, without building the whole grid."""
        slot = self.cells % self.slots
        index = (slot < self.read).nonzero()[:, 0]
        out = self.rows.new_zeros(self.batch * self.read, self.rows.shape[1])
        where = self.cells[index] // self.slots * self.read + slot[index]
        return out.index_copy(0, where, self.rows[index]).unflatten(0, (self.batch, self.read))
