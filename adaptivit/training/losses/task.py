"""Losses of the logits: the task's own (AHT-ViT Sec. 3.4, A-ViT Eq. 9), and distance from the frozen static model's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...output import Output
from ...tasks.protocol import Task
from .base import CLASSIFICATION, Batch, Summed, over_images


@dataclass(frozen=True)
class TaskLoss(Summed):
    """The task's loss; cross-entropy for classification."""

    label_smoothing: float = 0.0
    task: Task = CLASSIFICATION
    needs: frozenset[str] = frozenset()

    def sums(self, output: Output, batch: Batch) -> Tensor:
        if batch.targets is None:
            raise ValueError("The task's loss needs batch.targets.")
        return over_images(self.task.loss(output.logits.float(), batch.targets, self.label_smoothing))


@dataclass(frozen=True)
class Distillation(Summed):
    """The task's distance from the teacher; KL(teacher || student) for classes."""

    task: Task = CLASSIFICATION
    needs: frozenset[str] = frozenset()

    def sums(self, output: Output, batch: Batch) -> Tensor:
        if batch.teacher_logits is None:
            raise ValueError("Distillation needs batch.teacher_logits.")
        return over_images(self.task.distance(output.logits.float(), batch.teacher_logits.float()))
