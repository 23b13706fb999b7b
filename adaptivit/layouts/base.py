"""What every layout can do: hold the token rows of one forward pass and carry a policy's answers out.

Shapes: B images, N slots, D width, H heads, d head width; R stands for a layout's own row dimensions
([B, N] for masked, [live rows] for packed). Row-wise functions (norms, linear layers, the MLP) are applied to
`rows` [R, D] directly, so every layout runs the very same arithmetic on a token, wherever it is stored.

A layout never knows which method decides. When to move rows is its own affair: a token that has left is frozen
and has weight 0, so that its physical removal changes nothing (the laws in tests/test_layouts.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..decision import Decision, Drop, Keep, Merge, Skip


class Layout(ABC):
    """The rows of one forward pass. A fresh one is made for every call of a model."""

    name: str
    live: Tensor  # [B, N] bool: has not left
    here: Tensor  # [B, N] bool: takes part in the present block (live and not sitting out)
    size: Tensor | None  # [B, N] weight of each token where merges have made some heavier than 1
    rows: Tensor  # [R, D] of the tokens that take part

    def __init__(self, x: Tensor, read: int) -> None:  # x [B, N, D]; the head reads the first `read` slots
        self.read = read
        self.live = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        self.here = self.live
        self.size = None
        self.rows = x

    def carry_out(self, decision: Decision, when: str) -> None:
        """The one way in for a policy's answers."""
        skipping = self.here is not self.live
        if skipping and isinstance(decision, (Drop, Merge)):
            raise ValueError(f"{type(decision).__name__} while tokens sit out a block: answer it after the block.")
        if isinstance(decision, Drop):
            self.drop(decision)
        elif isinstance(decision, Merge):
            self.merge(decision)
        elif isinstance(decision, Skip):
            if when != "before":
                raise ValueError(f"Skip was answered {when} a block; tokens can sit out a block only before it.")
            self.sit_out(decision)
        elif not isinstance(decision, Keep):
            raise TypeError(f"A policy answers Keep, Drop, Skip, Merge or None; this one: {decision!r}.")

    @property
    def batch(self) -> int:
        return int(self.live.shape[0])

    @property
    def slots(self) -> int:
        return int(self.live.shape[1])

    # -- a policy's answers ----------------------------------------------------------------------------------
    @abstractmethod
    def drop(self, decision: Drop) -> None:
        """Tokens leave for good."""

    @abstractmethod
    def sit_out(self, decision: Skip) -> None:
        """Tokens leave `rows` until come_back."""

    @abstractmethod
    def come_back(self) -> None:
        """The end of a block: gates are applied, whoever sat out is back."""

    @abstractmethod
    def merge(self, decision: Merge) -> None:
        """Tokens fold into others."""

    # -- what a block needs ----------------------------------------------------------------------------------
    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        """[R, H, d] x 3 -> [R, H, d]: weighted attention inside each image."""

    @abstractmethod
    def add(self, delta: Tensor) -> None:
        """[R, D]: rows += delta, for those that take part."""

    @abstractmethod
    def expand(self, values: Tensor) -> Tensor:
        """[B, ...] one value an image -> [R, ...] one a row."""

    # -- what evidence and readout need ----------------------------------------------------------------------
    @abstractmethod
    def grid(self, values: Tensor) -> Tensor:
        """[R, ...] -> [B, N, ...], zero where a token does not take part."""

    @abstractmethod
    def mean(self, values: Tensor) -> Tensor:
        """[R, C] -> [B, C] mean over the rows that take part, in float32; zero for an image without any."""

    @abstractmethod
    def query(self, q: Tensor, k: Tensor, v: Tensor, empty: Tensor) -> Tensor:
        """One extra query an image, [B, H, d], over the keys [R, H, d]; `empty` [H, d] where there is no key."""

    @abstractmethod
    def attention_rows(self, q: Tensor, k: Tensor, queries: str) -> Tensor:
        """[B, N] attention a token receives, mean over heads, from `class` (slot 0) or `all` (mean over queries)."""

    @abstractmethod
    def leading(self) -> Tensor:
        """[B, read, D] the value of the first `read` slots, the last one for those that have left."""
