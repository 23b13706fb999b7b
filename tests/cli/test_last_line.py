"""The last line of training: what was saved, the goal of its cost, whether it was reached, and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adaptivit.cli.train import last_line
from adaptivit.training.config import LossConfig, TrainConfig
from tests.support.sweeps import result

AIMED = TrainConfig("my photos", out="runs/x", loss=LossConfig(cost=1.0, cost_target=0.67))
REMEDY = "train longer (--epochs), or set it now: adaptivit calibrate runs/x/model --data 'my photos' --budget -33%"


@pytest.mark.parametrize(
    ("share", "end"), [(0.67, "reached"), (0.68, "reached"), (0.8, f"missed: {REMEDY}"), (0.5, f"missed: {REMEDY}")]
)
def test_a_goal_is_reached_or_missed(share: float, end: str) -> None:
    line = last_line(AIMED, result(80.0, share))
    assert line.startswith("saved runs/x/model: top-1 80.00 ")
    assert f"at {2 * share:.4f} GMACs ({100 * (share - 1):+.1f} %) on validation; goal -33% {end}" in line


def test_without_a_goal() -> None:
    assert last_line(replace(AIMED, loss=LossConfig()), result(80.0, 1.0)).endswith(
        "; training had no goal for the cost"
    )
