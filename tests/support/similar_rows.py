"""Keys of tokens for the tests of the kernels that find similar tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from adaptivit.kernels import scores_and_keys
from adaptivit.layouts.similarity import SimilarityOnDevice
from tests.support.interpreter import DEVICE

CLOSE = 4e-7  # of a cosine; float32 has 6e-8 to a rounding, and there are d of them
NONE = float("-inf")
KINDS = ("ragged", "equal", "whole")
seed = 0


def random() -> torch.Generator:
    """Another one at every call."""
    global seed
    seed += 1
    return torch.Generator().manual_seed(seed)


def some(*shape: int, share: float = 0.5) -> Tensor:
    return (torch.rand(shape, generator=random()) < share).to(DEVICE)


def keys(rows: int, heads: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """k [R, H, d] as a view of qkv; the rest of it is NaN. Keys have something in common, as they do in a ViT."""
    all_three = torch.full((rows, 3, heads, width), float("nan"))
    common = torch.randn(heads, width, generator=random())
    all_three[:, 1] = 0.7 * common + torch.randn(rows, heads, width, generator=random())
    return all_three.to(DEVICE, dtype)[:, 1]


class Rows:
    """Keys of a packed batch, and their unit vectors in float64 on the grid."""

    def __init__(self, active: Tensor, heads: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        batch, self.slots = active.shape
        self.active, self.where = active, active.flatten().nonzero()[:, 0]
        live = len(self.where)
        self.k = keys(live + 9, heads, width, dtype)
        self.k[live:] = float("nan")
        self.cells = torch.cat([self.where, self.where.new_zeros(9)]).int()
        self.offsets = torch.cat([active.new_zeros(1).long(), active.sum(-1).cumsum(0)]).int()
        x = self.k[:live].double().mean(1)
        self.exact = torch.zeros(batch * self.slots, width, dtype=torch.float64, device=DEVICE)
        self.exact[self.where] = x / x.norm(dim=-1, keepdim=True)
        self.units = self.unit_keys()

    def unit_keys(self) -> Tensor:
        return scores_and_keys.unit_keys(self.k, self.cells, self.offsets, self.slots)

    def similarity(self) -> SimilarityOnDevice:
        return SimilarityOnDevice(self.k, self.cells, self.offsets, self.active)

    def cosine(self, image: int) -> Tensor:
        """[N, N]"""
        u = self.exact.unflatten(0, self.active.shape)[image]
        return u @ u.T


def tokens(kind: str, slots: int, batch: int = 4) -> Tensor:
    """[B, N] bool: active tokens; of ragged rows all of one image, one of another and none of a third."""
    if kind == "whole":
        return torch.ones(batch, slots, dtype=torch.bool, device=DEVICE)
    if kind == "ragged":
        active = some(batch, slots, share=0.6)
        active[-1] = True
        if batch > 2:
            active[0], active[1] = False, False
            active[0, slots // 2] = True
        return active
    score = torch.rand(batch, slots, generator=random())
    return (score >= score.sort(-1, descending=True).values[:, slots * 2 // 3 : slots * 2 // 3 + 1]).to(DEVICE)
