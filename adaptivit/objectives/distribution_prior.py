"""L_distr: keep the mean halting score per layer near a bell around a target depth (A-ViT Eq. 11 and 12).

Shapes: L layers 1..L, B images, N slots.

    paper      KL(H || target), H_l the mean score of the tokens in layer l, both normalised to sum to 1
    reference  the public code: H_l over all tokens, halted rows included, before the last layer's override; H / sum H
               clamped to [0.01, 0.99] without renormalising; sum target (log target - log H) / L with
               target_l = g exp(-(l - depth)^2 / 2), scaled so that the entries before depth sum to 0.98. Needs the
               fact raw_scores, which avit gives when asked. Its mean over images leaves the first one out (a slip);
               ours takes all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import UserError
from ..output import Output
from .base import Batch

_TINY = 1e-12


@dataclass(frozen=True)
class DistributionPrior:
    form: Literal["paper", "reference"] = "paper"
    depth: float = 9.0  # centre of the bell, in layers 1..L

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"raw_scores"}) if self.form == "reference" else frozenset()

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        facts = output.trace.facts
        if self.form == "paper":
            scores, halts = output.trace.fact("scores"), output.trace.fact("halts")
            layers = torch.arange(1, len(scores) + 1, device=scores.device)
            target = torch.exp(-((layers - self.depth) ** 2) / 2.0)
            target = target / target.sum()
            mean = (scores * halts).sum((1, 2)) / halts.sum().clamp_min(1)
            mean = mean / mean.sum().clamp_min(_TINY)
            return (mean * (mean.clamp_min(_TINY).log() - target.clamp_min(_TINY).log())).sum()
        if "raw_scores" not in facts:
            raise UserError(
                "The prior in its reference form needs the scores of halted rows: "
                "use policy 'avit' with gate=neuron, or --prior-form paper."
            )
        raw = facts["raw_scores"]
        mean = raw.mean((1, 2))
        share = (mean / mean.sum()).clamp(0.01, 0.99)
        target = self.reference_target(len(raw)).to(share)
        return (target * (target.log() - share.log())).sum() / len(raw)

    def reference_target(self, layers: int) -> Tensor:
        """[L] the public code's bell: its centre is the 0-based layer `depth - 1`."""
        position = torch.arange(layers, dtype=torch.float64)
        bell = torch.exp(-((position - (self.depth - 1)) ** 2) / 2.0)
        first = max(1, min(layers, round(self.depth) - 1))
        return bell * 0.98 / bell[:first].sum()
