"""Halting of A-ViT and AHT-ViT: scores add up until they are full, then the token halts.

Shapes: B images, N slots, L layers. Layers are counted 1..L here, as in the papers.

    c_l = sum of h_1..h_l,   N = first l with c_l >= T - eps (L at the latest),   r = 1 - c_{N-1} / T   (A-ViT Eq. 4, 6)
    p_l = h_l / T for l < N,  r for l = N,  0 after                                                      (A-ViT Eq. 7)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels.threshold_gate import GateResult


@dataclass
class Halting:
    """Accumulators on the grid, in float32."""

    halts: Tensor  # [B, N] bool: tokens that halt at all (patches; the class token by choice)
    threshold: float
    eps: float
    surrogate_width: float  # of the soft step whose slope is the straight-through gradient
    full: Callable[..., Tensor] | None = None  # BlockContext.cached_full: shared tensors, not to be written to
    cumulative: Tensor = field(init=False)  # [B, N] c
    going: Tensor = field(init=False)  # [B, N] bool: has not halted
    halt: Tensor = field(init=False)  # [B, N] long: N, 0 while going
    remainder: Tensor = field(init=False)  # [B, N] r, with gradient
    scores: list[Tensor] = field(default_factory=list)  # [B, N] each: h, 0 after halting
    presence: list[Tensor] = field(default_factory=list)  # [B, N] each: 0/1 on entering a layer, soft gradient
    margin: Tensor | None = None  # [B, N] the largest so far, where steps tell it

    def __post_init__(self) -> None:
        full = self.full
        if full is None:  # torch 2.11's dynamo refuses the truth value of a bound method
            full = functools.partial(torch.full, self.halts.shape, device=self.halts.device)
        zero = full(0.0, dtype=torch.float32)
        self.cumulative, self.remainder = zero, zero
        self.going = full(True, dtype=torch.bool)
        self.halt = torch.zeros_like(self.halts, dtype=torch.long)
        self.presence.append(zero + 1.0)

    def step(
        self,
        score: Tensor,
        layer: int,
        last: bool,
        leaders: int = 0,
        over_limit: Callable[[Tensor, Tensor], Tensor | None] | None = None,
        margin: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add the score [B, N] of layer `layer` (1-based): [B, N] bool which tokens halt now, [B, N] the mass p_l.

        `leaders`: an image ends when its first so many tokens have halted. `over_limit`: tokens that it names halt.
        `margin` [B, N]: how far this score is above what was missing, in a unit of the caller's; the
        gradient then follows it.
        """
        score = torch.ones_like(score) if last else score  # h_L := 1
        score = torch.where(self.going, score, torch.zeros_like(score))
        if margin is not None:
            before = torch.full_like(margin, -1e4) if self.margin is None else self.margin
            self.margin = torch.where(self.going, torch.maximum(before, margin), before)
        spent = self.cumulative / self.threshold  # c_{l-1} / T
        self.cumulative = self.cumulative + torch.where(self.halts, score, torch.zeros_like(score))
        full = self.going & self.halts & (self.cumulative >= self.threshold - self.eps)
        if leaders:
            over = ~(self.going & ~full)[:, :leaders].any(-1, keepdim=True)
            full = full | (self.going & over)
        forced = None if over_limit is None or last else over_limit(self.going & ~full, self.cumulative.detach())
        full = full if forced is None else full | forced
        full = full | self.going if last else full
        mass = self._record(full, spent, score, layer)
        self.going = self.going & ~full
        if not last:
            self.presence.append(self.straight_through())
        return full, mass

    def take(self, gate: GateResult, layer: int) -> Tensor:
        """The same as step, where a kernel has added the score and compared the sum: the tokens that halt now."""
        full, spent = self.going > gate.active, self.cumulative / self.threshold
        self.cumulative, self.going = gate.total, gate.active
        self.presence.append(self.going.float())
        self._record(full, spent, gate.score, layer)
        return full

    def _record(self, full: Tensor, spent: Tensor, score: Tensor, layer: int) -> Tensor:
        """Record the score, and what halting in this layer means for the tokens that do; the mass p_l."""
        self.remainder = torch.where(full, 1.0 - spent, self.remainder)
        self.halt = torch.where(full, layer, self.halt)
        self.scores.append(score)
        return torch.where(full, 1.0 - spent, score / self.threshold)

    def straight_through(self) -> Tensor:
        """[B, N] weight from now on: 0/1 in the forward pass, the slope of a soft step in the backward: in c, or in the
        margin, which does not vanish where a score is near 0 or 1. No slope without gradients."""
        if not torch.is_grad_enabled():
            return self.going.float()
        missing = self.threshold - self.eps - self.cumulative if self.margin is None else -self.margin
        soft = torch.sigmoid(missing / self.surrogate_width)
        return self.going.float() + torch.where(self.halts, soft - soft.detach(), torch.zeros_like(soft))

    def facts(self) -> dict[str, Tensor]:
        """What the losses and reports read.

        scores [L, B, N], halt [B, N] = N_k, remainder [B, N], presence [L, B, N], halts [B, N], threshold []."""
        return {
            "scores": torch.stack(self.scores),
            "halt": self.halt,
            "remainder": self.remainder,
            "presence": torch.stack(self.presence),
            "halts": self.halts,
            "threshold": torch.full((), float(self.threshold), device=self.halt.device),
        }
