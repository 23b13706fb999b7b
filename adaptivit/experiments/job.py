"""A row of a comparison or table that is to be trained and evaluated. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..training.config import TrainConfig
from .store import RowStore


@dataclass(frozen=True)
class Job:
    """One method with one seed."""

    name: str  # in the table
    seed: int
    training: TrainConfig
    trains: bool  # else the weights are evaluated as they are
    epochs: int  # on this data since --weights
    split: Literal["auto", "val", "test"]  # images of the report
    limit: int | None  # of them
    key: str  # of its row
    work: str  # folder of rows and logs
    share: float | None = None  # a budget of static's MACs, calibrated on validation images
    paper: str = ""  # what the paper reports
    needs: str = ""  # key of the job that it starts from
    checkpoint: str = ""  # a model that is taken as it is, with its own policy
    differs: str = ""  # from what the paper ran, in words

    @property
    def rows(self) -> RowStore:
        return RowStore(Path(self.work) / "rows")

    @property
    def model(self) -> str:
        """What other jobs start from."""
        return str(Path(self.training.out) / "model") if self.trains else str(self.training.weights)


def digest(facts: Mapping[str, Any]) -> str:
    """A short hash of settings."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:10]
