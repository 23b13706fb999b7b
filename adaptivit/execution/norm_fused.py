"""The blocks of fused.py with norms worked into the products behind them, for captured passes.

    LayerNorm(x) W^T + b = rstd (x W'^T - mean u) + c

Shapes: D width, N width out of a product. W' [N, D], u and c [N] are copies that depend on the weights, held where a
CUDA graph can read them, and made anew when the weights have changed. The moments that mean and rstd are found from
come with the rows, from what wrote them: a product (ops/norm_folded.py), a merge, or rows that come back. A move leaves
the norm a pass of its own, which carries it out.

Which norms those are is the same in every pass of one plan, and a first pass finds out: it measures all rows, and marks
the norms that could be folded. From then on they are, and rows are measured for them alone. Copies of weights are in
one buffer, made after that pass: many small ones, with what it takes to compute them in between, would leave holes.

(Tokens that fold into others, as in `fold` and `leave=fold`, are another matter.)
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..backbones.timm_vit import EvidenceRequest
from ..errors import UserError
from ..kernels.launch import precision
from ..kernels.norm_folded import fold
from ..layouts import PackedOnDevice
from . import triton
from .triton import Product

_settled: WeakSet[Folded] = WeakSet()


@cache
def _hear_of_steps() -> None:
    """From now on hear of optimisers' steps: fused ones change weights, and torch does not count it."""

    def stepped(optimiser: Optimizer, *_: Any) -> None:
        moved = {id(p) for group in optimiser.param_groups for p in group["params"]}
        for folded in _settled:
            folded.stepped(moved)

    register_optimizer_step_post_hook(stepped)


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

    embed = staticmethod(triton.embed)

    def __init__(self, vit: VisionTransformer) -> None:
        self._blocks: Any = vit.blocks
        self._marked: set[tuple[int, str]] = set()  # (block, "qkv" or "fc1")
        self._products: dict[tuple[int, str], Product] = {}
        self._learns = True
        self._watched: list[Tensor] = []
        self._version = self._steps = 0

    @property
    def norms(self) -> int:
        """How many norms are folded."""
        return len(self._marked)

    def attention(self, block: Any, layout: PackedOnDevice, taps: EvidenceRequest) -> None:
        layer = layout.layer
        self._mark(layer, "qkv", layout)
        layout.measures = self._measures(layer, "fc1")
        triton.attention(block, layout, taps, self._products.get((layer, "qkv")), layout.measures)

    def mlp(self, block: Any, layout: PackedOnDevice, taps: EvidenceRequest) -> None:
        layer = layout.layer
        self._mark(layer, "fc1", layout)
        layout.measures = self._measures(layer + 1, "qkv")
        triton.mlp(block, layout, taps, self._products.get((layer, "fc1")), layout.measures)

    def _mark(self, layer: int, name: str, layout: PackedOnDevice) -> None:
        if self._learns and triton.foldable(layout.kernel_rows()):
            self._marked.add((layer, name))

    def _measures(self, layer: int, name: str) -> bool:
        """Whether this product, the next one, needs the moments of what is written now."""
        return (self._learns and layer < len(self._blocks)) or (layer, name) in self._products

    def settle(self) -> bool:
        """After the first pass: fold what it marked, and nothing else. Whether there is anything."""
        self._learns = False
        _hear_of_steps()
        _settled.add(self)
        with torch.inference_mode(False), torch.no_grad():  # ordinary tensors: they are written to again
            self._make()
        self._watched = [t for _, *pair in self._pairs() for t in _weights(*pair) if t is not None]
        self.refresh()
        return self.norms > 0

    def _make(self) -> None:
        """Room for the copies."""
        layers = {key: self._layers(*key) for key in sorted(self._marked)}
        if not layers:
            return
        first = next(iter(layers.values()))[1].weight
        wide = torch.promote_types(first.dtype, torch.float32)
        sizes = [linear.weight.numel() for _, linear in layers.values()]
        weights = first.new_empty(sum(sizes)).split(sizes)
        outs = [linear.out_features for _, linear in layers.values() for _ in range(2)]
        vectors = iter(first.new_empty(sum(outs), dtype=wide).split(outs))
        for (key, (norm, linear)), weight in zip(layers.items(), weights, strict=True):
            self._products[key] = Product(weight.view_as(linear.weight), next(vectors), next(vectors), norm.eps)

    def _layers(self, layer: int, name: str) -> tuple[Any, Any]:
        """A norm and the linear layer behind it."""
        block = self._blocks[layer]
        return (block.norm1, block.attn.qkv) if name == "qkv" else (block.norm2, block.mlp.fc1)

    def _pairs(self) -> list[tuple[Product, Any, Any]]:
        """The products that are folded, each with its norm and its linear layer."""
        return [(product, *self._layers(*key)) for key, product in self._products.items()]

    def stepped(self, moved: set[int]) -> None:
        """An optimiser has made a step with these, by id."""
        self._steps += any(id(t) in moved for t in self._watched)

    def _count(self) -> int:
        """Grows with every change of a weight that torch counts, and with every step of an optimiser that has one."""
        return sum(t._version for t in self._watched) + self._steps

    def update(self) -> None:
        """Fold again if a weight has changed."""
        if self._count() != self._version:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Fold again, in place."""
        present = [t for _, *pair in self._pairs() for t in _weights(*pair) if t is not None]
        if list(map(id, present)) != list(map(id, self._watched)):
            raise UserError("Weights of the model were replaced after capture, not changed in place; capture it again.")
        self._version = self._count()
        for product, norm, linear in self._pairs():
            held = product.weight, product.sums, product.shift
            for copy, now in zip(held, fold(*_weights(norm, linear)), strict=True):
                copy.copy_(now)
