"""Distillation from the frozen static model: the task's distance of the logits, KL(teacher || student) for classes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...output import Output
from ...tasks.protocol import Task
from .base import CLASSIFICATION, Batch, Summed, over_images


@dataclass(frozen=True)
class Distillation(Summed):
    task: Task = CLASSIFICATION
    needs: frozenset[str] = frozenset()

    def sums(self, output: Output, batch: Batch) -> Tensor:
        if batch.teacher_logits is None:
            raise ValueError("Distillation needs batch.teacher_logits.")
        return over_images(self.task.distance(output.logits.float(), batch.teacher_logits.float()))
