"""DynamicViT's losses: the kept share near its ratio, and features of kept patches near the static model's.

Shapes: S stages, B images, N slots, P patches, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...errors import UserError
from ...output import Output
from .base import Batch, Summed, over_images, over_mask


@dataclass(frozen=True)
class KeepRatio(Summed):
    """Squared distance of each stage's kept share from its ratio, mean over images and stages."""

    needs: frozenset[str] = frozenset()

    def sums(self, output: Output, batch: Batch) -> Tensor:
        kept, ratios = output.trace.fact("kept"), output.trace.fact("ratios")  # [S, B], [S]
        return over_images((kept - ratios[:, None]).pow(2).mean(0))


@dataclass(frozen=True)
class Features(Summed):
    """Mean squared error over the patches kept by the last decision, after the final norm; 0 if none is kept. Without
    a fact kept_last, over the patches that the last block computed."""

    needs: frozenset[str] = frozenset({"patches"})
    plain = False  # a mean over as many patches as are kept

    def sums(self, output: Output, batch: Batch) -> Tensor:
        if output.patches is None or batch.teacher_patches is None:
            raise ValueError("Distillation of features needs aux=('patches',) and batch.teacher_patches.")
        here, there = output.patches.shape[-1], batch.teacher_patches.shape[-1]
        if here != there:
            raise UserError(
                f"features: the teacher is {there} wide, the model {here}; use --loss.distill (logits) instead."
            )
        trace = output.trace
        kept = trace.facts.get("kept_last", trace.updated[-1])[:, trace.num_prefix_tokens :]  # [B, P]
        squared = (output.patches.float() - batch.teacher_patches.float()).pow(2).mean(-1)
        return over_mask(squared, kept)
