"""The similarity of an image's tokens, kept as the layout stores them: only results come back to the grid.

Shapes: B images, N slots, H heads, d head width; a part is b images of n rows each. Tokens are compared by the cosine
of their keys, mean over heads (ToMe's metric).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..kernels import merge_assign, nearest_token
from ..kernels.merge import mean_weights
from ..kernels.merge_assign import MergeAssignment
from ..kernels.merge_score import MergeScore
from ..kernels.scores_and_keys import unit_keys
from ..kernels.topk import topk


def mean_key(k: Tensor) -> Tensor:
    """[..., H, d] -> [..., d] float32."""
    return k.float().mean(-2)


class Similarity(ABC):
    """The similarity between the active tokens of each image."""

    active: Tensor  # [B, N] bool

    @abstractmethod
    def nearest(self, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """For every token its most similar other one of `candidates` [B, N] bool: cosine [B, N] and slot [B, N].

        -inf and -1 where there is none, or the token itself is not active.
        """

    def targets(self, leaving: Tensor, patches: Tensor) -> Tensor:
        """[B, N] the slot that each token joins: leaving patches the most similar patch that stays, -1 where there is
        none and for other leaving tokens; tokens that stay their own."""
        _, nearest = self.nearest(patches & ~leaving)
        slot = torch.arange(leaving.shape[1], device=leaving.device).expand_as(leaving)
        return torch.where(leaving, torch.where(patches, nearest, -1), slot)

    def assign(
        self,
        patches: Tensor,
        size: Tensor,
        merge_weight: Tensor | None = None,
        *,
        leaving: Tensor | None = None,
        score: MergeScore | None = None,
        count: int = 0,
    ) -> MergeAssignment:
        """targets(), each source's weight in the mean (`merge_weight`, by default the sizes), and the sizes after.

        `leaving` says which patches leave; or all leave but the `count` with the highest score, which has weights too.
        """
        if (leaving is None) == (score is None):
            raise UserError(
                f"assign: expected leaving, or score and count; got {'neither' if score is None else 'both'}."
            )
        if score is not None and merge_weight is not None:
            raise UserError("assign: a MergeScore has a merge_weight of its own; expected no other.")
        assigned = self._assign_in_kernel(patches, size, merge_weight, leaving, score, count)
        if assigned is not None:
            return assigned
        if score is not None:
            rank, merge_weight = score.numbers(size)
            leaving = topk(rank, patches, count, rest=True)
        assert leaving is not None
        target = self.targets(leaving, patches)
        return MergeAssignment(target, *mean_weights(target, size, self.active, merge_weight))

    def _assign_in_kernel(
        self,
        patches: Tensor,
        size: Tensor,
        merge_weight: Tensor | None,
        leaving: Tensor | None,
        score: MergeScore | None,
        count: int,
    ) -> MergeAssignment | None:
        """assign() in one kernel, where there is one."""
        return None


class Cosines(Similarity):
    """All of them at once."""

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]], active: Tensor) -> None:
        """parts: keys [b, n, d] and their cells [b, n] = image * N + slot; active [B, N]."""
        self.active = active
        self.parts = []
        for keys, cells in parts:
            if keys.shape[1] == 0:
                continue
            unit = F.normalize(keys.float(), dim=-1)
            with torch.autocast(keys.device.type, enabled=False):
                cosine = unit @ unit.transpose(-2, -1)
            own = torch.eye(keys.shape[1], dtype=torch.bool, device=keys.device)
            self.parts.append((cosine.masked_fill(own, float("-inf")), cells))

    def nearest(self, candidates: Tensor) -> tuple[Tensor, Tensor]:
        slots = self.active.shape[1]
        value = torch.full((self.active.numel(),), float("-inf"), device=self.active.device)
        slot = torch.full((self.active.numel(),), -1, device=self.active.device)
        allowed, active = (candidates & self.active).flatten(), self.active.flatten()
        for cosine, cells in self.parts:
            best, position = cosine.masked_fill(~allowed[cells][:, None, :], float("-inf")).max(-1)
            found = (best > float("-inf")) & active[cells]
            best = torch.where(found, best, torch.full_like(best, float("-inf")))
            other = torch.where(found, cells.gather(1, position) % slots, -1)
            value = value.index_copy(0, cells.flatten(), best.flatten())
            slot = slot.index_copy(0, cells.flatten(), other.flatten())
        return value.view_as(self.active), slot.view_as(self.active)


class Match:
    """The most similar of some tokens for each of others, multiplied when it is asked for; the caller counts it."""

    def __init__(self, keys: Tensor) -> None:
        self.unit = F.normalize(keys, dim=-1)  # [B, N, d]

    def match(self, a: Tensor, b: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """For every token of a list of slots a [B, n] the most similar one of b [B, m]: cosine and slot [B, n].

        Slots below `first` take no part: -inf, and any slot.
        """
        wide = (-1, -1, self.unit.shape[-1])
        ka, kb = (self.unit.gather(1, s[..., None].expand(wide)) for s in (a, b))
        with torch.autocast(ka.device.type, enabled=False):
            cosine = ka @ kb.transpose(1, 2)
        cosine = cosine.masked_fill((a < first)[:, :, None] | (b < first)[:, None, :], float("-inf"))
        best, partner = cosine.max(-1)
        return best, b.gather(1, partner)


class SimilarityOnDevice(Similarity, Match):
    """Both through the kernels: unit keys are stored, cosines never."""

    def __init__(self, k: Tensor, cells: Tensor, offsets: Tensor, active: Tensor, units: Tensor | None = None) -> None:
        """The keys k [R, H, d] of a packed batch, or its unit keys; cells [R] and offsets [B + 1] are pack_index's."""
        self.active, self.cells, self.offsets = active, cells, offsets
        self.unit = unit_keys(k, cells, offsets, active.shape[1]) if units is None else units

    def nearest(self, candidates: Tensor) -> tuple[Tensor, Tensor]:
        return nearest_token.nearest(self.unit, self.cells, self.offsets, candidates, self.active)

    def _assign_in_kernel(
        self,
        patches: Tensor,
        size: Tensor,
        merge_weight: Tensor | None,
        leaving: Tensor | None,
        score: MergeScore | None,
        count: int,
    ) -> MergeAssignment | None:
        given = (size, merge_weight, leaving, score, count)
        return merge_assign.merge_assign(self.unit, patches, self.active, *given)

    def match(self, a: Tensor, b: Tensor, first: int) -> tuple[Tensor, Tensor]:
        return nearest_token.match(self.unit, a, b, self.active.shape[1], first)
