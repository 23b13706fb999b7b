"""AHT-ViT: planners predict each token's depth, supervisors carry it out (Shutov and Asadulaev).

Shapes: B images, N slots, D width, L layers 1..L, S planners.

    planner      N_target = 1 + (L - 1) sigmoid(MLP[token, context])   Sec. 3.2, before blocks 3, 6, 9 of 12
    supervisor   h_k^l = sigmoid(gamma f_k^l + beta)                   Sec. 3.3; f is one element after fc1
    halting      c += h;  N_k = first l with c >= T - eps              Sec. 3.3

Planners enter the loss alone (losses/target_depth.py). Ours: with straight_through the key weights stay 0/1 but pass
the slope of a soft step back to the scores, so that the task loss can tell a token that it was needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cost import CostModel, Shape
from ..decision import Decision, Drop, Keep
from ..errors import UserError
from ..kernels.threshold_gate import ThresholdGate
from .base import Policy, Traits
from .common import check_blocks, thirds
from .halting import Halting
from .records import AHTSettings

if TYPE_CHECKING:
    from ..model import AdaptiveViT
    from .context import BlockContext


class Planner(nn.Module):
    """P_s: a token and the mean of its image -> a target depth (Sec. 3.2, 3.5: a two-layer MLP with ReLU)."""

    def __init__(self, dim: int, width: int, layers: int, context: bool) -> None:
        super().__init__()
        self.layers, self.context = layers, context
        self.hidden = nn.Linear(2 * dim if context else dim, width)
        self.out = nn.Linear(width, 1)
        nn.init.trunc_normal_(self.hidden.weight, std=0.02)
        nn.init.zeros_(self.hidden.bias)
        nn.init.trunc_normal_(self.out.weight, std=0.02)
        nn.init.zeros_(self.out.bias)

    def forward(self, rows: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:  # [R, D] -> [R]
        token = F.layer_norm(rows.float(), rows.shape[-1:])  # without parameters
        joined = torch.cat([token, mean(token)], dim=-1) if self.context else token
        u = self.out(F.relu(self.hidden(joined.to(self.hidden.weight.dtype)))).float()
        return 1 + (self.layers - 1) * torch.sigmoid(u[..., 0])


@dataclass
class State:
    halting: Halting
    plans: list[Tensor] = field(default_factory=list)  # [B, N] each
    planned: list[Tensor] = field(default_factory=list)  # [B, N] bool: present in layer s, so N_k >= s


class AHT(Policy):
    """Facts: those of Halting, and with aux=('plan',): plan [S, B, N], planned [S, B, N] bool, stages [S] = s."""

    def __init__(self, settings: AHTSettings, shape: Shape) -> None:
        super().__init__(settings, shape)
        blocks, context = settings.planner_blocks, settings.planner_context
        if blocks is None:
            blocks = tuple(b for b in thirds(shape.layers) if b < shape.layers)
        check_blocks("planner_blocks", blocks, 1, shape.layers)
        if context == "class" and not shape.class_token:
            raise UserError("planner_context: 'class' needs a class token, which this backbone lacks; use 'mean'.")
        self._check()
        self.traits = Traits(
            keeps_prefix=True,
            ignores_last_mlp_patches=True,
            dial="shift",
            optional_aux=frozenset({"plan"} if blocks else ()),
            evidence_index=settings.index,
        )
        self._make_gate()
        width = max(1, int(shape.dim * settings.planner_width))
        self.planners = nn.ModuleDict(
            {str(b): Planner(shape.dim, width, shape.layers, context != "none") for b in sorted(blocks)}
        )

    def _check(self) -> None:
        if self.settings.index >= self.shape.mlp_dim:
            raise UserError(f"index: expected less than the MLP's width {self.shape.mlp_dim}.")

    def _make_gate(self) -> None:
        self.gamma = nn.Parameter(torch.tensor(float(self.settings.gamma)))
        self.beta = nn.Parameter(torch.tensor(float(self.settings.beta)))

    def decides(self, layer: int) -> bool:
        return layer < self.shape.layers - 1

    def evidence(self, layer: int, aux: frozenset[str]) -> frozenset[str]:
        return frozenset({"fc1"}) if self.decides(layer) else frozenset()

    def policy_macs(self, layer: int, costs: CostModel) -> tuple[float, float]:
        return 0.0, 0.0  # planners run on request alone

    def init_state(self, ctx: BlockContext) -> State:
        return State(self._halting(ctx))

    def _halting(self, ctx: BlockContext) -> Halting:
        halts, settings = torch.ones_like(ctx.present), self.settings
        halts[:, : self.shape.num_prefix_tokens] = False
        return Halting(halts, settings.threshold, settings.eps, settings.surrogate_width, ctx.cached_full)

    def fused_gate(self, ctx: BlockContext, state: State) -> ThresholdGate | None:
        if type(self) is not AHT or ctx.last or ctx.limited or torch.is_grad_enabled():
            return None
        settings, halting = self.settings, state.halting
        threshold, first = settings.threshold - settings.eps, self.shape.num_prefix_tokens
        return ThresholdGate(self.gamma, self.beta, ctx.shift, threshold, first, halting.cumulative, halting.going)

    def after(self, ctx: BlockContext, state: State) -> Decision:
        self._plan(ctx, state)
        halting, gate = state.halting, ctx.evidence.get("gate")
        if gate is not None:  # decided inside a kernel
            leaving = halting.take(gate, ctx.layer + 1)
        else:
            score = torch.zeros_like(halting.cumulative) if ctx.last else self._score(ctx)
            leaving, _ = halting.step(score, ctx.layer + 1, ctx.last, over_limit=ctx.over_limit)
        if ctx.last:
            return Keep()
        weight = halting.presence[-1] if self.settings.straight_through else None
        return Drop(leaving, key_weight=weight, staying=None if gate is None else gate.active)

    def _score(self, ctx: BlockContext) -> Tensor:
        """[B, N] h."""
        logit = self.gamma.float() * ctx.evidence["fc1"] + self.beta.float()
        return torch.sigmoid(logit if ctx.shift is None else logit + ctx.shift)

    def _plan(self, ctx: BlockContext, state: State) -> None:
        """Run the planner of layer s on the tokens present in it, those that halt there included (Listing 1.1)."""
        layer = str(ctx.layer + 1)
        if "plan" not in ctx.aux or layer not in self.planners:
            return
        over = ctx.present.float()
        if self.settings.planner_context == "class":
            over = over * (torch.arange(over.shape[1], device=over.device) == 0)
        state.plans.append(ctx.apply(self.planners[layer], over, part="asked"))
        state.planned.append(ctx.present & state.halting.halts)

    def facts(self, state: State) -> dict[str, Tensor]:
        facts = state.halting.facts()
        if state.plans:
            device = state.plans[0].device  # a tensor made of a list would have to wait for a GPU
            facts["plan"], facts["planned"] = torch.stack(state.plans), torch.stack(state.planned)
            facts["stages"] = torch.stack([torch.full((), int(s), device=device) for s in self.planners])
        return facts

    @torch.no_grad()
    def init_gate(self, model: AdaptiveViT, images: Tensor, share: float | None = None) -> str | None:
        """Set the gate so that training starts where it can learn: a gate far below its threshold has no slope."""
        training = model.training
        model.eval()
        beta = self._find_beta(model, images, share)
        depth = float(model(images).trace.mean_depth.mean())
        model.train(training)
        return f"beta = {beta:.3f} for a starting mean depth of {depth:.2f} of {self.shape.layers}"

    def _find_beta(self, model: AdaptiveViT, images: Tensor, share: float | None) -> float:
        """Set beta for a starting mean depth of about L - 1."""
        goal = self.shape.layers - 1.0
        beta = self._bisect_beta(lambda: float(model(images).trace.mean_depth.mean()) > goal)
        self.beta.fill_(beta)
        return beta

    def _bisect_beta(self, too_dear: Callable[[], bool], offset: Tensor | None = None) -> float:
        """The beta, beside an offset, at which the model is no longer too dear."""
        offset = torch.zeros_like(self.beta) if offset is None else offset
        high = 20.0 * max(1.0, float(self.gamma.abs().max()))
        low = -high
        for _ in range(18):
            middle = (low + high) / 2
            self.beta.copy_(offset + middle)
            low, high = (middle, high) if too_dear() else (low, middle)
        return (low + high) / 2
