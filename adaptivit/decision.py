"""The vocabulary: what a policy decides, and the trace of a forward pass. Start reading here.

Shapes: B images, N slots a image (prefix tokens first: class, distillation, registers), D width, L blocks.

Slots are stable: token i of image b is cell (b, i) of a fixed [B, N] grid. Masks, scores and weights live on that grid;
only token rows are moved. Every token has a weight w >= 0 and attention is the w-weighted softmax,
a_ij = w_j exp(s_ij) / sum_j w_j exp(s_ij): w = 0 is absence, w = size is ToMe's proportional attention.

A policy is asked before a block, between attention and MLP, and after a block, and answers with one of:

    Keep   nothing changes                               (and None means Keep())
    Drop   tokens leave for good                         AHT-ViT, A-ViT, DynamicViT, early exits (all of an image)
    Skip   tokens skip this block and are back after it  MoD, A-MoD
    Merge  tokens leave and merge into another slot      ToMe, EViT's fused token, fold

Any answer may carry `readout_weight` [B, N]: the part of each token's current value that goes into the readout. Without
any the head reads the last values; with them it reads their sum (A-ViT's class token, ACT). A Drop of whole images may
carry `logits`, their answer by a head of the policy's own (BranchyNet).

Drop, Skip and Merge may carry `tokens_left`: how many tokens of every image take part afterwards, where that is known
beforehand and the same for all. A layout of fixed shapes then need not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from .errors import UserError

When = Literal["before", "between", "after"]


@dataclass(frozen=True)
class Keep:
    """Nothing leaves."""

    readout_weight: Tensor | None = None  # [B, N] part of the current value that the readout takes


@dataclass(frozen=True)
class Drop:
    """Tokens leave for good: frozen at their present value, and no keys from now on."""

    leaving: Tensor  # [B, N] bool
    # [B, N] 0/1 key weights whose gradient a policy may choose (straight-through); 0 where a token has left
    key_weight: Tensor | None = None
    self_key_grad: bool = True  # that gradient also comes through a token's attention to itself (not in DynamicViT)
    zero_on_exit: bool = False  # a dense head reads zeros (A-ViT) instead of the last value of a token that left
    readout_weight: Tensor | None = None
    logits: Tensor | None = None  # [B, C] the answer of images that leave, in place of the model's head on last values
    tokens_left: int | None = None
    staying: Tensor | None = None  # [B, N] bool: active and not leaving, where the policy knows it; not recorded


@dataclass(frozen=True)
class Skip:
    """Tokens skip this block. With a gate g the others become x + g (block(x) - x). Only before a block."""

    skipped: Tensor  # [B, N] bool
    gate: Tensor | None = None  # [B, N]
    readout_weight: Tensor | None = None
    tokens_left: int | None = None


@dataclass(frozen=True)
class Merge:
    """Row j becomes the sum of source_weight_i x_i over all i with target_i = j; tokens with another target leave.

    A token that stays by itself has its own slot as target and weight 1; target = -1 leaves without merging. ToMe's
    size-weighted mean has weights size_i / (sum of merged sizes), EViT's fused token has attention as weights.
    """

    target: Tensor  # [B, N] long
    source_weight: Tensor  # [B, N]
    size: Tensor | None = None  # [B, N] size of each token from now on: its weight as a key; None leaves sizes alone
    key_weight: Tensor | None = None  # as in Drop: 0/1 with a gradient of the policy's choice
    self_key_grad: bool = True
    readout_weight: Tensor | None = None
    tokens_left: int | None = None
    # the tokens active before [B, N] bool and how many are left [B] int32, where the policy knows it; not recorded
    left_counts: tuple[Tensor, Tensor] | None = None


Decision = Keep | Drop | Skip | Merge
_FIELDS = {  # torch.compile reads this
    kind: tuple(f.name for f in fields(kind) if f.name not in ("staying", "left_counts"))
    for kind in (Keep, Drop, Skip, Merge)
}


@dataclass(frozen=True)
class AppliedDecision:
    """One answer of a policy, as it was carried out."""

    layer: int
    when: When
    decision: Decision


@dataclass(frozen=True)
class Trace:
    """Which tokens were computed where: what losses, cost, plots and replay need of a forward pass."""

    attended: Tensor  # [L, B, N] bool: took part in the block's attention
    updated: Tensor  # [L, B, N] bool: took part in the block's MLP
    num_prefix_tokens: int  # number of tokens before the patches
    steps: tuple[AppliedDecision, ...] = ()
    # what the policy reports, on the grid: scores, halt, remainder, plan ... (see its docstring)
    facts: dict[str, Tensor] = field(default_factory=dict)
    pooled: str = "all"  # what a pooling head read: the last value of "all" tokens, or those "remaining"

    @property
    def live(self) -> Tensor:
        """[L, B] tokens that entered each block's attention."""
        return self.attended.sum(-1)

    @property
    def live_mlp(self) -> Tensor:
        """[L, B] tokens that entered each block's MLP."""
        return self.updated.sum(-1)

    @property
    def depth(self) -> Tensor:
        """[B, N] blocks that computed this token."""
        return self.attended.sum(0)

    @property
    def mean_depth(self) -> Tensor:
        """[B] mean depth of the patches of each image."""
        return self.depth[:, self.num_prefix_tokens :].double().mean(-1)

    def fact(self, name: str) -> Tensor:
        """A fact by name, or an error that says how to get it."""
        if name not in self.facts:
            raise UserError(
                f"This forward pass has no fact {name!r} (it has: {', '.join(sorted(self.facts)) or 'none'}). "
                f"Its policy does not have it, or computes it only when asked: model(images, aux=('{name}',))."
            )
        return self.facts[name]


def detached(decision: Decision, device: torch.device | None = None) -> Decision:
    """The same answer without gradients, for the record, or on another device."""
    values: dict[str, Any] = {}
    for name in _FIELDS[type(decision)]:
        value = getattr(decision, name)
        values[name] = value.detach().to(device or value.device) if isinstance(value, torch.Tensor) else value
    return type(decision)(**values)
