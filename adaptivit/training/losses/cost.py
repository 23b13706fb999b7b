"""Squared distance of the mean cost from a target share of static's MACs, with a gradient through soft presence.

Shapes: L layers, B images, N slots. Cost is in MACs of embedding, blocks and head, as in `macs_blocks`; images are
free to differ, only their mean is held.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...output import Output
from .base import Batch, Summed, over_images


@dataclass(frozen=True)
class Cost(Summed):
    target: float = 0.67  # share of the static model's MACs
    needs: frozenset[str] = frozenset()
    plain = False  # a square of a mean

    def sums(self, output: Output, batch: Batch) -> Tensor:
        attended = output.trace.fact("presence").sum(-1)  # [L, B], 0/1 forward, soft backward
        costs, facts = output.costs, output.trace.facts
        updated = facts["presence_mlp"].sum(-1) if "presence_mlp" in facts else attended
        macs = costs.blocks(attended, updated) + costs.embedding + costs.head
        return over_images(macs / costs.static)

    def loss(self, sums: Tensor) -> Tensor:
        return (super().loss(sums) - self.target) ** 2
