"""See it work in two minutes, with no file and no download."""

from __future__ import annotations

from dataclasses import dataclass

from ..utils.coerce import at_least
from .command import Command


@dataclass(frozen=True)
class QuickstartConfig:
    """Train a static ViT and an AHT-ViT on handwritten digits, compare them, and show which tokens stopped where.

    No download, no file: scikit-learn's digits come with the package. About two minutes on two cores.
    """

    out: str = "adaptivit-quickstart"
    """Where the checkpoints, pictures and the report go."""
    seed: int = 0
    """Everything random follows from it."""
    fast: bool = False
    """A few digits and steps only, to see that everything runs; the figures then mean nothing."""

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)


def run(config: QuickstartConfig) -> None:
    from ..experiments.quickstart import quickstart

    quickstart(**vars(config))


COMMAND = Command(QuickstartConfig, run)
