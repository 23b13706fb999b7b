"""L_target_depth: the supervisors' halting against the planners' depths (AHT-ViT Eq. 2 and 3).

Shapes: L layers 1..L, B images, N slots, S stages.

    P_target,s(l) = softmax_l( -(l - N_target,s)^2 / (2 sigma^2) )                                   Eq. 3
    L = mean over pairs (s, k) with N_k >= s of KL(P_actual || P_target,s)                           Eq. 2

P_actual, the probability that a token halts exactly at layer l, has three forms. All put the missing mass at N_k.

    act        h_l / T for l < N_k                                            adaptive computation time, A-ViT Eq. 7
    hazard     h_l prod_{j<l} (1 - h_j)                                       scores as halting hazards
    crossing   sigmoid((c_l - T) / TAU) - sigmoid((c_{l-1} - T) / TAU)        a soft first crossing of T

With sigma = 1 and P summing to 1, d KL / d N_target = E_target[l] - E_actual[l].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...decision import Trace
from ...output import Output
from .base import Batch, Summed, over_mask

# A zero of P gives log(0): clamp inside the log. kl_div, xlogy, entr or where would give NaN gradients there.
_TINY = 1e-12
TAU = 0.1
Form = Literal["act", "hazard", "crossing"]


def halting_mass(trace: Trace, form: Form) -> Tensor:
    """[L, B, N] P_actual of every token that halts."""
    h, halt, threshold = trace.fact("scores"), trace.fact("halt"), trace.fact("threshold").to(trace.fact("scores"))
    layer = torch.arange(1, len(h) + 1, device=h.device)[:, None, None]
    if form == "act":
        p = h / threshold
    elif form == "hazard":
        survived = torch.cumprod(1.0 - h, 0)
        p = h * torch.cat([torch.ones_like(h[:1]), survived[:-1]])
    else:
        reached = torch.sigmoid((h.cumsum(0) - threshold) / TAU)
        p = torch.diff(reached, dim=0, prepend=torch.sigmoid(-threshold / TAU).expand_as(reached[:1]))
    before = torch.where(layer < halt, p, torch.zeros_like(p))
    return before + torch.where(layer == halt, 1.0 - before.sum(0, keepdim=True), torch.zeros_like(p))


def target_distribution(plan: Tensor, layers: int, sigma: float) -> Tensor:
    """[...] planned depths -> [L, ...] log P_target, Eq. 3."""
    layer = torch.arange(1, layers + 1, device=plan.device, dtype=plan.dtype)
    distance = layer.reshape(-1, *[1] * plan.ndim) - plan
    return torch.log_softmax(-(distance**2) / (2 * sigma**2), dim=0)


@dataclass(frozen=True)
class TargetDepth(Summed):
    sigma: float = 1.0
    form: Form = "act"
    direction: Literal["actual_target", "target_actual"] = "actual_target"
    detach_target: bool = False
    detach_actual: bool = False
    needs: frozenset[str] = frozenset({"plan"})
    plain = False  # a mean over as many pairs as were planned

    def sums(self, output: Output, batch: Batch) -> Tensor:
        trace = output.trace
        plan, pairs = trace.fact("plan"), trace.fact("planned")  # [S, B, N]
        actual = halting_mass(trace, self.form)  # [L, B, N]
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
