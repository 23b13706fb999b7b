"""The vocabulary: what a policy can say, and what a forward pass leaves behind. Start reading here.

Shapes: B images, N slots a image (prefix tokens first: class, distillation, registers), D width, L blocks.

Slots are stable: token i of image b is cell (b, i) of a fixed [B, N] grid for ever. Masks, scores and weights
live on that grid; only the token rows are ever moved. Every token has a weight w >= 0 and attention is the
w-weighted softmax, a_ij = w_j exp(s_ij) / sum_j w_j exp(s_ij): w = 0 is absence, w = size is ToMe's
proportional attention.

A policy is asked before a block, between attention and MLP, and after a block, and answers with one of:

    Keep   nothing changes                               (and None means Keep())
    Drop   tokens leave for good                         AHT-ViT, A-ViT, DynamicViT, early exits (all of an image)
    Skip   tokens sit out this block and come back       MoD, A-MoD
    Merge  tokens leave and fold into another slot       ToMe, EViT's fused token, folding

Any answer may carry `share` [B, N]: how much of each token's current value goes into the readout. Without any
share the head reads the last values; with shares it reads their sum (A-ViT's class token, ACT).

Drop, Skip and Merge may carry `count`: how many tokens of every image take part afterwards, where that is the same for
all and known beforehand. A layout of fixed shapes then need not look.
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
    """Tokens leave for good: frozen at their present value, seen by nobody from now on."""

    leaving: Tensor  # [B, N] bool
    # [B, N] 0/1 key weights whose gradient a policy may choose (straight-through); 0 where a token has left
    key_weight: Tensor | None = None
    self_key_grad: bool = (
        True  # whether that gradient also comes through a token's attention to itself (not in DynamicViT)
    )
    zero_on_exit: bool = False  # what a dense head sees of a token that left: zeros (A-ViT) instead of its last value
    readout_weight: Tensor | None = None
    tokens_left: int | None = None
    staying: Tensor | None = None  # [B, N] bool: active and not leaving, where the policy knows it; not recorded


@dataclass(frozen=True)
class Skip:
    """Tokens sit out this block. With a gate g the others get z = x + g (block(x) - x). Only before a block."""

    skipped: Tensor  # [B, N] bool
    gate: Tensor | None = None  # [B, N]
    readout_weight: Tensor | None = None
    tokens_left: int | None = None


@dataclass(frozen=True)
class Merge:
    """Row j becomes the sum of scale_i x_i over all i with into_i = j; whoever goes elsewhere leaves for good.

    A token that stays by itself has into = its own slot and scale = 1; into = -1 leaves and folds into nobody.
    ToMe's size-weighted mean has scale_i = size_i / (sum of sizes that meet), EViT's fused token has scale_i = class
    attention.
    """

    target: Tensor  # [B, N] long
    source_weight: Tensor  # [B, N]
    size: Tensor | None = None  # [B, N] size of each token from now on: its weight as a key; None leaves sizes alone
    key_weight: Tensor | None = None  # as in Drop: 0/1 with a gradient of the policy's choice
    self_key_grad: bool = True
    readout_weight: Tensor | None = None
    tokens_left: int | None = None
    # how many of those who were here [B, N] bool are left [B] int32, where the policy knows it already; not recorded
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
    """Who was computed where. Everything that losses, cost, plots and replay need of a forward pass."""

    attended: Tensor  # [L, B, N] bool: took part in the block's attention
    updated: Tensor  # [L, B, N] bool: took part in the block's MLP
    num_prefix_tokens: int  # number of tokens before the patches
    steps: tuple[AppliedDecision, ...] = ()
    # what the policy itself wants known, on the grid: scores, halt, remainder, plan ... (see its docstring)
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
                f"Ask for it: model(images, aux=('{name}',)), with a policy that has it."
            )
        return self.facts[name]


def detached(decision: Decision, device: torch.device | None = None) -> Decision:
    """The same answer without gradients, for the record, or on another device."""
    values: dict[str, Any] = {}
    for name in _FIELDS[type(decision)]:
        value = getattr(decision, name)
        values[name] = value.detach().to(device or value.device) if isinstance(value, torch.Tensor) else value
    return type(decision)(**values)
