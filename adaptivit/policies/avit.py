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

from ..backbones.timm_vit import Shape
from ..cost import CostModel, row_macs
from ..decision import Decision, Drop, Keep
from ..errors import UserError
from .base import Policy
from .common import fold
from .halting import Halting
from .settings import AViTSettings

if TYPE_CHECKING:
    from ..forward import View


@dataclass
class State:
    halting: Halting
    size: Tensor  # [B, N] of each token, where patches leave by folding
    raw: list[Tensor] = field(default_factory=list)  # [B, N] each: h before the last layer's override


class AViT(Policy):
    """Facts: those of Halting, and with ask=('raw_scores',): raw_scores [L, B, N], the scores before the last layer's
    override and with those of halted rows, as the public code computes them (for the prior in its reference form)."""

    offers = frozenset({"raw_scores"})
    dial = "shift"

    def __init__(self, settings: AViTSettings, shape: Shape) -> None:
        super().__init__(settings, shape)
        if settings.index >= shape.dim:
            raise UserError(f"index: expected less than the width {shape.dim}, got {settings.index}.")
        if settings.finish_with_class and shape.read == shape.tokens:
            raise UserError("finish_with_class: the head of this backbone does not read a class token alone.")
        self.leaders = shape.read if settings.finish_with_class else 0
        self.networks = nn.ModuleList()
        if settings.gate == "network":  # Sec. 4.3: an extra two-layer network a layer
            self.offers = frozenset()
            self.networks = nn.ModuleList(self._network(shape.dim) for _ in range(shape.layers))

    def _network(self, dim: int) -> nn.Module:
        out = nn.Linear(dim // 2, 1)
        nn.init.constant_(out.bias, -3.0)  # late halting at first
        return nn.Sequential(nn.Linear(dim, dim // 2), nn.GELU(), out)

    def evidence(self, layer: int, asked: frozenset[str]) -> frozenset[str]:
        ghost = frozenset({"ghost"}) if "raw_scores" in asked & self.offers else frozenset()
        folds = self.settings.leave == "fold" and layer < self.shape.layers - 1
        return ghost | {"similarity"} if folds else ghost

    def start(self, view: View) -> State:
        halting = Halting(torch.ones_like(view.present), 1.0, self.settings.eps, self.settings.tau)
        return State(halting, torch.ones_like(halting.cumulative))

    def after(self, view: View, state: State) -> Decision:
        settings, halting = self.settings, state.halting
        if settings.gate == "network":
            logit = view.apply(self.networks[view.layer])[..., 0].float()
            score = torch.sigmoid(logit if view.shift is None else logit + view.shift)
        else:
            score = self._score(view.element(settings.index), view.shift)
        if "raw_scores" in view.asked & self.offers:
            ghost = self._score(view.found["ghost"][:, settings.index, None].float(), view.shift)
            state.raw.append(torch.where(halting.going, score, ghost))
        full, mass = halting.step(score, view.layer + 1, view.last, self.leaders, view.surplus)
        if view.last:
            return Keep(share=mass)
        if settings.leave == "drop":
            return Drop(full, zeroed=True, share=mass)
        merge = fold(full, view.patches, state.size, view.found["similarity"])
        assert merge.size is not None
        state.size = merge.size
        return replace(merge, share=mass)

    def _score(self, element: Tensor, shift: Tensor | None) -> Tensor:
        logit = self.settings.gate_scale * element - self.settings.gate_center
        return torch.sigmoid(logit if shift is None else logit + shift)

    def overhead(self, layer: int, costs: CostModel) -> tuple[float, float]:
        return (float(row_macs(self.networks[layer])) if len(self.networks) else 0.0), 0.0

    def facts(self, state: State) -> dict[str, Tensor]:
        facts = state.halting.facts()
        if state.raw:
            facts["raw_scores"] = torch.stack(state.raw)
        return facts
