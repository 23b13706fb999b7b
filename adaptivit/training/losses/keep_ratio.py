"""DynamicViT's ratio loss: the kept share of each stage near its ratio, mean over images and stages of the square."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...output import Output
from .base import Batch, Summed, over_images


@dataclass(frozen=True)
class KeepRatio(Summed):
    needs: frozenset[str] = frozenset()

    def sums(self, output: Output, batch: Batch) -> Tensor:
        kept, ratios = output.trace.fact("kept"), output.trace.fact("ratios")  # [S, B], [S]
        return over_images((kept - ratios[:, None]).pow(2).mean(0))
