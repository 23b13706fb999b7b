"""AHT-ViT: planners predict each token's depth, supervisors carry it out (Shutov and Asadulaev).

Shapes: B images, N slots, D width, L layers 1..L, S planner stages.

    supervisor   h_k^l = sigmoid(gamma f_k^l + beta)             Sec. 3.3; f is one element after fc1
    halting      c += h;  N_k = first l with c >= T - eps        Sec. 3.3
    planner      N_target = 1 + (L - 1) sigmoid(MLP[token, context])   Sec. 3.2, at stages S = {3, 6, 9}

With `relative` f is held against the mean of its image's live patches.
In the paper the planners only enter the loss (objectives/target_depth.py). With plan_weight > 0 they act:
h = sigmoid(gamma f + beta + plan_weight (l - N_plan)), or (mean of the image's plans - N_plan) with plan_against=image.
With straight_through the key weights stay 0/1 but pass the slope of a soft step back to the scores, so that the task
loss can tell a token that it was needed; slope=logit takes it in gamma f + beta, which sharp gates need: their
h (1 - h), and with it the slope in c, is 0 nearly everywhere. With `sample` a random shift an image is added to the
logit in training, so that one model learns every budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cost import CostModel, Shape, row_macs
from ..decision import Decision, Drop, Keep, Trace
from ..errors import UserError
from ..kernels.threshold_gate import ThresholdGate
from ..utils.batch_rng import draw
from .base import Policy
from .common import check_blocks, fold
from .halting import Halting
from .settings import AHTSettings

if TYPE_CHECKING:
    from ..model import AdaptiveViT
    from .context import BlockContext


def normalised(rows: Tensor) -> Tensor:
    """LayerNorm without parameters, in float32."""
    return F.layer_norm(rows.float(), rows.shape[-1:])


def _mean_of(values: Tensor, where: Tensor) -> Tensor:
    """[B, N], [B, N] bool -> [B, 1] the mean of an image's values there."""
    there = where.float()
    return torch.where(where, values, 0.0).sum(-1, keepdim=True) / there.sum(-1, keepdim=True).clamp_min(1.0)


