"""Packed and gathered on the device: rows image after image without padding; the host waits for no count.

Shapes: B images, N slots, D width, H heads, d head width; R rows that there is room for. `cells` [R] gives their
slots in the grid, `place` [B N] the rows of the slots (kernels/pack_index.py). Packed: R = B N, the first offsets[B]
are in use. Gathered: R = B n, n rows of every image.

Rows move when the plan says so: a token that has left between two moves keeps its row and has weight 0 as a key, which
changes nothing for the others. A move itself costs no pass: the next norm reads the rows from where they were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..decision import Drop, Merge, Skip
from ..kernels import attention, attention_scores, constants, ragged_attention, scores_and_keys
from ..kernels.launch import KernelRows, Log2, run_on
from ..kernels.merge import merge
from ..kernels.pack_index import pack_index
from ..kernels.unskip import unskip
from .base import Layout, RowSchedule, same_count
from .similarity import Match, Similarity, SimilarityOnDevice


class PackedOnDevice(Layout):
    name = "packed"
    _held: Tensor  # [R, D] rows, moved or still to be moved
    _index: Tensor | None  # [R] where each row is now, while a move is pending
    full = staticmethod(constants.filled)

    def __init__(self, x: Tensor, head_tokens: int, plan: RowSchedule | None = None) -> None:
        super().__init__(x, head_tokens)
        batch, slots, width = x.shape
        self.plan = RowSchedule() if plan is None else plan
        self.put(x.reshape(batch * slots, width))
        self.cells = constants.steps(x, batch * slots, 1)
        self.place = self.cells
        self.offsets = constants.steps(x, batch * slots + 1, slots)
        self._counted = False  # some rows are behind the live ones
        self._thin = False  # some rows are of tokens that have left
        self._moved = False  # rows are not where the grid has them
        self._sizes: Log2 | None = None  # of the rows as they are
        self._known: tuple[Tensor, Tensor] | None = None  # active tokens [B, N], and the same for every row [R]
        self._parked = x[:, :head_tokens]  # [B, head_tokens, D] last values of those that left
        self._aside: tuple[Tensor, Tensor, Tensor, Tensor, tuple[bool, bool, bool], Tensor | None] | None = None

    @property
    def rows(self) -> Tensor:  # type: ignore[override]
        """[R, D] where they belong, though the move may still be pending."""
        return self._held if self._index is None else self._held[self._index]

    def put(self, rows: Tensor) -> None:
        self._held, self._index = rows, None

    def kernel_rows(self) -> KernelRows:
        """The rows for the fused kernels (fused.py)."""
        expected = self.plan.expected(self.layer, self.batch * self.slots)
        count = self.offsets[-1:] if self._counted else None
        return KernelRows(self._held, self._index, count, expected)

    @property
    def where(self) -> tuple[Tensor | None, Tensor | None]:
        """cells and place, where rows have moved."""
        return (self.cells, self.place) if self._moved else (None, None)

    def remember(self, active: Tensor, rows: Tensor) -> None:
        """The tokens [B, N] that are active once others have left, and the same by row [R]."""
        self._known = (active, rows)

    @property
    def longest(self) -> int:
        """At least as many rows as any image has."""
        return self.slots

    def _room(self, stay: Tensor, count: int | None) -> int | None:
        """How many tokens of an image stay, where the host knows it and it is the same for all."""
        return None

    def _select(self, stay: Tensor, count: int | None) -> None:
        self.place, self.cells, self.offsets, index = pack_index(stay, self.place, self._room(stay, count))
        self._index = index if self._index is None else self._index[index]
        self._counted = self._moved = True
        self._thin = False
        self._known = self._sizes = None

    def drop(self, decision: Drop) -> None:
        stay = self.alive > decision.leaving if decision.staying is None else decision.staying  # one kernel or none
        self._park(decision.leaving if decision.zero_on_exit else None)
        self.alive = self.active = stay
        if self.plan.moves_after(self.layer):
            self._select(stay, decision.tokens_left)
        else:
            self._thin = True

    def _park(self, zeroed: Tensor | None = None) -> None:
        """Remember the last value of tokens that leave and that the head will read, zeros for those of `zeroed`."""
        if self.keeps_prefix and self.head_tokens < self.slots:
            return
        last = self.head_rows()
        if zeroed is not None:
            last = last.masked_fill((self.alive & zeroed)[:, : self.head_tokens, None], 0.0)
        self._parked = last

    def skip(self, decision: Skip) -> None:
        here = self.alive & ~decision.skipped
        kind = (self._counted, self._thin, self._moved)
        self._aside = (self.rows, self.cells, self.place, self.offsets, kind, decision.gate)
        self._select(here, decision.tokens_left)
        self.active = here

    def unskip(self) -> None:
        if self._aside is None:
            return
        rows, cells, place, offsets, kind, gate = self._aside
        count = offsets[-1:] if kind[0] else None
        self.put(unskip(rows, cells, self.rows, self.place, gate, count))
        self.cells, self.place, self.offsets = cells, place, offsets
        self._known = self._sizes = None
        self._counted, self._thin, self._moved = kind
        self.active, self._aside = self.alive, None

    def merge(self, decision: Merge) -> None:
        stay = self.alive & (decision.target == torch.arange(self.slots, device=self.alive.device))
        self._park()
        size = self.size if decision.size is None else decision.size
        room, known = self._room(stay, decision.tokens_left), decision.left_counts
        left = known[1] if known is not None and known[0] is self.alive else None
        given = (self.alive, decision.target, decision.source_weight, self.place)
        merged, weight = merge(self.rows, *given, room, size, left)
        rows, stay, self.place, self.cells, self.offsets = merged
        self.put(rows)
        self.alive = self.active = stay
        self._counted = self._moved = True
        self._thin = False
        self.size = size
        self._sizes = None if weight is None else Log2(weight)

    def _typical(self) -> int:
        """Rows that are expected of an image."""
        return self.plan.expected(self.layer, self.batch * self.slots) // self.batch

    def _row_weight(self) -> Tensor | Log2 | None:
        """[R] of every row as a key: None for all ones, bool, float32, or what is known of its logarithm."""
        if self.size is None and not self._thin:
            return None
        if self._sizes is not None and not self._thin:
            return self._sizes
        if self.size is None and self._known is not None and self._known[0] is self.active:
            return self._known[1]
        weight = self.active if self.size is None else self.size * self.active if self._thin else self.size
        return weight.flatten()[self.cells] if self._moved else weight.flatten()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        return ragged_attention.attend(q, k, v, self.offsets, self.longest, self._row_weight(), self._typical())

    def expand(self, values: Tensor) -> Tensor:
        return values[self.cells // self.slots]

    def to_grid(self, values: Tensor) -> Tensor:
        if self._moved:
            values = values[self.place.clamp_min(0)]
        values = values.unflatten(0, (self.batch, self.slots))
        if not (self._moved or self._thin):
            return values
        mask = self.active.reshape(self.active.shape + (1,) * (values.ndim - 2))
        return torch.where(mask, values, 0)

    def mean(self, values: Tensor, weight: Tensor | None = None) -> Tensor:
        w = (self.active.float() if weight is None else weight * self.active)[..., None]
        return (self.to_grid(values).float() * w).sum(1) / w.sum(1).clamp_min(1.0 if weight is None else 1e-6)

    def _grid_weight(self) -> Tensor:
        return self.active.float() if self.size is None else self.size * self.active

    def query(self, q: Tensor, k: Tensor, v: Tensor, empty: Tensor) -> Tensor:
        k, v = (self.to_grid(t).transpose(1, 2) for t in (k, v))
        out = attention.weighted(q[:, :, None], k, v, self._grid_weight())[:, :, 0]
        return torch.where(self.active.any(-1)[:, None, None], out, empty)

    def attention_rows(self, q: Tensor, k: Tensor, queries: str) -> Tensor:
        look = scores_and_keys.class_row if queries == "class" else attention_scores.received
        there = self.active[:, :1] if queries == "class" else None
        row = self.to_grid(look(q, k, self.offsets, self.longest, self._row_weight()))
        return row if there is None else row * there

    def similarity(self, k: Tensor) -> Similarity:
        return SimilarityOnDevice(k, self.cells, self.offsets, self.active)

    def class_row_and_similarity(self, q: Tensor, k: Tensor) -> tuple[Tensor, Similarity]:
        if not run_on(q) or not self.longest:
            return super().class_row_and_similarity(q, k)
        given = (q, k, self.cells, self.offsets, self.longest, self._row_weight(), self.slots)
        row, units = scores_and_keys.class_row_and_unit_keys(*given)
        similarity = SimilarityOnDevice(k, self.cells, self.offsets, self.active, units)
        return self.to_grid(row) * self.active[:, :1], similarity

    def match(self, k: Tensor) -> Match:
        return SimilarityOnDevice(k, self.cells, self.offsets, self.active)

    def head_rows(self) -> Tensor:
        now = self._first(self._held, self._index, self.place)
        if self._aside is not None:
            rows, _, place, *_ = self._aside
            before = self._first(rows, None, place)
            now = torch.where(self.active[:, : self.head_tokens, None], now, before)
        if self.keeps_prefix and self.head_tokens < self.slots:
            return now
        return torch.where(self.alive[:, : self.head_tokens, None], now, self._parked.to(now.dtype))

    def _first(self, held: Tensor, index: Tensor | None, place: Tensor) -> Tensor:
        """[B, head_tokens, D] the first slots' rows; anything for those that have none."""
        if not len(held if index is None else index):
            return held.new_zeros(self.batch, self.head_tokens, held.shape[1])
        place = place.view(self.batch, self.slots)[:, : self.head_tokens].clamp_min(0)
        return held[place if index is None else index[place]]


