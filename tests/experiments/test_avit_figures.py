"""What A-ViT's figures measure, on tiny models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from adaptivit.data.dataset import Labelled
from adaptivit.experiments.benchmark.contenders import BEST, OWN, TIMM
from adaptivit.experiments.reproduce.figures import Given, throughput
from adaptivit.experiments.reproduce.tables import Table
from adaptivit.model import AdaptiveViT
from tests.support.models import model_of


@dataclass(frozen=True)
class Ready(Given):
    """Models in place of jobs."""

    models: dict[str, AdaptiveViT] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(self.models)

    def model(self, name: str) -> AdaptiveViT:
        return self.models[name].eval()


def ready(models: dict[str, AdaptiveViT], count: int = 4, **options: Any) -> Ready:
    """A table of these models on random pictures."""
    given = Ready(Table("avit-test", "", "", (), "", options=options), {}, {}, torch.device("cpu"), True, models)
    pixels = np.random.default_rng(0).integers(0, 255, (count, 32, 32, 3), np.uint8)
    given.__dict__["images"] = Labelled("pictures", list(pixels), [i % 9 for i in range(count)], tuple("abcdefghi"))
    return given


def test_throughput_beside_the_best_static_model_of_each_backbone() -> None:
    models = {"static": model_of(), "ToMe": model_of("tome", r=2), "half": model_of("static", share=0.5)}
    found = throughput.measure(ready(models, batch=6, paper={"ToMe": "2,900"}))
    rows = {str(row["contender"]): row for row in found.rows}
    assert set(rows) == {TIMM, BEST, OWN, *models}
    assert {row["batch"] for row in rows.values()} == {"6"}
    for row in rows.values():
        assert float(row["images_per_s"]) == pytest.approx(6e3 / float(row["ms_p50"]), rel=1e-3)
    assert float(rows["half"]["mac_share"]) < 0.6
    lines = {line["what"].partition(",")[0]: line for line in found.compared}
    assert list(lines) == list(models)
    assert lines["ToMe"]["paper"] == "2,900"
    assert lines["ToMe"]["ours"].endswith(f"({float(rows['ToMe']['speed_vs_best_static']):.2f})")
    assert found.pictures["throughput.png"][1:4] == b"PNG"
