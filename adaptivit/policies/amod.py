"""A-MoD: the attention of the block before is the router (Gadhikar et al., Sec. 3, Eq. 2). No parameters.

Shapes: B images, N slots.

    r_i = mean over heads and query rows of A^{l-1}[:, i]       attention received in the last dense block before
    Block(X_selected)_i   for the k = ceil(C N) tokens with the highest r, x_i for the others; no gate

With multiply=True the scores gate the block as in MoD (Fig. 7, where it slows learning down).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from ..cost import Shape
from ..decision import Skip
from ..errors import UserError
from .base import Policy
from .mod import ROUTING, routed_blocks, skip
from .records import AMoDSettings

if TYPE_CHECKING:
    from .context import BlockContext


@dataclass
class State:
    received: Tensor | None = None  # [B, N] of the last dense block


class AMoD(Policy):
    def __init__(self, settings: AMoDSettings, shape: Shape) -> None:
        super().__init__(settings, shape, replace(ROUTING, evidence_grad=settings.multiply))
        self.blocks = frozenset(routed_blocks(settings.blocks, settings.first_block, shape.layers))
        if 0 in self.blocks:
            name = "first_block" if settings.blocks is None else "blocks"
            raise UserError(f"{name}: block 0 has no attention before it to be routed by; start at block 1.")
        # read here: the nearest dense block before every routed one
        self.read_blocks = frozenset(max(d for d in range(b) if d not in self.blocks) for b in self.blocks)

    def evidence(self, layer: int, aux: frozenset[str]) -> frozenset[str]:
        return frozenset({"received"}) if layer in self.read_blocks else frozenset()

    def init_state(self, ctx: BlockContext) -> State:
        return State()

    def before(self, ctx: BlockContext, state: State) -> Skip | None:
        if ctx.layer not in self.blocks:
            return None
        assert state.received is not None
        ctx.record_scores(state.received, ctx.layer)
        gate = state.received if self.settings.multiply else None
        return skip(state.received.detach(), ctx, self.settings.capacity, gate)

    def between(self, ctx: BlockContext, state: State) -> None:
        if ctx.layer in self.read_blocks:
            state.received = ctx.evidence["received"]
