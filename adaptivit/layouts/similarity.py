"""How alike the tokens of an image are, kept as the layout stores them: only answers come back to the grid.

Shapes: B images, N slots, H heads, d head width; a part is b images of n rows each. Tokens are compared by the cosine
of their keys, mean over heads (ToMe's metric).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..kernels import merge_assign, nearest_token
from ..kernels.merge import join
from ..kernels.merge_assign import MergeAssignment
from ..kernels.merge_score import MergeScore
from ..kernels.topk import top


def mean_key(k: Tensor) -> Tensor:
    """[..., H, d] -> [..., d] float32."""
    return k.float().mean(-2)


class Similarity(ABC):
    """Who is most alike among the tokens of each image that take part."""

    active: Tensor  # [B, N] bool: who takes part

    @abstractmethod
    def nearest(self, among: Tensor) -> tuple[Tensor, Tensor]:
        """For every token its most similar other one out of `among` [B, N] bool: cosine [B, N] and slot [B, N].

        -inf and -1 where there is none, or the token itself takes no part.
        """

    def targets(self, leaving: Tensor, patches: Tensor) -> Tensor:
        """[B, N] slot where everyone goes: leaving patches to the most similar patch that stays, -1 where there is none
        and for others that leave; whoever does not leave, to its own."""
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
        score: Tensor | MergeScore | None = None,
        count: int = 0,
    ) -> MergeAssignment:
        """targets(), the weight of each source in the mean (`merge_weight`, by default the sizes), and the sizes after.

        `leaving` says which patches leave; or all leave but the `count` with the highest score.
        """
        if (leaving is None) == (score is None):
            raise UserError(
                f"meet: expected leaving, or score and count; got {'neither' if score is None else 'both'}."
            )
        if isinstance(score, MergeScore) and merge_weight is not None:
            raise UserError("meet: a MergeScore has a merge_weight of its own; expected no other.")
        at_once = self._assign_in_kernel(patches, size, merge_weight, leaving, score, count)
        if at_once is not None:
            return at_once
        if isinstance(score, MergeScore):
            score, merge_weight = score.numbers(size)
        if score is not None:
            leaving = top(score, patches, count, rest=True)
        assert leaving is not None
        into = self.targets(leaving, patches)
        return MergeAssignment(into, *join(into, size, self.active, merge_weight))

    def _assign_in_kernel(self, patches: Tensor, *given: Any) -> MergeAssignment | None:
        """folding() in one kernel, where there is one."""
        return None


class Cosines(Similarity):
    """All of them at once."""

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]], here: Tensor) -> None:
        """parts: keys [b, n, d] and their cells [b, n] = image * N + slot; here [B, N] who takes part."""
        self.active = here
        self.parts = []
        for keys, cells in parts:
            if keys.shape[1] == 0:
                continue
            unit = F.normalize(keys.float(), dim=-1)
            with torch.autocast(keys.device.type, enabled=False):
                cosine = unit @ unit.transpose(-2, -1)
            own = torch.eye(keys.shape[1], dtype=torch.bool, device=keys.device)
            self.parts.append((cosine.masked_fill(own, float("-inf")), cells))

    def nearest(self, among: Tensor) -> tuple[Tensor, Tensor]:
        slots = self.active.shape[1]
        value = torch.full((self.active.numel(),), float("-inf"), device=self.active.device)
        slot = torch.full((self.active.numel(),), -1, device=self.active.device)
        allowed, here = (among & self.active).flatten(), self.active.flatten()
        for cosine, cells in self.parts:
            best, position = cosine.masked_fill(~allowed[cells][:, None, :], float("-inf")).max(-1)
            found = (best > float("-inf")) & here[cells]
            best = torch.where(found, best, torch.full_like(best, float("-inf")))
            other = torch.where(found, cells.gather(1, position) % slots, -1)
            value = value.index_copy(0, cells.flatten(), best.flatten())
            slot = slot.index_copy(0, cells.flatten(), other.flatten())
        return value.view_as(self.active), slot.view_as(self.active)


class Match:
    """Finds for some tokens the most similar one of others. Nothing is multiplied before it is asked for: who asks
    counts it."""

    def __init__(self, keys: Tensor) -> None:
        self.unit = F.normalize(keys, dim=-1)  # [B, N, d]

    def match(self, a: Tensor, b: Tensor, least: int) -> tuple[Tensor, Tensor]:
        """For every token of a list of slots a [B, n] the most similar one of b [B, m]: cosine and slot [B, n].

        Slots below `least` take no part: -inf, and any slot.
        """
        wide = (-1, -1, self.unit.shape[-1])
        ka, kb = (self.unit.gather(1, s[..., None].expand(wide)) for s in (a, b))
        with torch.autocast(ka.device.type, enabled=False):
            cosine = ka @ kb.transpose(1, 2)
        cosine = cosine.masked_fill((a < least)[:, :, None] | (b < least)[:, None, :], float("-inf"))
        best, partner = cosine.max(-1)
        return best, b.gather(1, partner)


class SimilarityOnDevice(Similarity, Match):
    """Both through the kernels (ops/similar.py): unit vectors alone are stored, cosines never."""

    def __init__(
        self, k: Tensor, index: Tensor, offsets: Tensor | None, here: Tensor, units: Tensor | None = None
    ) -> None:
        """k [R, H, d], and whose rows they are, as in ops/similar.py; or their unit vectors."""
        self.active, self.index, self.offsets = here, index, offsets
        self.unit = nearest_token.units(k, index, offsets, *here.shape) if units is None else units

    def nearest(self, among: Tensor) -> tuple[Tensor, Tensor]:
        return nearest_token.nearest(self.unit, self.index, self.offsets, among, self.active)

    def targets(self, leaving: Tensor, patches: Tensor) -> Tensor:
        return merge_assign.targets(self.unit, leaving, patches, self.active)

    def _assign_in_kernel(self, patches: Tensor, *given: Any) -> MergeAssignment | None:
        return merge_assign.assign(self.unit, patches, self.active, *given)

    def match(self, a: Tensor, b: Tensor, least: int) -> tuple[Tensor, Tensor]:
        return nearest_token.match(self.unit, a, b, self.active.shape[1], least)
