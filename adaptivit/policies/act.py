"""ACT: the whole image halts, layer by layer (Graves 2016; A-ViT's Table 2 baseline; the form is ours).

Shapes: B images, N slots, D width, L layers 1..L.

    h_l = sigmoid(w . x_l + b)          x_l the class token (the mean token where the head pools), w and b shared
    N = first l with c_l >= 1 - eps;  output = sum_l p_l x_l with p_l = h_l before N, the remainder at N
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..cost import CostModel, Shape, row_macs
from ..decision import Decision, Drop, Keep
from .base import Policy, Traits
from .halting import Halting
from .records import ACTSettings

if TYPE_CHECKING:
    from .context import BlockContext


@dataclass
class State:
    halting: Halting  # one unit an image
    slots: int


class ACT(Policy):
    """Facts: those of Halting, the same for every token of an image."""

    def __init__(self, settings: ACTSettings, shape: Shape) -> None:
        super().__init__(settings, shape, Traits(dial="shift"))
        self.gate = nn.Linear(shape.dim, 1)
        nn.init.trunc_normal_(self.gate.weight, std=0.02)
        nn.init.constant_(self.gate.bias, settings.bias)

    def init_state(self, ctx: BlockContext) -> State:
        halts = torch.ones_like(ctx.present[:, :1])
        return State(Halting(halts, 1.0, self.settings.eps, self.settings.surrogate_width), ctx.present.shape[1])

    def after(self, ctx: BlockContext, state: State) -> Decision:
        logit = ctx.apply_to_images(self.gate, ctx.image().to(self.gate.weight.dtype)).float()
        logit = logit if ctx.shift is None else logit + ctx.shift
        full, mass = state.halting.step(torch.sigmoid(logit), ctx.layer + 1, ctx.last, over_limit=ctx.over_limit)
        share = mass.expand(ctx.present.shape)
        return Keep(readout_weight=share) if ctx.last else Drop(full.expand(ctx.present.shape), readout_weight=share)

    def policy_macs(self, layer: int, costs: CostModel) -> tuple[float, float]:
        return 0.0, float(row_macs(self.gate))

    def facts(self, state: State) -> dict[str, Tensor]:
        facts = state.halting.facts()
        return {k: v if v.ndim == 0 else v.expand(*v.shape[:-1], state.slots) for k, v in facts.items()}
