"""Losses over exits: the model's own head asked after every block (A-ViT's Table 2 baselines).

Shapes: L layers, B images, C classes, U halting units an image (1, or N tokens).

    Exits       mean over blocks of loss(y_l)                                       confidence, similarity
    Expected    mean over images of sum_l p_l loss(y_l)                            PonderNet; p of image or class token
    Geometric   mean over units of KL(p || truncated geometric prior)              PonderNet
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...output import Output
from ...tasks.protocol import Task
from .base import CLASSIFICATION, Batch, Summed, over_images

_TINY = 1e-12  # inside the log alone: a zero of p must not give NaN


def _losses(output: Output, batch: Batch, task: Task, smoothing: float) -> Tensor:
    """[L, B] the task's loss of every exit."""
    if batch.targets is None:
        raise ValueError("Losses over exits need batch.targets.")
    exits = output.trace.fact("exits").float()
    return torch.stack([task.loss(y, batch.targets, smoothing) for y in exits])


@dataclass(frozen=True)
class Exits(Summed):
    label_smoothing: float = 0.0
    task: Task = CLASSIFICATION
    needs: frozenset[str] = frozenset({"exits"})

    def sums(self, output: Output, batch: Batch) -> Tensor:
        return over_images(_losses(output, batch, self.task, self.label_smoothing).mean(0))


@dataclass(frozen=True)
class Expected(Summed):
    label_smoothing: float = 0.0
    task: Task = CLASSIFICATION
    needs: frozenset[str] = frozenset({"exits"})

    def sums(self, output: Output, batch: Batch) -> Tensor:
        chance = output.trace.fact("chance")[..., 0]  # [L, B]
        return over_images((chance * _losses(output, batch, self.task, self.label_smoothing)).sum(0))


@dataclass(frozen=True)
class Geometric(Summed):
    needs: frozenset[str] = frozenset()

    def sums(self, output: Output, batch: Batch) -> Tensor:
        p, log_prior = output.trace.fact("chance"), output.trace.fact("log_prior")  # [L, B, U], [L]
        return over_images((p * (p.clamp_min(_TINY).log() - log_prior[:, None, None])).sum(0).mean(-1))
