"""When `packed` moves rows on a GPU: chosen beforehand from how many tokens stay, by times measured on the device.

A token that has left may keep its row for a while: it has weight 0 as a key, so no token attends to it, but it is
computed. A move takes such rows out, and costs time itself. With t(r) the time of a block on r rows, t'(r) where some
of them have left, and c that of a move, the moves that minimise

    sum over blocks of t(rows held) or t'(rows held) + c (number of moves)

are found by dynamic programming over the block of the last move. Where rows cost next to nothing (one image at a time)
the best choice is never to move: the dense path.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..decision import Drop, Trace
from ..errors import UserError
from ..layouts import PackedOnDevice, RowSchedule
from .evidence import EvidenceRequest
from .triton import FEW_ROWS, TritonExecutor

if TYPE_CHECKING:
    from ..model import AdaptiveViT

BLOCKS = 4  # so many are timed against one
LEAST, MOST, ENOUGH = 5, 20, 0.05  # replays of a graph, and seconds that they may take


@dataclass(frozen=True)
class Times:
    """Measured on a device: seconds of a block at some numbers of rows, and of a move."""

    rows: tuple[int, ...]  # rising
    block: tuple[float, ...]
    move: float
    masked: tuple[float, ...] | None = None  # seconds of a block with rows that have left; None: the same

    def at(self, rows: float, masked: bool = False) -> float:
        """Seconds of a block, on the line between the nearest two measurements."""
        seconds = self.masked if masked and self.masked is not None else self.block
        points = list(zip(self.rows, seconds, strict=True))
        if rows <= points[0][0]:
            return points[0][1]
        for (low, fast), (high, slow) in itertools.pairwise(points):
            if rows <= high:
                return fast + (slow - fast) * (rows - low) / (high - low)
        return points[-1][1] * rows / points[-1][0]


def choose(live: Sequence[float], times: Times) -> frozenset[int]:
    """live [L] rows that take part in each block -> the blocks after which rows should be moved."""
    layers = len(live)

    @cache
    def best(layer: int, held: int) -> tuple[float, tuple[int, ...]]:
        """Least time of the blocks from `layer` on, and the moves to come; stored are the rows of block `held`."""
        if layer == layers:
            return 0.0, ()
        now = times.at(live[held], masked=live[layer] < live[held])
        stays, later = best(layer + 1, held)
        choice = (now + stays, later)
        if layer + 1 < layers and live[layer + 1] < live[held]:
            moves, after = best(layer + 1, layer + 1)
            if now + times.move + moves < choice[0]:
                choice = (now + times.move + moves, (layer, *after))
        return choice

    return frozenset(best(0, 0)[1])


def expected_rows(live: Sequence[float], moves: frozenset[int]) -> tuple[int, ...]:
    """[L] rows held in each block under these moves."""
    rows, held = [], live[0]
    for layer, now in enumerate(live):
        held = now if layer == 0 or layer - 1 in moves else held
        rows.append(max(1, round(held)))
    return tuple(rows)


def live_rows(model: AdaptiveViT, profile: Tensor | Trace | Sequence[float], batch: int) -> list[float]:
    """[L] rows of a batch that take part in each block: from images, a trace, or mean live shares."""
    if isinstance(profile, Tensor):
        with torch.inference_mode():
            profile = model(profile).trace
    if isinstance(profile, Trace):
        return [batch * float(n) for n in profile.live.double().mean(1)]
    if len(profile) != model.shape.layers or not all(0 <= s <= 1 for s in profile):
        raise UserError(
            f"profile: expected {model.shape.layers} live shares in 0..1, one a block, got {list(profile)}."
        )
    return [batch * model.shape.tokens * float(s) for s in profile]


def plan(model: AdaptiveViT, batch: int, profile: Tensor | Trace | Sequence[float] | None) -> RowSchedule:
    """The plan for batches of this size; without a profile, rows move wherever tokens leave, if there are many."""
    if profile is None:
        few = batch * model.shape.tokens <= FEW_ROWS
        return RowSchedule(moves=frozenset() if few else None)
    live = live_rows(model, profile, batch)
    moves = choose(live, measure(model, batch, live))
    return RowSchedule(moves=moves, rows=expected_rows(live, moves))


@torch.inference_mode()
def measure(model: AdaptiveViT, batch: int, live: Sequence[float]) -> Times:
    """Time a move, and a block at the numbers of rows in `live` [L], with masks and without.

    On the model's device. Times rise in steps, as tiles fill the device once more: between two measured numbers the
    line is a guess.
    """
    weight = next(model.parameters())
    slots, width, block = model.shape.tokens, model.shape.dim, model.backbone.blocks[0]
    x = torch.randn(batch, slots, width, dtype=weight.dtype, device=weight.device)
    slot = torch.arange(slots, device=weight.device).expand(batch, -1)

    executor = TritonExecutor(model.backbone)

    def run(number: int, count: int, kind: str) -> None:
        layout = PackedOnDevice(x, 1, RowSchedule(rows=(batch * count,) * BLOCKS))
        layout.keeps_prefix = True
        layout.drop(Drop(slot >= count))
        layout.put(layout.rows)
        if kind == "masks":
            layout.plan = RowSchedule(frozenset(), layout.plan.rows)
            layout.drop(Drop(slot >= max(count - 1, 1)))
            if batch * count <= FEW_ROWS:  # a mask for rows comes with the gate (kernels/threshold_gate.py)
                layout.remember(layout.active, layout.active.flatten()[layout.cells])
        for layer in range(number):
            layout.layer = layer
            if layer and kind == "moves":
                layout.drop(Drop(slot >= slots))
            executor.attention(block, layout, EvidenceRequest())
            executor.mlp(block, layout, EvidenceRequest())

    def time(count: int, kind: str = "") -> float:
        one, all_of_them = (_replayed(lambda n=n: run(n, count, kind)) for n in (1, BLOCKS))  # type: ignore[misc]
        return max(0.0, (all_of_them - one) / (BLOCKS - 1))

    counts = sorted({min(max(1, round(rows / batch)), slots) for rows in live})
    seconds, masked = (tuple(time(count, kind) for count in counts) for kind in ("", "masks"))
    middle = len(counts) // 2
    move = max(0.0, time(counts[middle], "moves") - seconds[middle])
    return Times(tuple(batch * n for n in counts), seconds, move, masked)


def _replayed(run: Callable[[], object]) -> float:
    """Seconds of a pass in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    seconds: list[float] = []
    while len(seconds) < LEAST or (len(seconds) < MOST and sum(seconds) < ENOUGH):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(seconds)
