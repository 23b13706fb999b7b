"""Loss terms, one a file. A term reads an Output and a Batch, nothing else: `term(output, batch) -> scalar`."""

from __future__ import annotations

from .base import Batch, Losses, Objective, Summed, Sums, Term
from .cost import Cost
from .distribution_prior import DistributionPrior
from .exits import Exits, Expected, Geometric, SelfDistillation
from .ponder import Ponder
from .pruning import Features, KeepRatio
from .target_depth import TargetDepth
from .task import Distillation, TaskLoss

__all__ = [
    "Batch",
    "Cost",
    "Distillation",
    "DistributionPrior",
    "Exits",
    "Expected",
    "Features",
    "Geometric",
    "KeepRatio",
    "Losses",
    "Objective",
    "Ponder",
    "SelfDistillation",
    "Summed",
    "Sums",
    "TargetDepth",
    "TaskLoss",
    "Term",
]
