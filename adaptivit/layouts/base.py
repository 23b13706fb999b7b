"""What every layout can do: hold the token rows of one forward pass and carry a policy's answers out.

Shapes: B images, N slots, D width, H heads, d head width; R stands for a layout's own row dimensions
([B, N] for masked, [live rows] for packed). Row-wise functions (norms, linear layers, the MLP) are applied to
`rows` [R, D] directly, so every layout runs the very same arithmetic on a token, wherever it is stored.

A layout never knows which method decides. When to move rows is its own affair: a token that has left is frozen
and has weight 0, so that its physical removal changes nothing (proved in tests/layouts/test_layouts.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decision import Decision, Drop, Keep, Merge, Skip
from ..errors import UserError
from .similarity import Match, Similarity, mean_key


def take(rows: Tensor, index: Tensor) -> Tensor:
    """[B, n, ...], [B, k] -> [B, k, ...]: those positions of each image."""
    shape = index.shape + (1,) * (rows.ndim - 2)
    return rows.gather(1, index.reshape(shape).expand(-1, -1, *rows.shape[2:]))


def widened(rows: Tensor) -> Tensor:
    """In float32 at least, for sums: on a GPU their order varies, and they should round to the same all the same."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def same_count(stay: Tensor, count: int | None) -> int:
    """The number of tokens [B, N] that stay, the same for all images. A given one is believed on a GPU, where a look
    would make it wait, and while torch.compile looks at no values."""
    if count is not None and (stay.is_cuda or torch.compiler.is_compiling()):
        return count
    counts = stay.sum(-1)
    low, high = int(counts.min()), int(counts.max())
    if low != high or count not in (None, high):
        raise UserError(
            f"Expected as many tokens in every image{'' if count is None else f' ({count})'}, got {low} to {high}. "
            "Use the layout 'packed' or 'masked'."
        )
    return high


@dataclass(frozen=True)
class RowSchedule:
    """What is settled before a pass about how `packed` runs it on a GPU (schedule.py chooses)."""

    moves: frozenset[int] | None = None  # blocks after which rows are moved; None: wherever tokens leave
    rows: tuple[int, ...] = ()  # rows expected in every block: they choose tiles, and need not be right

    def moves_after(self, layer: int) -> bool:
        return self.moves is None or layer in self.moves

    def expected(self, layer: int, room: int) -> int:
        return self.rows[layer] if layer < len(self.rows) else room


