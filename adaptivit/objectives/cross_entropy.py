"""L_task: cross-entropy of the logits, with hard or soft targets (AHT-ViT Sec. 3.4, A-ViT Eq. 9)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..output import Output
from .base import Batch


@dataclass(frozen=True)
class CrossEntropy:
    label_smoothing: float = 0.0
    needs: frozenset[str] = frozenset()

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        if batch.targets is None:
            raise ValueError("Cross-entropy needs batch.targets.")
        return F.cross_entropy(output.logits.float(), batch.targets, label_smoothing=self.label_smoothing)
