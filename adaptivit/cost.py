"""Multiply-accumulates (MACs) per image, counted from which tokens were computed where.

The papers write "GFLOPs" for what are GMACs: static DeiT-T/S/B at 224 px have 1.254 / 4.599 / 17.564. We say GMACs.
Like them and like torch's FlopCounterMode we count matrix products and convolutions, not element-wise work. The
count is what a compact layout runs, except in the last MLP, where it may leave out tokens that nothing reads
(Output.macs_ran); `masked` runs every row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from .utils.coerce import up_to

if TYPE_CHECKING:  # a checkpoint's description is checked without torch
    from torch import Tensor, nn

Size = Annotated[int, up_to(10**9)]
Index = Annotated[int, up_to(10**9, 0)]


@dataclass(frozen=True)
class Shape:
    """The facts of a backbone that policies, layouts and cost need."""

    layers: Size
    tokens: Size  # at the nominal image size; a forward pass counts its own
    num_prefix_tokens: Index  # class, distillation and register tokens
    dim: Size
    heads: Size
    attention_dim: Size  # heads x head width
    mlp_dim: Size
    patch_macs: Size  # multiply-accumulates to embed one patch
    classes: Index
    num_classifiers: Index  # classifier heads (2 for distilled DeiT, 0 without a classifier)
    class_token: bool
    head_tokens: Index  # leading slots that the head reads; `tokens` when it pools over patches
    gated: bool = False  # attention output gate (a linear layer more)
    latent_pool: bool = False  # attention pooling head
    pool_prefix: bool = False  # which pools over the prefix tokens too

    @property
    def outputs(self) -> int:
        """Of the head; 0 without a classifier."""
        return self.classes if self.num_classifiers else 0


def row_macs(module: nn.Module) -> int:
    """Multiply-accumulates of a row-wise module (planner, router) for one row."""
    from torch import nn

    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


@dataclass(frozen=True)
class AddedMacs:
    """MACs beside the blocks: noted while a pass runs, added up on request."""

    part: str  # policy, evidence or asked
    present: Tensor  # [B, N] bool
    macs: Callable[[Tensor], Tensor]  # [B] tokens present (float64) -> [B]
    block: int | None = None  # where `present` is the mask of this block's attention


@dataclass(frozen=True)
class CostModel:
    """Analytic costs of a backbone. Counts may be soft (differentiable), as the cost loss needs them."""

    shape: Shape
    tokens: int  # slots at the image size of this forward pass

    @property
    def embedding(self) -> float:
        return float((self.tokens - self.shape.num_prefix_tokens) * self.shape.patch_macs)

    @property
    def head(self) -> float:
        return self.head_over(self.tokens)

    def head_over(self, tokens: int) -> float:
        """MACs of the head where it is given so many tokens."""
        shape = self.shape
        macs = float(shape.num_classifiers * shape.dim * shape.classes)
        if shape.latent_pool:  # q, kv, scores and values, projection, MLP of one latent query over the patches
            pooled = tokens - (0 if shape.pool_prefix else shape.num_prefix_tokens)
            macs += (
                2 * shape.dim**2 + pooled * 2 * shape.dim**2 + 2 * pooled * shape.dim + 2 * shape.dim * shape.mlp_dim
            )
        return macs

    def blocks(self, attended: Tensor, updated: Tensor) -> Tensor:
        """[L, B] tokens in each attention and each MLP -> [B] MACs of all blocks."""
        return self._block(attended, updated).sum(0)

    def _block(self, attended: Any, updated: Any) -> Any:
        """MACs of a block from the tokens in its attention and in its MLP: numbers or tensors."""
        shape = self.shape
        projections = shape.dim * shape.attention_dim * (5 if shape.gated else 4)
        attention = attended * projections + 2 * attended * attended * shape.attention_dim
        return attention + updated * self.mlp

    @property
    def mlp(self) -> float:
        """MACs of a token in an MLP."""
        return 2.0 * self.shape.dim * self.shape.mlp_dim

    @property
    def static(self) -> float:
        """MACs of the backbone with every token everywhere."""
        return self.embedding + self.head + self.shape.layers * float(self._block(self.tokens, self.tokens))

    def evidence(self, name: str, present: Tensor) -> Tensor:
        """[B] tokens present -> [B] MACs of evidence, beside the block's own."""
        shape = self.shape
        if name == "received":  # the scores are computed again, for every query
            return present * present * shape.attention_dim
        if name == "similarity":  # cosine of head-mean keys, every token with every other
            return present * present * (shape.attention_dim // shape.heads)
        if name == "class_row":
            return present * shape.attention_dim
        if name == "halted_row":  # one more row through the block
            projections = shape.dim * shape.attention_dim * (5 if shape.gated else 4)
            return present * 2 * shape.attention_dim + projections + 2 * shape.dim * shape.mlp_dim
        return present * 0
