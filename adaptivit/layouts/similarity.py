"""How alike the tokens of an image are, kept as the layout stores them: only answers come back to the grid.

Shapes: B images, N slots; a part is b images of n rows each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class Similarity:
    """Cosine of head-mean keys between the tokens of each image that take part (ToMe's metric)."""

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]], here: Tensor) -> None:
        """parts: keys [b, n, d] and their cells [b, n] = image * N + slot; here [B, N] who takes part."""
        self.here = here
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
        """For every token its most similar other one out of `among` [B, N] bool: cosine [B, N] and slot [B, N].

        -inf and -1 where there is none, or the token itself takes no part.
        """
        slots = self.here.shape[1]
        value = torch.full((self.here.numel(),), float("-inf"), device=self.here.device)
        slot = torch.full((self.here.numel(),), -1, device=self.here.device)
        allowed, here = (among & self.here).flatten(), self.here.flatten()
        for cosine, cells in self.parts:
            best, position = cosine.masked_fill(~allowed[cells][:, None, :], float("-inf")).max(-1)
            found = (best > float("-inf")) & here[cells]
            best = torch.where(found, best, torch.full_like(best, float("-inf")))
            other = torch.where(found, cells.gather(1, position) % slots, -1)
            value = value.index_copy(0, cells.flatten(), best.flatten())
            slot = slot.index_copy(0, cells.flatten(), other.flatten())
        return value.view_as(self.here), slot.view_as(self.here)
