"""Searches and results for the tests of sweeps."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

from adaptivit.evaluation.evaluate import Result
from adaptivit.experiments.sweep.config import SweepConfig, TrialConfig
from adaptivit.training.config import TrainConfig

LR, PONDER = "optim.lr=1e-4|3e-4|1e-3", "loss.ponder=0|0.1"
BASE = TrialConfig(data="photos")


def config(out: Path, *space: str, **changes: Any) -> SweepConfig:
    base = {k: changes.pop(k) for k in list(changes) if k in TrainConfig.__dataclass_fields__}
    return SweepConfig(replace(BASE, out=str(out), **base), space or (LR, PONDER), **changes)


def pairs(ran: list[TrainConfig]) -> list[tuple[float, float]]:
    return [(c.optim.lr, c.loss.ponder) for c in ran]


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def result(top1: float, share: float) -> Result:
    figures: dict[str, Any] = {"gmacs": 2 * share, "gmacs_blocks": 2 * share, "gmacs_static": 2.0, "mean_depth": 6.0}
    return Result(
        10,
        0,
        {"top1": top1, "top5": 100.0},
        live=[5.0],
        live_mlp=[5.0],
        layout="masked",
        images_per_second=1.0,
        **figures,
    )
