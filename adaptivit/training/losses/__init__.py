"""Loss terms, one a file. A term reads an Output and a Batch, nothing else: `term(output, batch) -> scalar`."""

from __future__ import annotations

from .base import Batch, Losses, Objective, Summed, Sums, Term
from .budget import Budget
from .distillation import Distillation
from .distribution_prior import DistributionPrior
from .exits import Exits, Expected, Geometric
from .features import Features
from .keep_ratio import KeepRatio
from .ponder import Ponder
from .target_depth import TargetDepth
from .task import TaskLoss

__all__ = [
    "Batch",
    "Budget",
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
    "Summed",
    "Sums",
    "TargetDepth",
    "TaskLoss",
    "Term",
]
