"""L_ponder: the mean depth, made differentiable (AHT-ViT Eq. 1, A-ViT Eq. 8).

Shapes: L layers, B images, N slots. N_k itself has no gradient, so training uses one of
    remainder   N_k + r_k: A-ViT's form, d/dh_l = -1 / T for l < N_k
    expected    sum_l l p_l, the mean of the halting distribution (ACT mass)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ...output import Output
from .base import Batch, Summed, over_mask
from .halting_distribution import halting_mass


@dataclass(frozen=True)
class Ponder(Summed):
    form: Literal["remainder", "expected"] = "remainder"
    needs: frozenset[str] = frozenset()
    plain = False  # a mean over the tokens that can halt

    def sums(self, output: Output, batch: Batch) -> Tensor:
        trace = output.trace
        if self.form == "remainder":
            cost = trace.fact("halt") + trace.fact("remainder")
        else:
            mass = halting_mass(trace, "act")
            layer = mass.new_ones(len(mass)).cumsum(0)  # 1..L
            cost = (mass * layer[:, None, None]).sum(0)
        return over_mask(cost, trace.fact("halts"))
