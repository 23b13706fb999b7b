"""The blocks of fused.py with norms worked into the products behind them, for captured passes.

    LayerNorm(x) W^T + b = rstd (x W'^T - mean u) + c

Shapes: D width, N width out of a product. W' [N, D], u and c [N] are copies that depend on the weights, held where a
CUDA graph can read them, and made anew when the weights have changed. The moments that mean and rstd are found from
come with the rows, from the product that wrote them (ops/norm_folded.py); a move, or whatever else changes rows, leaves
the norm a pass of its own.

Which norms those are is the same in every pass of one plan, and a first pass finds out: it measures all rows, and folds
the norms that it can. From then on rows are measured for these alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import fused
from .backbone import Taps
from .fused import Product
from .layouts import PackedOnDevice
from .ops.kernels import precision
from .ops.norm_folded import fold

_steps = [0]


@cache
def _count_steps() -> None:
    """From now on count the steps of all optimisers: fused ones change weights, and torch does not count it."""

    def count(*_: Any) -> None:
        _steps[0] += 1

    register_optimizer_step_post_hook(count)


def _weights(norm: Any, product: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return norm.weight, norm.bias, product.weight, product.bias


def possible(vit: VisionTransformer) -> bool:
    """Whether copies can be kept up to date, and are as exact: torch does not count the changes of inference tensors,
    and TF32 rounds rows before their mean is taken off."""
    pairs = [pair for block in vit.blocks for pair in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp.fc1))]
    known = [t for pair in pairs for t in _weights(*pair) if t is not None]
    rounded = known[0].dtype == torch.float32 and precision(torch.float32) == "tf32"
    return not rounded and not any(t.is_inference() for t in known)


class Folded:
    """embed, attention and mlp as forward.py calls them, for one model."""

    embed = staticmethod(fused.embed)

    def __init__(self, vit: VisionTransformer) -> None:
        self._blocks: Any = vit.blocks
        self._qkv: list[Product | None] = [None] * len(vit.blocks)
        self._fc1: list[Product | None] = [None] * len(vit.blocks)
        self._learns = True
        self._watched: list[Tensor] = []
        self._version = 0

    @property
    def norms(self) -> int:
        """How many norms are folded."""
        return sum(product is not None for product in (*self._qkv, *self._fc1))

    def attention(self, block: Any, layout: PackedOnDevice, taps: Taps) -> None:
        layer = layout.layer
        if self._learns and fused.foldable(layout.stream()):
            self._qkv[layer] = _product(block.norm1, block.attn.qkv)
        fused.attention(block, layout, taps, self._qkv[layer], self._learns or self._fc1[layer] is not None)

    def mlp(self, block: Any, layout: PackedOnDevice, taps: Taps) -> None:
        layer = layout.layer
        if self._learns and fused.foldable(layout.stream()):
            self._fc1[layer] = _product(block.norm2, block.mlp.fc1)
        last = layer + 1 == len(self._qkv)
        measures = not last and (self._learns or self._qkv[layer + 1] is not None)
        fused.mlp(block, layout, taps, self._fc1[layer], measures)

    def settle(self) -> bool:
        """After the first pass: fold what it did, and nothing else. Whether there is anything."""
        self._learns = False
        _count_steps()
        self._watched = [t for pair in self._pairs() for t in _weights(*pair[1:]) if t is not None]
        self._version = self._count()
        return self.norms > 0

    def _pairs(self) -> list[tuple[Product, Any, Any]]:
        """The products that are folded, each with its norm and its linear layer."""
        found = []
        for block, qkv, fc1 in zip(self._blocks, self._qkv, self._fc1, strict=True):
            found += [] if qkv is None else [(qkv, block.norm1, block.attn.qkv)]
            found += [] if fc1 is None else [(fc1, block.norm2, block.mlp.fc1)]
        return found

    def _count(self) -> int:
        """Grows with every change of a weight that torch counts, and with every step of an optimiser."""
        return sum(t._version for t in self._watched) + _steps[0]

    def update(self) -> None:
        """Fold again if a weight has changed."""
        if self._count() != self._version:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Fold again, in place."""
        self._version = self._count()
        for product, norm, linear in self._pairs():
            for held, now in zip((product.weight, product.sums, product.shift), _fold(norm, linear), strict=True):
                held.copy_(now)


def _fold(norm: Any, linear: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fold(*_weights(norm, linear))


def _product(norm: Any, linear: Any) -> Product:
    """In ordinary tensors, whatever the mode is: they are written to again."""
    with torch.inference_mode(False), torch.no_grad():
        return Product(*_fold(norm, linear), norm.eps)
