"""ACT: halting scores add up, for the image (Graves 2016; A-ViT's Table 2 baseline) or for each token (spatial ACT).

Shapes: B images, N slots, U units (1, or N tokens), D width, L layers 1..L. The forms on a ViT are ours.

    image   h_l = sigmoid(w . x_l + b)                  x_l the class token (the mean token where the head pools)
    token   h_l = sigmoid(w . x_l + v . mean(x_l) + b)  x_l the token (Figurnov et al. 2017, with v on the pooled image)
    N = first l with c_l >= 1 - eps;  output = sum_l p_l x_l with p_l = h_l before N, the remainder at N

w, v and b are shared by all layers, or each layer but the last, where h_L := 1, has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..cost import CostModel, Shape
from ..decision import Decision, Drop, Keep
from .base import Policy, Traits
from .halting import Halting
from .records import ACTSettings

if TYPE_CHECKING:
    from .context import BlockContext


class TokenGate(nn.Module):
    """The logit of a token's score: its own part and that of its image."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.token = nn.Linear(dim, 1)
        self.image = nn.Linear(dim, 1, bias=False)

    def forward(self, rows: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:  # [R, D] -> [R, 1]
        return self.token(rows).float() + mean(self.image(rows).float())  # v . mean(x) = mean(v . x)


@dataclass
class State:
    halting: Halting  # one unit an image, or each token
    slots: int


class ACT(Policy):
    """Facts: those of Halting; with unit=image the same for every token of an image."""

    def __init__(self, settings: ACTSettings, shape: Shape) -> None:
        super().__init__(settings, shape, Traits(dial="shift"))
        # an image is done once all that its head reads has halted
        self.leaders = shape.head_tokens if settings.unit == "token" and shape.head_tokens < shape.tokens else 0
        self.gate = (
            nn.ModuleList(self._made() for _ in range(shape.layers - 1)) if settings.gate == "block" else self._made()
        )

    def _made(self) -> nn.Module:
        gate = TokenGate(self.shape.dim) if self.settings.unit == "token" else nn.Linear(self.shape.dim, 1)
        for linear in (m for m in gate.modules() if isinstance(m, nn.Linear)):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.constant_(linear.bias, self.settings.bias)
        return gate

    def init_state(self, ctx: BlockContext) -> State:
        halts = torch.ones_like(ctx.present if self.settings.unit == "token" else ctx.present[:, :1])
        return State(Halting(halts, 1.0, self.settings.eps, self.settings.surrogate_width), ctx.present.shape[1])

    def after(self, ctx: BlockContext, state: State) -> Decision:
        halting = state.halting
        score = halting.cumulative if ctx.last else self._score(ctx)  # not read in the last layer
        full, mass = halting.step(score, ctx.layer + 1, ctx.last, self.leaders, ctx.over_limit)
        share = mass.expand(ctx.present.shape)
        return Keep(readout_weight=share) if ctx.last else Drop(full.expand(ctx.present.shape), readout_weight=share)

    def _score(self, ctx: BlockContext) -> Tensor:
        """[B, U] h."""
        gate = self.gate[ctx.layer] if isinstance(self.gate, nn.ModuleList) else self.gate
        if self.settings.unit == "token":
            logit = ctx.apply(gate, ctx.present.float())[..., 0]
        else:
            logit = ctx.apply_to_images(gate, ctx.image().to(next(gate.parameters()).dtype)).float()
        return torch.sigmoid(logit if ctx.shift is None else logit + ctx.shift)

    def policy_macs(self, layer: int, costs: CostModel) -> tuple[float, float]:
        macs = (2.0 if self.settings.unit == "token" else 1.0) * self.shape.dim * (layer < self.shape.layers - 1)
        return (macs, 0.0) if self.settings.unit == "token" else (0.0, macs)

    def facts(self, state: State) -> dict[str, Tensor]:
        facts = state.halting.facts()
        return {k: v if v.ndim == 0 else v.expand(*v.shape[:-1], state.slots) for k, v in facts.items()}
