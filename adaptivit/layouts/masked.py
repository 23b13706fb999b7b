"""Masked: every row stays where it is and is computed; masks decide what counts. For training, and as the reference.

Shapes: B images, N slots, D width, H heads, d head width; rows are [B, N, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..decision import Drop, Merge, Skip
from ..kernels import attention
from ..kernels.constants import steps
from ..kernels.launch import run_on
from .base import Layout, widened
from .similarity import Cosines, Similarity, SimilarityOnDevice, mean_key


class Masked(Layout):
    name = "masked"
    drops_rows = False

    def __init__(self, x: Tensor, head_tokens: int) -> None:
        super().__init__(x, head_tokens)
        self._whole = True  # no token has left or sits out: masks would change nothing
        self._before: tuple[Tensor, Skip] | None = None
        self._presence: Tensor | None = None  # [B, N] 0/1 with a gradient of the policy's choice
        self._own = True

    def drop(self, decision: Drop) -> None:
        leaving = decision.leaving & self.alive
        self._presence, self._own = decision.key_weight, decision.self_key_grad
        if decision.zero_on_exit:
            self.rows = self.rows.masked_fill(leaving[..., None], 0.0)
        self.alive = self.active = self.alive & ~leaving
        self._whole = False

    def skip(self, decision: Skip) -> None:
        self._before = (self.rows, decision)
        self.active = self.alive & ~decision.skipped

    def unskip(self) -> None:
        if self._before is None:
            return
        before, decision = self._before
        if decision.gate is not None:
            gated = before + decision.gate[..., None].to(before.dtype) * (self.rows - before)
            self.rows = torch.where(self.active[..., None], gated, before)
        self.active, self._before = self.alive, None

    def merge(self, decision: Merge) -> None:
        slot = torch.arange(self.slots, device=self.rows.device)
        nowhere = decision.target < 0
        into = torch.where(nowhere, slot, decision.target)
        scale = decision.source_weight * (self.alive & ~nowhere)
        moved = widened(self.rows) * scale[..., None]
        met = torch.zeros_like(moved).scatter_add(1, into[..., None].expand_as(moved), moved).to(self.rows.dtype)
        self.alive = self.active = self.alive & (decision.target == slot)
        self.rows = torch.where(self.alive[..., None], met, self.rows)
        self._presence, self._own = decision.key_weight, decision.self_key_grad
        self.size = self.size if decision.size is None else decision.size
        self._whole = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        weight = self._key_weight()
        if weight is None:
            out = attention.fused(q, k, v, dropout=dropout)
        elif weight.dtype == torch.bool:
            # an image without any key: its rows are frozen, so let them see everything rather than divide by zero
            mask = weight | ~weight.any(-1, keepdim=True)
            out = attention.fused(q, k, v, mask[:, None, None, :], dropout=dropout)
        elif weight.requires_grad:
            out = attention.weighted(q, k, v, weight, dropout=dropout, own=self._own)
        else:
            weight = torch.where((weight > 0).any(-1, keepdim=True), weight, torch.ones_like(weight))  # as above
            out = attention.fused(q, k, v, weight.log().to(q.dtype)[:, None, None, :], dropout=dropout)
        return out.transpose(1, 2)

    def _key_weight(self) -> Tensor | None:
        """[B, N]: None for all ones, bool for 0/1 without a gradient, else a float."""
        if self._whole and self._before is None:
            return None
        taught = self._presence if self._presence is not None and self._presence.requires_grad else None
        if taught is None:  # without a gradient, presence is just `here`
            return self.active if self.size is None else self.size * self.active
        # a token that has left keeps the gradient of its weight: that tells it that it was needed
        weight = taught if self._before is None else taught * ~self._before[1].skipped
        return weight if self.size is None else weight * self.size

    def active_rows(self) -> Tensor | None:
        return None if self._whole and self._before is None else self.active

    def row_slots(self) -> Tensor:
        return torch.arange(self.slots, device=self.rows.device).expand(self.alive.shape)

    def expand(self, values: Tensor) -> Tensor:
        return values[:, None].expand(-1, self.slots, *values.shape[1:])

    def to_grid(self, values: Tensor) -> Tensor:
        mask = self.active.reshape(self.active.shape + (1,) * (values.ndim - 2))
        return torch.where(mask, values, torch.zeros_like(values))

    def mean(self, values: Tensor, weight: Tensor | None = None) -> Tensor:
        w = (self.active.float() if weight is None else weight)[..., None]
        return (values.float() * w).sum(1) / w.sum(1).clamp_min(1.0 if weight is None else 1e-6)

    def query(self, q: Tensor, k: Tensor, v: Tensor, empty: Tensor) -> Tensor:
        weight = self._key_weight()
        weight = self.active if weight is None else weight
        out = attention.weighted(q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), weight)[:, :, 0]
        return torch.where(self.active.any(-1)[:, None, None], out, empty)

    def attention_rows(self, q: Tensor, k: Tensor, queries: str) -> Tensor:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if queries == "class":
            row = attention.probabilities(q[:, :, :1], k, self._key_weight())[:, :, 0].mean(1)
            return self.to_grid(row * self.active[:, :1])
        a = attention.probabilities(q, k, self._key_weight()) * self.active[:, None, :, None]
        count = self.active.sum(-1).clamp_min(1)
        return self.to_grid(a.mean(1).sum(1) / count[:, None])

    def similarity(self, k: Tensor) -> Similarity:
        if k.requires_grad and run_on(k):  # training; as the reference, masked stays what PyTorch computes
            cells, offsets = (steps(k, self.alive.numel() + end, step) for end, step in ((0, 1), (1, self.slots)))
            return SimilarityOnDevice(k.flatten(0, 1), cells, offsets, self.active)
        cells = torch.arange(self.alive.numel(), device=k.device).view(self.alive.shape)
        return Cosines([(mean_key(k), cells)], self.active)

    def head_rows(self) -> Tensor:
        return self.rows[:, : self.head_tokens]
