"""Losses over exits: a head asked after every block.

Shapes: L layers, B images, C classes, U halting units an image (1, or N tokens).

    Exits               mean over blocks of w_l loss(y_l), w_L = last, else 1      confidence, similarity, BranchyNet
                        where changes d_l are learned (LPIPS) also the mean over blocks of (d_l - KL(y_L || y_l))^2
    SelfDistillation    mean over blocks before the last of KL(y_L || y_l)         FastBERT
    Expected            mean over images of sum_l p_l loss(y_l)                    PonderNet; p of image or class token
    Geometric           mean over units of KL(p || truncated geometric prior)      PonderNet
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
    last: float = 1.0  # weight of the last exit
    needs: frozenset[str] = frozenset({"exits"})

    def sums(self, output: Output, batch: Batch) -> Tensor:
        losses = _losses(output, batch, self.task, self.label_smoothing)
        found = torch.cat([losses[:-1], self.last * losses[-1:]]).mean(0)
        if "changes" in output.trace.facts:
            _, *exits, last = output.trace.fact("exits").detach().float()
            aims = torch.stack([self.task.distance(y, last) for y in exits])  # [L-2, B]
            found = found + (output.trace.fact("changes")[:-1] - aims).pow(2).mean(0)
        return over_images(found)


@dataclass(frozen=True)
class SelfDistillation(Summed):
    """The task's distance of every exit from the last one, which it does not teach."""

    task: Task = CLASSIFICATION
    needs: frozenset[str] = frozenset({"exits"})

    def sums(self, output: Output, batch: Batch) -> Tensor:
        *students, teacher = output.trace.fact("exits").float()
        return over_images(torch.stack([self.task.distance(y, teacher.detach()) for y in students]).mean(0))


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
