"""L_task: cross-entropy of the logits, with hard or soft targets (AHT-ViT Sec. 3.4, A-ViT Eq. 9)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ...output import Output
from .base import Batch, Summed, over_images


@dataclass(frozen=True)
class CrossEntropy(Summed):
    label_smoothing: float = 0.0
    needs: frozenset[str] = frozenset()

    def sums(self, output: Output, batch: Batch) -> Tensor:
        if batch.targets is None:
            raise ValueError("Cross-entropy needs batch.targets.")
        logits, smoothing = output.logits.float(), self.label_smoothing
        return over_images(F.cross_entropy(logits, batch.targets, label_smoothing=smoothing, reduction="none"))
