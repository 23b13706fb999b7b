"""Losses over exits: the model's own head asked after every block (A-ViT's Table 2 baselines).

Shapes: L layers, B images, C classes, U halting units an image (1, or N tokens).

    Exits       mean over blocks of CE(y_l)                                        confidence, similarity
    Expected    mean over images of sum_l p_l CE(y_l)                              PonderNet; p of image or class token
    Geometric   mean over units of KL(p || truncated geometric prior)              PonderNet
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...output import Output
from .base import Batch, Summed, over_images

_TINY = 1e-12  # inside the log alone: a zero of p must not give NaN


def _losses(output: Output, batch: Batch, smoothing: float) -> Tensor:
    """[L, B] cross-entropy of every exit."""
    if batch.targets is None:
        raise ValueError("Losses over exits need batch.targets.")
    exits = output.trace.fact("exits").float()
    each = [F.cross_entropy(y, batch.targets, label_smoothing=smoothing, reduction="none") for y in exits]
    return torch.stack(each)


@dataclass(frozen=True)
class Exits(Summed):
    label_smoothing: float = 0.0
    needs: frozenset[str] = frozenset({"exits"})

    def sums(self, output: Output, batch: Batch) -> Tensor:
        return over_images(_losses(output, batch, self.label_smoothing).mean(0))


@dataclass(frozen=True)
class Expected(Summed):
    label_smoothing: float = 0.0
    needs: frozenset[str] = frozenset({"exits"})

    def sums(self, output: Output, batch: Batch) -> Tensor:
        chance = output.trace.fact("chance")[..., 0]  # [L, B]
        return over_images((chance * _losses(output, batch, self.label_smoothing)).sum(0))


@dataclass(frozen=True)
class Geometric(Summed):
    needs: frozenset[str] = frozenset()

    def sums(self, output: Output, batch: Batch) -> Tensor:
        p, log_prior = output.trace.fact("chance"), output.trace.fact("log_prior")  # [L, B, U], [L]
        return over_images((p * (p.clamp_min(_TINY).log() - log_prior[:, None, None])).sum(0).mean(-1))
