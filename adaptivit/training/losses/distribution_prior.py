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

from ...errors import UserError
from ...output import Output
from .base import Batch, Summed

_TINY = 1e-12


@dataclass(frozen=True)
class DistributionPrior(Summed):
    form: Literal["paper", "reference"] = "paper"
    depth: float = 9.0  # centre of the bell, in layers 1..L
    plain = False  # a divergence of means

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"raw_scores"}) if self.form == "reference" else frozenset()

    def sums(self, output: Output, batch: Batch) -> Tensor:
        """[L + 1] scores by layer, and the number of tokens that they are of."""
        facts = output.trace.facts
        if self.form == "paper":
            scores, halts = output.trace.fact("scores"), output.trace.fact("halts")
            return torch.cat([(scores * halts).sum((1, 2)), halts.sum().to(scores)[None]])
        if "raw_scores" not in facts:
            raise UserError(
                "The prior in its reference form needs the scores of halted rows: "
                "use policy 'avit' with gate=neuron, or --loss.prior-form paper."
            )
        raw = facts["raw_scores"]
        return torch.cat([raw.sum((1, 2)), raw.new_full((1,), raw[0].numel())])

    def loss(self, sums: Tensor) -> Tensor:
        mean = sums[:-1] / sums[-1].clamp_min(1)  # [L]
        if self.form == "paper":
            layers = torch.arange(1, len(mean) + 1, device=mean.device)
            log_target = torch.log_softmax(-((layers - self.depth) ** 2) / 2.0, dim=0)
            mean = mean / mean.sum().clamp_min(_TINY)
            return (mean * (mean.clamp_min(_TINY).log() - log_target)).sum()  # 0 log 0 = 0, with a finite gradient
        share = (mean / mean.sum()).clamp(0.01, 0.99)
        target = self.reference_target(len(mean)).to(share)
        return (target * (target.log() - share.log())).sum() / len(mean)

    def reference_target(self, layers: int) -> Tensor:
        """[L] the public code's bell: its centre is the 0-based layer `depth - 1`."""
        position = torch.arange(layers, dtype=torch.float64)
        bell = torch.exp(-((position - (self.depth - 1)) ** 2) / 2.0)
        first = max(1, min(layers, round(self.depth) - 1))
        return bell * 0.98 / bell[:first].sum()
