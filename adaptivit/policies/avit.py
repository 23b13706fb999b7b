"""A-ViT: one neuron of every token says when it has seen enough (Yin et al., CVPR 2022, Algorithm 1).

Shapes: B images, N slots, L layers 1..L.

    h_k^l = sigmoid(gate_scale t_{k,0}^l - gate_center)             Eq. 5 (beta = -gate_center)
    N_k = first l with c_l >= 1 - eps, h^L := 1                     Eq. 4
    output token = sum_l p_c^l t_c^l, then norm and head            Eq. 9 (mean field, the class token alone)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..cost import CostModel, Shape, row_macs
from ..decision import Decision, Drop, Keep
from ..errors import UserError
from .base import Policy, Traits
from .common import merge_leaving
from .halting import Halting
from .records import AViTSettings

if TYPE_CHECKING:
    from .context import BlockContext


@dataclass
class State:
    halting: Halting
    size: Tensor  # [B, N] of each token, where patches merge
    raw: list[Tensor] = field(default_factory=list)  # [B, N] each: h before the last layer's override


class AViT(Policy):
    """Facts: those of Halting, and with aux=('raw_scores',): raw_scores [L, B, N], the scores before the last layer's
    override and with those of halted rows, as the public code computes them (for the prior in its reference form)."""

    def __init__(self, settings: AViTSettings, shape: Shape) -> None:
        asks = frozenset() if settings.gate == "network" else frozenset({"raw_scores"})
        super().__init__(settings, shape, Traits(dial="shift", optional_aux=asks))
        if settings.index >= shape.dim:
            raise UserError(f"index: expected less than the width {shape.dim}, got {settings.index}.")
        if settings.finish_with_class and shape.head_tokens == shape.tokens:
            raise UserError("finish_with_class: the head of this backbone does not read a class token alone.")
        self.leaders = shape.head_tokens if settings.finish_with_class else 0
        self.networks = nn.ModuleList()
        if settings.gate == "network":  # Sec. 4.3: an extra two-layer network a layer
            self.networks = nn.ModuleList(self._network(shape.dim) for _ in range(shape.layers))

    def _network(self, dim: int) -> nn.Module:
        out = nn.Linear(dim // 2, 1)
        nn.init.constant_(out.bias, -3.0)  # late halting at first
        return nn.Sequential(nn.Linear(dim, dim // 2), nn.GELU(), out)

    def evidence(self, layer: int, aux: frozenset[str]) -> frozenset[str]:
        halted_row = frozenset({"halted_row"}) if "raw_scores" in aux & self.traits.optional_aux else frozenset()
        merges = self.settings.removal == "merge" and layer < self.shape.layers - 1
        return halted_row | {"similarity"} if merges else halted_row

    def init_state(self, ctx: BlockContext) -> State:
        halting = Halting(torch.ones_like(ctx.present), 1.0, self.settings.eps, self.settings.surrogate_width)
        return State(halting, torch.ones_like(halting.cumulative))

    def after(self, ctx: BlockContext, state: State) -> Decision:
        settings, halting = self.settings, state.halting
        if settings.gate == "network":
            logit = ctx.apply(self.networks[ctx.layer])[..., 0].float()
            score = torch.sigmoid(logit if ctx.shift is None else logit + ctx.shift)
        else:
            score = self._score(ctx.channel(settings.index), ctx.shift)
        if "raw_scores" in ctx.aux & self.traits.optional_aux:
            halted_row = self._score(ctx.evidence["halted_row"][:, settings.index, None].float(), ctx.shift)
            state.raw.append(torch.where(halting.going, score, halted_row))
        full, mass = halting.step(score, ctx.layer + 1, ctx.last, self.leaders, ctx.over_limit)
        if ctx.last:
            return Keep(readout_weight=mass)
        if settings.removal == "drop":
            return Drop(full, zero_on_exit=True, readout_weight=mass)
        merge = merge_leaving(full, ctx.patches, state.size, ctx.evidence["similarity"])
        assert merge.size is not None
        state.size = merge.size
        return replace(merge, readout_weight=mass)

    def _score(self, element: Tensor, shift: Tensor | None) -> Tensor:
        logit = self.settings.gate_scale * element - self.settings.gate_center
        return torch.sigmoid(logit if shift is None else logit + shift)

    def policy_macs(self, layer: int, costs: CostModel) -> tuple[float, float]:
        return (float(row_macs(self.networks[layer])) if len(self.networks) else 0.0), 0.0

    def facts(self, state: State) -> dict[str, Tensor]:
        facts = state.halting.facts()
        if state.raw:
            facts["raw_scores"] = torch.stack(state.raw)
        return facts
