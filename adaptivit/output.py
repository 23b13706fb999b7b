"""What a forward pass returns. Losses, cost, plots and reports read this and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .cost import CostModel
from .decision import Trace


@dataclass(frozen=True)
class Output:
    """B images, N slots, D width."""

    logits: Tensor  # [B, classes]
    features: Tensor  # [B, D] what the classifier reads
    trace: Trace
    # [B] MACs by part: embedding, blocks, head, policy (planners, routers that act), evidence, asked (only on request)
    parts: dict[str, Tensor]
    costs: CostModel
    layout: str
    tokens: Tensor | None = None  # [B, N, D] last value of every token, when asked for
    patches: Tensor | None = None  # [B, N - prefix, D] the patches among them after the final norm, when asked for

    @property
    def macs(self) -> Tensor:
        """[B] multiply-accumulates that ran for this image, planners, routers and evidence included."""
        return sum(self.parts.values(), start=self.parts["blocks"] * 0)

    @property
    def macs_blocks(self) -> Tensor:
        """[B] what the papers count: embedding, blocks, head."""
        return self.parts["embedding"] + self.parts["blocks"] + self.parts["head"]

    @property
    def macs_deployed(self) -> Tensor:
        """[B] `macs` without what was run only because somebody asked (a plan that does not act)."""
        return self.macs - self.parts["asked"]
