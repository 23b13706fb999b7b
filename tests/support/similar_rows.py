"""Keys of tokens for the tests of the kernels that find similar tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adaptivit.kernels import nearest_token
from tests.support.interpreter import DEVICE, DTYPES

CLOSE = 4e-7  # of a cosine; float32 has 6e-8 to a rounding, and there are d of them


NOBODY = float("-inf")


dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


seed = 0


def random() -> torch.Generator:
    """Another one at every call."""
    global seed
    seed += 1
    return torch.Generator().manual_seed(seed)


def some(*shape: int, share: float = 0.5) -> Tensor:
    return (torch.rand(shape, generator=random()) < share).to(DEVICE)


def qkv(rows: int, heads: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """k [R, H, d] as a ctx of qkv; the rest of it is NaN. Keys have something in common, as they do in a ViT."""
    all_three = torch.full((rows, 3, heads, width), float("nan"))
    common = torch.randn(heads, width, generator=random())
    all_three[:, 1] = 0.7 * common + torch.randn(rows, heads, width, generator=random())
    return all_three.to(DEVICE, dtype)[:, 1]


class Rows:
    """Keys, whose they are, and their unit vectors in float64 on the grid."""

    def __init__(self, here: Tensor, heads: int, width: int, dtype: torch.dtype, kind: str) -> None:
        batch, slots = here.shape
        self.active, self.cells = here, here.flatten().nonzero()[:, 0]
        live = len(self.cells)
        self.offsets: Tensor | None = None
        if kind == "ragged":
            self.k = qkv(live + 9, heads, width, dtype)
            self.k[live:] = float("nan")
            self.index = torch.cat([self.cells, self.cells.new_zeros(9)]).int()
            self.offsets = torch.cat([here.new_zeros(1).long(), here.sum(-1).cumsum(0)]).int()
        else:
            self.k = qkv(live, heads, width, dtype)
            self.index = (self.cells % slots).view(batch, -1)
            if kind == "whole":
                self.index = torch.arange(slots, device=DEVICE).expand(batch, slots)
        x = self.k[:live].double().mean(1)
        self.exact = torch.zeros(batch * slots, width, dtype=torch.float64, device=DEVICE)
        self.exact[self.cells] = x / x.norm(dim=-1, keepdim=True)
        self.units = nearest_token.units(self.k, self.index, self.offsets, batch, slots)

    def cosine(self, image: int) -> Tensor:
        """[N, N]"""
        u = self.exact.unflatten(0, self.active.shape)[image]
        return u @ u.T


def tokens(kind: str, slots: int, batch: int = 4) -> Tensor:
    """[B, N] bool: who is there; of ragged rows all of one image, one of another and none of a third."""
    if kind == "whole":
        return torch.ones(batch, slots, dtype=torch.bool, device=DEVICE)
    if kind == "ragged":
        there = some(batch, slots, share=0.6)
        there[-1] = True
        if batch > 2:
            there[0], there[1] = False, False
            there[0, slots // 2] = True
        return there
    score = torch.rand(batch, slots, generator=random())
    return (score >= score.sort(-1, descending=True).values[:, slots * 2 // 3 : slots * 2 // 3 + 1]).to(DEVICE)


KINDS = ("ragged", "equal", "whole")
