"""L_ponder: the mean of N_k + r_k (AHT-ViT Eq. 1, A-ViT Eq. 8).

N_k itself has no gradient; r_k has one, d/dh_l = -1 / T for l < N_k.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...output import Output
from .base import Batch, Summed, over_mask


@dataclass(frozen=True)
class Ponder(Summed):
    needs: frozenset[str] = frozenset()
    plain = False  # a mean over the tokens that can halt

    def sums(self, output: Output, batch: Batch) -> Tensor:
        trace = output.trace
        return over_mask(trace.fact("halt") + trace.fact("remainder"), trace.fact("halts"))