class Layout(ABC):
    """The rows of one forward pass. A fresh one is made for every call of a model."""

    name: str
    layer = 0  # the block that runs
    drops_rows = True  # absent rows are not computed
    static_shapes = True  # no shape depends on which tokens are there: the host waits for no count
    keeps_prefix = False  # the policy never lets class, distillation and register tokens go
    positions: Tensor | None = None  # [N, ...] what the backbone's qkv must know of each slot
    alive: Tensor  # [B, N] bool: has not left
    active: Tensor  # [B, N] bool: takes part in the present block (live and not sitting out)
    size: Tensor | None  # [B, N] size of each token where merges have made some heavier than 1
    rows: Tensor  # [R, D] of the tokens that take part

    def __init__(self, x: Tensor, head_tokens: int) -> None:  # x [B, N, D]; the head reads the first `read` slots
        self.head_tokens = head_tokens
        self.alive = self.full(x, x.shape[:2], True, torch.bool)
        self.active = self.alive
        self.size = None
        self.put(x)

    @staticmethod
    def full(like: Tensor, shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
        """One value everywhere, not to be written to: a layout may keep it for other passes."""
        return torch.full(tuple(shape), value, dtype=dtype, device=like.device)

    def apply(self, decision: Decision, when: str) -> None:
        """The one way in for a policy's answers."""
        skipping = self.active is not self.alive
        if skipping and isinstance(decision, (Drop, Merge)):
            raise ValueError(f"{type(decision).__name__} while tokens sit out a block: answer it after the block.")
        if isinstance(decision, Drop):
            self.drop(decision)
        elif isinstance(decision, Merge):
            self.merge(decision)
        elif isinstance(decision, Skip):
            if when != "before":
                raise ValueError(f"Skip was answered {when} a block; tokens can sit out a block only before it.")
            self.skip(decision)
        elif not isinstance(decision, Keep):
            raise TypeError(f"A policy answers Keep, Drop, Skip, Merge or None; this one: {decision!r}.")

    def put(self, rows: Tensor) -> None:
        """Replace the rows of those that take part."""
        self.rows = rows

    @property
    def empty(self) -> bool:
        """Known beforehand: no row is left, and a block has nothing to do."""
        return False

    @property
    def batch(self) -> int:
        return self.alive.shape[0]

    @property
    def slots(self) -> int:
        return self.alive.shape[1]

    # -- a policy's answers ----------------------------------------------------------------------------------
    @abstractmethod
    def drop(self, decision: Drop) -> None:
        """Tokens leave for good."""

    @abstractmethod
    def skip(self, decision: Skip) -> None:
        """Tokens leave `rows` until unskip."""

    @abstractmethod
    def unskip(self) -> None:
        """The end of a block: gates are applied, tokens that sat out are back."""

    @abstractmethod
    def merge(self, decision: Merge) -> None:
        """Tokens fold into others."""

    # -- what a block needs ----------------------------------------------------------------------------------
    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        """[R, H, d] x 3 -> [R, H, d]: weighted attention inside each image."""

    def active_rows(self) -> Tensor | None:
        """[R] bool: the rows that a block changes; None: all of them."""
        return None

    def row_positions(self) -> Tensor | None:
        """[R, ...] `positions` of every row."""
        return None if self.positions is None else self.positions[self.row_slots()]

    def row_slots(self) -> Tensor:
        """[R] the slot of every row."""
        raise NotImplementedError(f"{type(self).__name__} runs with fused kernels, which know no positions by slot.")

    @abstractmethod
    def expand(self, values: Tensor) -> Tensor:
        """[B, ...] one value an image -> [R, ...] one a row."""

    # -- what evidence and readout need ----------------------------------------------------------------------
    @abstractmethod
    def to_grid(self, values: Tensor) -> Tensor:
        """[R, ...] -> [B, N, ...], zero where a token does not take part."""

    @abstractmethod
    def mean(self, values: Tensor, weight: Tensor | None = None) -> Tensor:
        """[R, C] -> [B, C] mean over the rows that take part, in float32; zero for an image without any.

        With `weight` [B, N] a weighted mean, over absent rows too where they are still there and have a gradient.
        """

    @abstractmethod
    def query(self, q: Tensor, k: Tensor, v: Tensor, empty: Tensor) -> Tensor:
        """One extra query an image, [B, H, d], over the keys [R, H, d]; `empty` [H, d] where there is no key."""

    @abstractmethod
    def attention_rows(self, q: Tensor, k: Tensor, queries: str) -> Tensor:
        """[B, N] attention a token receives, mean over heads, from `class` (slot 0) or `all` (mean over queries)."""

    @abstractmethod
    def similarity(self, k: Tensor) -> Similarity:
        """[R, H, d] -> the cosine between the tokens of each image that take part."""

    def class_row_and_similarity(self, q: Tensor, k: Tensor) -> tuple[Tensor, Similarity]:
        """attention_rows of the class token, and similarity."""
        return self.attention_rows(q, k, "class"), self.similarity(k)

    def match(self, k: Tensor) -> Match:
        """[R, H, d] -> the same between some tokens and others, when it is asked for."""
        return Match(self.to_grid(mean_key(k)))

    def alive_rows(self) -> Tensor:
        """[B, n, D] the tokens that have not left, in slot order, where every image has as many."""
        n = same_count(self.alive, None)
        index = (~self.alive).long().argsort(dim=-1, stable=True)[:, :n]
        return take(self.to_grid(self.rows), index)

    @abstractmethod
    def head_rows(self) -> Tensor:
        """[B, head_tokens, D] the value of the first `read` slots, the last one for those that have left."""
