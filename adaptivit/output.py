"""What a forward pass returns. Losses, cost, plots and reports read this and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .cost import AddedMacs, CostModel
from .decision import Trace


@dataclass(frozen=True)
class Output:
    """B images, N slots, D width."""

    logits: Tensor  # [B, classes]
    features: Tensor  # [B, D] what the classifier reads
    trace: Trace
    costs: CostModel
    layout: str
    tokens: Tensor | None = None  # [B, N, D] last value of every token, when asked for
    patches: Tensor | None = None  # [B, N - prefix, D] the patches among them after the final norm, when asked for
    added_macs: tuple[AddedMacs, ...] = ()  # what `parts` adds up
    pooled: int | None = None  # tokens that a pooling head read, where it read fewer than there are slots
    prefix_only_mlp: bool = False  # the last MLP took only the tokens that the head reads
    counted: dict[str, Tensor] | None = None  # `parts`, where several passes were joined and each has counted its own
    ran: Tensor | None = None  # [B] `macs_ran`, likewise

    @cached_property
    def parts(self) -> dict[str, Tensor]:
        """[B] MACs by part: embedding, blocks, head, policy (planners, routers that act), evidence, asked (only on
        request). Counted when first asked for."""
        if self.counted is not None:
            return self.counted
        blocks = self.costs.blocks(self.trace.live.double(), self.trace.live_mlp.double())
        zero = torch.zeros_like(blocks)
        head = self.costs.head if self.pooled is None else self.costs.head_over(self.pooled)
        parts = {"embedding": zero + self.costs.embedding, "blocks": blocks, "head": zero + head}
        parts |= {"policy": zero, "evidence": zero, "asked": zero}
        for spent in self.added_macs:
            parts[spent.part] = parts[spent.part] + spent.macs(spent.present.sum(-1).double())
        return parts

    @property
    def macs(self) -> Tensor:
        """[B] multiply-accumulates of this image, planners, routers and evidence included, on whatever layout."""
        return sum(self.parts.values(), start=self.parts["blocks"] * 0)

    @property
    def macs_ran(self) -> Tensor:
        """[B] `macs` without the patches in the last MLP, where a compact layout left them out."""
        if self.ran is not None or not self.prefix_only_mlp:
            return self.macs if self.ran is None else self.ran
        unread = self.trace.live_mlp[-1].double() - self.costs.shape.head_tokens
        return self.macs - unread * self.costs.mlp

    @property
    def macs_blocks(self) -> Tensor:
        """[B] what the papers count: embedding, blocks, head."""
        return self.parts["embedding"] + self.parts["blocks"] + self.parts["head"]

    @property
    def macs_deployed(self) -> Tensor:
        """[B] `macs` without what was run on request alone (a plan)."""
        return self.macs - self.parts["asked"]