class GatheredOnDevice(PackedOnDevice):
    """The same with as many rows of every image (gathered.py): all are live, and all shapes are known beforehand."""

    name = "gathered"

    @property
    def longest(self) -> int:
        return len(self.cells) // self.batch

    def _room(self, stay: Tensor, count: int | None) -> int | None:
        return same_count(stay, count)

    def kernel_rows(self) -> KernelRows:
        return KernelRows(self._held, self._index, expected=len(self.cells))

    def _typical(self) -> int:
        return self.longest

    def _each(self, rows: Tensor) -> Tensor:
        """[R, ...] -> [B, n, ...]"""
        return rows.unflatten(0, (self.batch, self.longest))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        return super().attend(q, k, v) if self.longest else v

    def attention_rows(self, q: Tensor, k: Tensor, queries: str) -> Tensor:
        return super().attention_rows(q, k, queries) if self.longest else self.active.float()

    def to_grid(self, values: Tensor) -> Tensor:
        if self.longest:
            return super().to_grid(values)
        return values.new_zeros(self.batch, self.slots, *values.shape[1:])

    def expand(self, values: Tensor) -> Tensor:
        return values[:, None].expand(-1, self.longest, *values.shape[1:]).flatten(0, 1)

    def mean(self, values: Tensor, weight: Tensor | None = None) -> Tensor:
        values = self._each(values).float()
        if weight is None:
            return values.sum(1) / max(self.longest, 1)
        w = self._each(weight.flatten()[self.cells])[..., None]
        return (values * w).sum(1) / w.sum(1).clamp_min(1e-6)

    def alive_rows(self) -> Tensor:
        return self._each(self.rows)


class HeadRows(GatheredOnDevice):
    """What the head reads of another layout, when nothing else is asked for any more: for the last MLP, on any device.

    rows are [B * read, D].
    """

    def __init__(self, of: Layout) -> None:
        self.name, self.layer, self.head_tokens = of.name, of.layer, of.head_tokens
        self.alive = self.active = of.alive
        self.size = self._aside = None
        self.put(of.head_rows().flatten(0, 1).contiguous())

    def kernel_rows(self) -> KernelRows:
        return KernelRows(self._held, expected=len(self._held))

    def head_rows(self) -> Tensor:
        return self._held.unflatten(0, (self.batch, self.head_tokens))
