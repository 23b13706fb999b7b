"""PonderNet: halting as a chance at every layer, held near a geometric prior (Banino et al. 2021; on ViTs, ours).

Shapes: B images, N slots, L layers 1..L, C classes. The unit is the image, or every token.

    lambda_l = sigmoid(gate_scale x_{l,index} - gate_center)        A-ViT's neuron
    p_l = lambda_l prod_{j<l} (1 - lambda_j), the rest at L
    stop at the first l with p_1 + ... + p_l >= u                   u = 0.5, or drawn from a seed, for all images

Loss: sum_l p_l CE(y_l) + beta KL(p || geometric(prior)) over the exits y_l of the model's own head; with aux=('exits',)
every exit speaks and the class token (in image mode the image) goes on to the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cost import CostModel, Shape
from ..decision import Drop
from ..errors import UserError
from .base import Policy, Traits
from .records import PonderNetSettings

if TYPE_CHECKING:
    from .context import BlockContext


@dataclass
class State:
    bar: Tensor  # [1, U] u of each unit
    survived: Tensor  # [B, U] prod (1 - lambda)
    going: Tensor  # [B, U] bool
    chance: list[Tensor] = field(default_factory=list)  # [B, U] p_l each
    exits: list[Tensor] = field(default_factory=list)  # [B, C] each, when asked for


class PonderNet(Policy):
    """Facts: chance [L, B, U] = p_l (U = 1 for images, N for tokens), log_prior [L]; with ask: exits [L, B, C]."""

    def __init__(self, settings: PonderNetSettings, shape: Shape) -> None:
        super().__init__(settings, shape, Traits(dial="shift", optional_aux=frozenset({"exits"})))
        if settings.index >= shape.dim:
            raise UserError(f"index: expected less than the width {shape.dim}, got {settings.index}.")
        if settings.unit == "token" and shape.head_tokens == shape.tokens:
            raise UserError("unit: 'token' needs a head that reads a class token, whose chance weighs the exits.")

    def policy_macs(self, layer: int, costs: CostModel) -> tuple[float, float]:
        return 0.0, 0.0

    def init_state(self, ctx: BlockContext) -> State:
        batch, slots = ctx.present.shape
        units = slots if self.settings.unit == "token" else 1
        bar = torch.full((1, units), 0.5)
        if self.settings.sample is not None:
            bar = torch.rand(1, units, generator=torch.Generator().manual_seed(self.settings.sample))
        ones = torch.ones(batch, units, device=ctx.present.device)
        return State(bar.to(ones.device), ones, ones > 0)

    def after(self, ctx: BlockContext, state: State) -> Drop | None:
        settings, asked, token = self.settings, "exits" in ctx.aux, self.settings.unit == "token"
        element = ctx.channel(settings.index) if token else ctx.image()[:, settings.index : settings.index + 1]
        logit = settings.gate_scale * element - settings.gate_center
        chance = torch.sigmoid(logit if ctx.shift is None else logit + ctx.shift)
        chance = torch.ones_like(chance) if ctx.last else chance
        chance = torch.where(state.going, chance, torch.zeros_like(chance))
        state.chance.append(chance * state.survived)
        state.survived = state.survived * (1 - chance)
        if asked:
            state.exits.append(ctx.logits("asked"))
        if ctx.last:
            return None
        stop = state.going & (1 - state.survived.detach() >= state.bar)
        if asked:  # every exit is wanted: tokens that the head reads go on
            stop = stop & (torch.arange(stop.shape[1], device=stop.device) >= max(self.shape.num_prefix_tokens, 1))
        elif token:  # once those that the head reads have stopped, the image is done
            stop = state.going & (stop | ~(state.going & ~stop)[:, : self.shape.head_tokens].any(-1, keepdim=True))
        forced = ctx.over_limit(state.going & ~stop, 1 - state.survived.detach())
        stop = stop if forced is None else stop | forced
        # what is left of the chance of those that stop now is paid here, so that it sums to 1
        state.chance[-1] = state.chance[-1] + torch.where(stop, state.survived, torch.zeros_like(state.survived))
        state.survived = torch.where(stop, torch.zeros_like(state.survived), state.survived)
        state.going = state.going & ~stop
        return Drop(stop.expand(ctx.present.shape) & ctx.present)

    def facts(self, state: State) -> dict[str, Tensor]:
        layers = torch.arange(len(state.chance), device=state.bar.device)
        log_prior = (self.settings.prior * (1 - self.settings.prior) ** layers).log()
        facts = {"chance": torch.stack(state.chance), "log_prior": log_prior.log_softmax(0)}
        return facts | ({"exits": torch.stack(state.exits)} if state.exits else {})
