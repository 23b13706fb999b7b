"""A run directory holds everything: what was asked for, where it ran, the log as tables and as a picture."""

from __future__ import annotations

import csv
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from adaptivit import tasks
from adaptivit.training import log_plots
from tests.support.commands import log, train
from tests.support.data_sets import split_folder

TASK = tasks.get(tasks.DEFAULT)
LOSSES = ("--policy", "aht:straight_through=true", "--loss.target-depth", 0.1, "--loss.ponder", 0.01, "--epochs", 2)


@pytest.fixture
def _no_curves() -> None:
    """Here they are drawn."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("curves")
    assert train(split_folder(root / "in"), root / "out", *LOSSES) == 0
    return root / "out"


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def picture(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_the_tables_are_the_log(out: Path) -> None:
    for kind, lines in (("train", 6), ("validation", 2)):
        rows, records = table(out / f"{kind}.csv"), [r for r in log(out) if r["kind"] == kind]
        assert len(rows) == len(records) == lines
        for row, record in zip(rows, records, strict=True):
            live = record.pop("live")
            assert [float(row[f"live_{i + 1}"]) for i in range(6)] == live
            for name in record.keys() - {"kind", "layout", "live_mlp"}:
                assert float(row[name] or "nan") == pytest.approx(float(record[name]), nan_ok=True)


def test_live_tokens_of_training_are_those_of_the_output(out: Path) -> None:
    """All tokens enter the first block; from then on none comes back."""
    for record in (r for r in log(out) if r["kind"] == "train"):
        live = record["live"]
        assert len(live) == 6
        assert live[0] == max(live) > 1
        assert all(a >= b for a, b in itertools.pairwise(live))
        patches = live[0] - 1
        assert record["mean_depth"] == pytest.approx(sum(n - 1 for n in live) / patches, rel=1e-3)


def test_where_it_ran(out: Path) -> None:
    (start,) = json.loads((out / "environment.json").read_text())
    assert start["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert {"adaptivit", "python", "timm", "accelerate", "numpy"} <= start["versions"].keys()
    assert (start["processes"], start["nodes"], start["cuda"]) == (1, 1, None)
    assert start["command"]
    assert start["device"]
    assert start["date"].startswith("20")
    assert (
        len(start["commit"].removesuffix("-dirty")) in range(7, 41) or not (Path(__file__).parents[2] / ".git").exists()
    )


def test_the_picture_shows_every_term(out: Path) -> None:
    """Without a term the picture is another one; without any record it is still a picture."""
    drawn = picture((out / "curves.png").read_bytes())
    assert drawn.shape[0] > 800
    assert drawn.shape[1] > 1300
    records = log_plots.read(out / "log.jsonl")
    assert np.array_equal(picture(log_plots.draw(records, "out", TASK)), drawn)
    for name in ("target_depth", "live", "top1"):
        fewer = [{k: v for k, v in r.items() if k != name} for r in records]
        assert not np.array_equal(picture(log_plots.draw(fewer, "out", TASK)), drawn), name
    assert picture(log_plots.draw([], "nothing", TASK)).shape == drawn.shape
    assert picture(log_plots.draw(records[:1], "one line", TASK)).shape == drawn.shape


def test_a_cut_line_and_columns_that_come_later(tmp_path: Path) -> None:
    lines = ['{"kind": "train", "step": 1, "loss": 2.0}', '{"kind": "train", "step": 2, "loss": 1.0, "new": 3}']
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, '{"kind": "tra']))
    records = log_plots.read(tmp_path / "log.jsonl")
    log_plots.write_tables(records, tmp_path)
    assert table(tmp_path / "train.csv") == [
        {"step": "1", "loss": "2.0", "new": ""},
        {"step": "2", "loss": "1.0", "new": "3"},
    ]
    assert not (tmp_path / "validation.csv").exists()
