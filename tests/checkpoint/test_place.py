"""The directory of a training run stands for the model in it."""

from __future__ import annotations

import json
import subprocess
import sys
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


CUT_OFF = """
import os, sys
from pathlib import Path
from adaptivit.utils.atomic_io import new_directory
replace = os.replace
def move(source, target):
    if Path(target).name == "model":
        os.kill(os.getpid(), 9)
    replace(source, target)
os.replace = move
with new_directory(sys.argv[1]) as place:
    (place / "half").touch()
"""


def test_a_save_that_was_cut_off_between_its_two_moves_is_recovered(tmp_path: Path) -> None:
    """As the process is killed that has put the old directory aside; both names of a run lead to it."""
    for name in ("run", "run/model"):
        static(tmp_path / "run/model")
        subprocess.run([sys.executable, "-c", CUT_OFF, str(tmp_path / "run/model")], check=False)
        assert not (tmp_path / "run/model").exists()
        adaptivit.load(tmp_path / name)
        assert [p.name for p in (tmp_path / "run").iterdir()] == ["model"]
    static(tmp_path / "run/model")
    (tmp_path / "run/model/notes.txt").write_text("mine")
    subprocess.run([sys.executable, "-c", CUT_OFF, str(tmp_path / "run/model")], check=False)
    static(tmp_path / "run/model")  # the next save recovers it, too, and keeps what lay beside
    assert (tmp_path / "run/model/notes.txt").read_text() == "mine"
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["model"]
