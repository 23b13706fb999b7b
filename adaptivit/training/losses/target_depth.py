"""L_target_depth: what the supervisor did against what the planners said (AHT-ViT Eq. 2 and 3).

Shapes: L layers 1..L, B images, N slots, S stages.

    P_target,s(l) = softmax_l( -(l - N_target,s)^2 / (2 sigma^2) )                                   Eq. 3
    L = mean over pairs (s, k) with N_k >= s of KL(P_actual || P_target,s)                           Eq. 2

With sigma = 1 and P summing to 1, d KL / d N_target = E_target[l] - E_actual[l].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...output import Output
from .base import Batch, Summed, over_mask
from .halting_distribution import halting_mass

# A zero of P gives log(0): clamp inside the log. kl_div, xlogy, entr or where would give NaN gradients there.
_TINY = 1e-12


def target_distribution(plan: Tensor, layers: int, sigma: float) -> Tensor:
    """[...] planned depths -> [L, ...] log P_target, Eq. 3."""
    layer = torch.arange(1, layers + 1, device=plan.device, dtype=plan.dtype)
    distance = layer.reshape(-1, *[1] * plan.ndim) - plan
    return torch.log_softmax(-(distance**2) / (2 * sigma**2), dim=0)


@dataclass(frozen=True)
class TargetDepth(Summed):
    sigma: float = 1.0
    form: Literal["act", "hazard", "crossing"] = "act"
    direction: Literal["actual_target", "target_actual"] = "actual_target"
    detach_target: bool = False
    detach_actual: bool = False
    tau: float = 0.1
    needs: frozenset[str] = frozenset({"plan"})
    plain = False  # a mean over as many pairs as were planned

    def sums(self, output: Output, batch: Batch) -> Tensor:
        trace = output.trace
        plan, pairs = trace.fact("plan"), trace.fact("planned")  # [S, B, N]
        actual = halting_mass(trace, self.form, self.tau)  # [L, B, N]
        if self.detach_target:
            plan = plan.detach()
        if self.detach_actual:
            actual = actual.detach()
        log_target = target_distribution(plan, len(actual), self.sigma)  # [L, S, B, N]
        log_actual = actual.clamp_min(_TINY).log()[:, None]
        if self.direction == "actual_target":
            divergence = (actual[:, None] * (log_actual - log_target)).sum(0)
        else:
            divergence = (log_target.exp() * (log_target - log_actual)).sum(0)
        return over_mask(divergence, pairs)
