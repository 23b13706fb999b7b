"""Distillation from the frozen static model: KL(teacher || student) on logits, scaled by temperature squared."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ...output import Output
from .base import Batch, Summed, over_images


@dataclass(frozen=True)
class Distillation(Summed):
    temperature: float = 1.0
    needs: frozenset[str] = frozenset()

    def sums(self, output: Output, batch: Batch) -> Tensor:
        if batch.teacher_logits is None:
            raise ValueError("Distillation needs batch.teacher_logits.")
        teacher = F.log_softmax(batch.teacher_logits.float() / self.temperature, dim=-1)
        student = F.log_softmax(output.logits.float() / self.temperature, dim=-1)
        divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
        return over_images(divergence * self.temperature**2)
