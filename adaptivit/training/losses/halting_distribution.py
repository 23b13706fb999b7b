"""P_actual: the probability that a token halts exactly at layer l, from its scores (AHT-ViT Sec. 3.4, A-ViT Eq. 7).

Shapes: L layers 1..L, B images, N slots. All forms put the missing mass at N_k, so that they sum to 1.
    act        h_l / T for l < N_k                                            (adaptive computation time)
    hazard     h_l prod_{j<l} (1 - h_j)                                       (scores as halting hazards)
    crossing   sigmoid((c_l - T) / tau) - sigmoid((c_{l-1} - T) / tau)        (a soft first crossing of T)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...decision import Trace

FORMS = ("act", "hazard", "crossing")


def halting_mass(trace: Trace, form: str, tau: float = 0.1) -> Tensor:
    """[L, B, N] P_actual of every token that halts."""
    h, halt, threshold = trace.fact("scores"), trace.fact("halt"), trace.fact("threshold").to(trace.fact("scores"))
    layer = torch.arange(1, len(h) + 1, device=h.device)[:, None, None]
    if form == "act":
        p = h / threshold
    elif form == "hazard":
        survived = torch.cumprod(1.0 - h, 0)
        p = h * torch.cat([torch.ones_like(h[:1]), survived[:-1]])
    elif form == "crossing":
        reached = torch.sigmoid((h.cumsum(0) - threshold) / tau)
        p = torch.diff(reached, dim=0, prepend=torch.sigmoid(-threshold / tau).expand_as(reached[:1]))
    else:
        raise ValueError(f"Unknown form of P_actual {form!r}; valid: {', '.join(FORMS)}.")
    before = torch.where(layer < halt, p, torch.zeros_like(p))
    return before + torch.where(layer == halt, 1.0 - before.sum(0, keepdim=True), torch.zeros_like(p))
