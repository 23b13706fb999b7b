"""Distillation of features: the kept patches after the final norm against the static model's (DynamicViT).

Shapes: B images, N slots, P patches, D width. Mean squared error over the patches that the last decision keeps; 0 if
none is kept. Without a fact kept_last, over the patches that the last block computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...errors import UserError
from ...output import Output
from .base import Batch, Summed, over_mask


@dataclass(frozen=True)
class Features(Summed):
    needs: frozenset[str] = frozenset({"patches"})
    plain = False  # a mean over as many patches as are kept

    def sums(self, output: Output, batch: Batch) -> Tensor:
        if output.patches is None or batch.teacher_patches is None:
            raise ValueError("Distillation of features needs aux=('patches',) and batch.teacher_patches.")
        here, there = output.patches.shape[-1], batch.teacher_patches.shape[-1]
        if here != there:
            raise UserError(
                f"features: the teacher is {there} wide, the model {here}; distil logits (--loss.distill) instead."
            )
        trace = output.trace
        kept = trace.facts.get("kept_last", trace.updated[-1])[:, trace.num_prefix_tokens :]  # [B, P]
        squared = (output.patches.float() - batch.teacher_patches.float()).pow(2).mean(-1)
        return over_mask(squared, kept)
