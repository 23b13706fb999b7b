"""The directory of a training run stands for the model in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import adaptivit
from adaptivit.checkpoint.place import checkpoint_at
from adaptivit.errors import WeightsError
from tests.support.commands import refused, run, static
from tests.support.data_sets import folder


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """What `adaptivit train --out` leaves."""
    place = tmp_path / "run"
    static(place / "model")
    for name in ("config.json", "environment.json"):
        (place / name).write_text('{"config": {}}')
    (place / "checkpoint").mkdir()
    return place


def test_a_run_directory_is_its_model(trained: Path) -> None:
    whole = adaptivit.load(trained / "model").vit.state_dict()
    assert checkpoint_at(trained) == checkpoint_at(trained / "model") == trained / "model"
    for again in (adaptivit.load(trained), adaptivit.create("test_vit", "aht", weights=trained)):
        assert all(torch.equal(v, whole[k]) for k, v in again.vit.state_dict().items())


def test_commands_take_a_run_directory(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = folder(tmp_path / "photos", each=1)
    assert run("predict", photos, "--checkpoint", trained, "--format", "jsonl") == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert run("evaluate", "--data", photos, "--checkpoint", trained / "model", "--compare-to", trained) == 0
    assert "+0.00 ± 0.00" in capsys.readouterr().out
    assert run("calibrate", trained, "--data", photos) == 0
    assert json.loads((trained / "model" / "config.json").read_text())["calibration"]
    assert json.loads((trained / "config.json").read_text()) == {"config": {}}


def test_a_run_that_has_not_ended(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trained / "model").rename(trained.parent / "elsewhere")
    with pytest.raises(WeightsError, match="has not ended, so it has no model yet: go on with --resume"):
        adaptivit.load(trained)
    assert "has not ended" in refused(capsys, "evaluate", "--data", "x", "--checkpoint", trained)