class Planner(nn.Module):
    """P_s: a token and the mean of its image -> a target depth (Sec. 3.2, 3.5: a two-layer MLP with ReLU)."""

    def __init__(self, dim: int, width: int, low: float, high: float, context: bool) -> None:
        super().__init__()
        self.low, self.high, self.context = low, high, context
        self.hidden = nn.Linear(2 * dim if context else dim, width)
        self.out = nn.Linear(width, 1)
        nn.init.trunc_normal_(self.hidden.weight, std=0.02)
        nn.init.zeros_(self.hidden.bias)
        nn.init.trunc_normal_(self.out.weight, std=0.02)
        nn.init.zeros_(self.out.bias)

    def forward(self, rows: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:  # [R, D] -> [R]
        token = normalised(rows)
        joined = torch.cat([token, mean(token)], dim=-1) if self.context else token
        u = self.out(F.relu(self.hidden(joined.to(self.hidden.weight.dtype)))).float()
        return self.low + (self.high - self.low) * torch.sigmoid(u[..., 0])


@dataclass
class State:
    halting: Halting
    size: Tensor  # [B, N] of each token, where patches leave by folding
    shift: Tensor | None = None  # [B, 1] of the logit of leaving: a budget's, or one drawn in training
    plan: Tensor | None = None  # [B, N] the newest plan
    plans: list[Tensor] = field(default_factory=list)  # [B, N] each
    planned: list[Tensor] = field(default_factory=list)  # [B, N] bool: live on entering layer s, so N_k >= s
    features: list[Tensor] = field(default_factory=list)  # [B, N] each: f of every supervised block, when asked for


class AHT(Policy):
    """Facts: those of Halting, and with aux=('plan',) or an acting plan: plan [S, B, N], planned [S, B, N] bool,
    stages [S]; with aux=('features',) what the supervisors read, [supervised blocks, B, N]."""

    dial = "shift"
    quiet_end = True

    def __init__(self, settings: AHTSettings, shape: Shape) -> None:
        super().__init__(settings, shape)
        stages = settings.stages
        if stages is None:
            stages = tuple(sorted({max(1, shape.layers * q // 4) for q in (1, 2, 3)}))
        bad = [s for s in stages if not 1 <= s <= shape.layers]
        if bad:
            raise UserError(f"stages: expected block numbers in 1..{shape.layers}, got {bad[0]}.")
        attention = settings.feature in ("received", "class_row", "worth")
        if not attention and settings.index >= (shape.dim if settings.feature == "residual" else shape.mlp_dim):
            raise UserError(f"index: expected less than the width of the feature, got {settings.index}.")
        if settings.spare >= shape.layers:
            raise UserError(f"spare: expected less than {shape.layers}, the number of blocks, got {settings.spare}.")
        chosen = range(settings.spare, shape.layers - 1) if settings.supervised is None else settings.supervised
        check_blocks("supervised", chosen, settings.spare, shape.layers - 1)
        self.supervised = tuple(sorted(set(chosen)))
        needy = settings.feature in ("class_row", "worth")
        if not shape.class_token and (needy or settings.planner_context == "class"):
            raise UserError(
                f"This backbone has no class token for feature={settings.feature if needy else 'class_row'} or "
                "planner_context=class."
            )
        self.evidence_index = settings.index
        self.keeps_prefix = settings.class_token == "stays"
        self.quiet_end = shape.layers not in stages  # else a planner sees every token there
        self.full_blocks = min(self.supervised, default=shape.layers - 1) + 1
        self.early = settings.decide == "between"
        self.optional_aux = frozenset({"plan", "features"}) if stages else frozenset({"features"})
        many = () if settings.gate == "shared" else (shape.layers,)
        self.gamma = nn.Parameter(torch.full(many, float(settings.gamma)), requires_grad=settings.learn_gate)
        self.beta = nn.Parameter(torch.full(many, float(settings.beta)), requires_grad=settings.learn_gate)
        if settings.sample:  # what is added to the logit for the lower and for the higher share; see calibrate
            self.register_buffer("shifts", torch.tensor([1.0, -1.0]))
        high = {"1..L": shape.layers, "s..L": shape.layers, "s..L+1": shape.layers + 1}[settings.plan_range]
        width, context = max(1, int(shape.dim * settings.planner_width)), settings.planner_context != "none"
        low = {s: 1 if settings.plan_range == "1..L" else s for s in stages}
        self.planners = nn.ModuleDict({str(s): Planner(shape.dim, width, low[s], high, context) for s in stages})

    def evidence(self, layer: int, asked: frozenset[str]) -> frozenset[str]:
        settings = self.settings
        if not self.decides(layer):
            return frozenset()
        if settings.feature == "worth":
            return frozenset({"class_row", "similarity"})
        read = frozenset({settings.feature}) - {"residual"}
        return read | {"similarity"} if settings.leave == "fold" else read

    def decides(self, layer: int) -> bool:
        return layer in self.supervised

    def overhead(self, layer: int, costs: CostModel) -> tuple[float, float]:
        acts = self.settings.plan_weight > 0 and str(layer + 1) in self.planners
        return (float(row_macs(self.planners[str(layer + 1)])), 0.0) if acts else (0.0, 0.0)

    def start(self, ctx: BlockContext) -> State:
        halts = torch.ones_like(ctx.present)
        if self.settings.class_token == "stays":
            halts[:, : self.shape.num_prefix_tokens] = False
        settings, shift, device = self.settings, ctx.shift, halts.device
        if self.training and settings.sample:
            high, low = self.shifts.unbind()  # type: ignore[operator]
            shift = draw(len(halts), lambda images: low + (high - low) * torch.rand(images, 1, device=device))
        halting = Halting(halts, settings.threshold, settings.eps, settings.tau, ctx.cached_full)
        return State(halting, torch.ones(halts.shape, device=device), shift)

    def fused_gate(self, ctx: BlockContext, state: State) -> ThresholdGate | None:
        """The paper's supervisor: it reads fc1 and nothing else, and halted tokens are dropped."""
        settings, halting = self.settings, state.halting
        paper = (settings.feature, settings.decide, settings.leave) == ("fc1", "after", "drop")
        more = settings.relative > 0 or settings.plan_weight > 0 or ctx.limited or type(self)._score is not AHT._score
        if not paper or more or ctx.last or not self.decides(ctx.layer) or torch.is_grad_enabled():
            return None
        first = self.shape.num_prefix_tokens if settings.class_token == "stays" else 0
        gamma, beta = self._gate_of(ctx.layer)
        threshold = settings.threshold - settings.eps
        return ThresholdGate(gamma, beta, state.shift, threshold, first, halting.cumulative, halting.going)

    def _gate_of(self, block: int) -> tuple[Tensor, Tensor]:
        """gamma and beta, of all blocks or of this one."""
        gamma, beta = (p if p.ndim == 0 else p[block] for p in (self.gamma, self.beta))
        return gamma, beta

    def between(self, ctx: BlockContext, state: State) -> Decision | None:
        return self._decide(ctx, state) if self.settings.decide == "between" and not ctx.last else None

    def after(self, ctx: BlockContext, state: State) -> Decision | None:
        settings, layer, halting = self.settings, ctx.layer + 1, state.halting
        if str(layer) in self.planners and (settings.plan_weight > 0 or "plan" in ctx.aux):
            # the planner sees whoever entered this layer, those that halt in it included (Listing 1.1, line 31)
            part = "policy" if settings.plan_weight > 0 else "asked"
            over = ctx.present.float()
            if settings.planner_context == "class":
                over = over * (torch.arange(over.shape[1], device=over.device) == 0)
            state.plan = ctx.apply(self.planners[str(layer)], over, part=part)
            state.plans.append(state.plan)
            state.planned.append(ctx.present & halting.halts)
        return self._decide(ctx, state) if settings.decide == "after" or ctx.last else None

    def _decide(self, ctx: BlockContext, state: State) -> Decision:
        settings, layer, halting = self.settings, ctx.layer + 1, state.halting
        spared = not self.decides(ctx.layer)
        gate = ctx.evidence.get("gate")
        if gate is None:
            surplus = None if spared else ctx.over_limit
            score, margin = self._score(ctx, state)
            full, mass = halting.step(score, layer, ctx.last, surplus=surplus, margin=margin)
        else:
            if "features" in ctx.aux:
                state.features.append(self._feature(ctx))
            full, mass = halting.take(gate, layer)
        share = mass if settings.class_token == "mean_field" else None
        if spared:
            return Keep(readout_weight=share)
        weight = halting.presence[-1] if settings.straight_through else None
        if settings.leave == "drop":
            stays, zeroed = None if gate is None else gate.active, settings.halted == "zeroed"
            return Drop(full, key_weight=weight, zero_on_exit=zeroed, readout_weight=share, staying=stays)
        merge_weight = None
        if settings.feature in ("class_row", "worth"):  # as fold: who is attended to has more to merge_weight in a mean
            merge_weight = state.size * ctx.evidence["class_row"].clamp_min(1e-9) ** 0.5
        merge = fold(full, ctx.patches, state.size, ctx.evidence["similarity"], merge_weight)
        assert merge.size is not None
        state.size = merge.size
        return replace(merge, key_weight=weight, readout_weight=share)

    def _score(self, ctx: BlockContext, state: State) -> tuple[Tensor, Tensor | None]:
        """[B, N] h of this layer, 0 where nobody halts yet; and with slope=logit by how much gamma f + ... is above
        what would just halt the token, in units of f."""
        settings, number, spent = self.settings, ctx.layer, state.halting.cumulative
        if not self.decides(number):
            return torch.zeros_like(spent), None
        gamma, beta = (value.float() for value in self._gate_of(number))
        feature = self._feature(ctx)
        if settings.relative > 0:
            feature = feature - settings.relative * _mean_of(feature, ctx.patches)
        if "features" in ctx.aux:
            state.features.append(feature)
        logit = gamma * feature + beta
        if settings.plan_weight > 0 and state.plan is not None:
            logit = logit + settings.plan_weight * (self._held_against(ctx, state.plan) - state.plan)
        logit = logit if state.shift is None else logit + state.shift
        margin = None
        if settings.slope == "logit" and torch.is_grad_enabled():  # it is for the gradient alone
            missing = (settings.threshold - settings.eps - spent.detach()).clamp(0.001, 0.999)
            margin = (logit - torch.logit(missing)) / gamma.detach().abs().clamp_min(1e-3)
        return torch.sigmoid(logit), margin

    def _held_against(self, ctx: BlockContext, plan: Tensor) -> Tensor | int:
        """The depth at which a plan says neither stay nor leave: this layer, or the mean of the image [B, 1]."""
        if self.settings.plan_against == "layer":
            return ctx.layer + 1
        return _mean_of(plan, ctx.patches)

    def _feature(self, ctx: BlockContext) -> Tensor:
        """[B, N] what the supervisor reads."""
        name = self.settings.feature
        if name == "worth":
            alike, _ = ctx.evidence["similarity"].nearest(ctx.patches)
            distance = (1 - alike.clamp(-1, 1)).clamp_min(1e-6)
            count = ctx.present.sum(-1, keepdim=True)
            return -0.5 * ((ctx.evidence["class_row"].clamp_min(1e-6) ** 2) * count * distance).log()
        if name == "residual":
            return ctx.channel(self.settings.index)
        if name in ("fc1", "gelu"):
            return ctx.evidence[name]
        return -(ctx.evidence[name] * ctx.present.sum(-1, keepdim=True)).clamp_min(1e-6).log()

    def facts(self, state: State) -> dict[str, Tensor]:
        facts = state.halting.facts()
        if self.settings.decide == "between":  # the MLP sees who is left by then
            presence = facts["presence"]
            facts["presence_mlp"] = torch.cat([presence[1:], presence[-1:]])
        if state.features:
            facts["features"] = torch.stack(state.features)
        if state.plans:
            device = state.plans[0].device  # a tensor made of a list would have to wait for a GPU
            stages = [torch.full((), s, device=device) for s in sorted(int(s) for s in self.planners)]
            facts |= {
                "plan": torch.stack(state.plans),
                "planned": torch.stack(state.planned),
                "stages": torch.stack(stages),
            }
        return facts

    @torch.no_grad()
    def calibrate(self, model: AdaptiveViT, images: Tensor, share: float | None = None) -> str | None:
        """Bisect beta so that training starts with a mean depth of about L - 1 (a gate far below its threshold has no
        slope and does not learn) or at the cost that it aims at; and the shifts of sampled budgets."""
        if not self.settings.learn_gate:
            return None
        training = model.training
        model.eval()

        offset = torch.zeros_like(self.beta)  # of each layer from what is found below
        there = share is not None and self.settings.start == "budget"
        goal = share if there and share else self.shape.layers - 1.0

        def above(goal: float, by_depth: bool) -> bool:
            out = model(images)
            cost = out.trace.mean_depth if by_depth else out.macs_deployed / model.static_macs(out)
            return float(cost.mean()) > goal

        def found(goal: float, by_depth: bool) -> float:
            """The beta that comes nearest."""
            high = 20.0 * max(1.0, float(self.gamma.abs().max()))
            low = -high
            for _ in range(18):
                middle = (low + high) / 2
                self.beta.copy_(offset + middle)
                low, high = (middle, high) if above(goal, by_depth) else (low, middle)
            return (low + high) / 2

        if self.settings.gate == "layer" and self.supervised:  # first the same share of patches stays in every layer
            self.beta.fill_(-1e4)
            fewest, most = 0.0, 1.0
            for _ in range(12):
                keep = (fewest + most) / 2
                for _ in range(3):  # who leaves a layer changes what the next ones see
                    self._keeping(keep, model(images, aux={"features"}).trace, offset)
                    self.beta.copy_(offset)
                fewest, most = (fewest, keep) if above(goal, not there) else (keep, most)
        beta = found(goal, by_depth=not there)
        edges = [found(edge, by_depth=False) for edge in self.settings.sample]
        self.beta.copy_(offset + beta)
        if edges:
            self.shifts.copy_(torch.tensor(edges) - beta)  # type: ignore[operator]
        depth = float(model(images).trace.mean_depth.mean())
        model.train(training)
        return f"beta = {beta:.3f} for a starting mean depth of {depth:.2f} of {self.shape.layers}"

    def _keeping(self, keep: float, trace: Trace, offset: Tensor) -> None:
        """Set gamma, and the offset of beta, of each layer so that a share `keep` of the patches that enter it stays
        (all images taken together), and gamma f has the deviation that the setting gamma asks for."""
        prefix, settings = self.shape.num_prefix_tokens, self.settings
        enough = math.log((settings.threshold - settings.eps) / max(1 - settings.threshold + settings.eps, 1e-3))
        for block, values in zip(self.supervised, trace.facts["features"], strict=True):
            feature = values[:, prefix:][trace.attended[block, :, prefix:]]
            if feature.numel() > 1:
                self.gamma[block] = settings.gamma / feature.std().clamp_min(1e-3)
                last = min(max(int(keep * feature.numel()), 1), feature.numel() - 1)
                edge = feature.sort().values[last - 1 : last + 1].mean()  # between two: neither is at the gate's edge
                offset[block] = enough - self.gamma[block] * edge - self._planned(block + 1)

    def _planned(self, layer: int) -> float:
        """What fresh planners, which all plan the middle of their range, add to the logit of a layer (1-based)."""
        known = [s for s in sorted(int(s) for s in self.planners) if s < layer + (self.settings.decide == "after")]
        if not known or not self.settings.plan_weight or self.settings.plan_against == "image":
            return 0.0
        planner = self.planners[str(known[-1])]
        return self.settings.plan_weight * (layer - (planner.low + planner.high) / 2)  # type: ignore[operator]
