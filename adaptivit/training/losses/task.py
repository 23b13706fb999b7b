"""L_task: the task's loss of the logits; cross-entropy for classification (AHT-ViT Sec. 3.4, A-ViT Eq. 9)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...output import Output
from ...tasks.protocol import Task
from .base import CLASSIFICATION, Batch, Summed, over_images


@dataclass(frozen=True)
class TaskLoss(Summed):
    label_smoothing: float = 0.0
    task: Task = CLASSIFICATION
    needs: frozenset[str] = frozenset()

    def sums(self, output: Output, batch: Batch) -> Tensor:
        if batch.targets is None:
            raise ValueError("The task's loss needs batch.targets.")
        return over_images(self.task.loss(output.logits.float(), batch.targets, self.label_smoothing))
