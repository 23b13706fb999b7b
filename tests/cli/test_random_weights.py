"""Random weights are never silent: the first line says so, and serve and export refuse them unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import adaptivit
from adaptivit.errors import UserError
from tests.support.commands import refused, run, static
from tests.support.data_sets import folder

Capture = pytest.CaptureFixture[str]
MODEL = ("--backbone", "test_vit", "--img-size", 32)
WARNING = "note: test_vit without --weights has random weights: its answers mean nothing"


def test_the_first_line_says_so(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise UserError("begun")

    photos = folder(tmp_path / "photos", each=1)
    for name in (
        "experiments.calibrate.create",
        "experiments.benchmark.run.run",
        "experiments.compare.run.run",
        "factory.create",
    ):
        monkeypatch.setattr(f"adaptivit.{name}", stop)
    for words in (
        ("predict", photos, *MODEL),
        ("evaluate", "--data", photos, *MODEL),
        ("visualize", "--images", photos, *MODEL),
        ("benchmark", "--backbones", "test_vit"),
        ("compare", "--data", photos, *MODEL, "--methods", "fold", "--epochs", 0),
        ("serve", *MODEL, "--random-weights"),
        ("apply", *MODEL, "--out", tmp_path / "out"),
    ):
        assert run(*words) == 2
        assert capsys.readouterr().err.splitlines() == [WARNING, "adaptivit: begun"], words


def test_a_service_is_refused(capsys: Capture) -> None:
    said = refused(capsys, "serve", *MODEL)
    assert said == f"adaptivit: {WARNING[6:]}. Give trained ones, or pass --random-weights for a test.\n"


def test_a_checkpoint_of_random_weights_says_so_too(tmp_path: Path, capsys: Capture) -> None:
    out, photos = tmp_path / "out", folder(tmp_path / "photos", each=1)
    assert run("apply", *MODEL, "--policy", "tome:r=2", "--out", out) == 0
    assert adaptivit.load(out).notes["random_weights"] is True
    capsys.readouterr()
    assert run("predict", photos, "--checkpoint", out, "--format", "jsonl") == 0
    printed = capsys.readouterr()
    assert printed.err == f"note: {out} has random weights: its answers mean nothing\n"
    assert len(printed.out.splitlines()) == 3
    for words in (("serve", out), ("export", out, "--out", tmp_path / "m.onnx")):
        assert "--random-weights" in refused(capsys, *words)
    start = ("apply", *MODEL, "--policy", "tome:r=2", "--weights")
    assert run(*start, out, "--out", tmp_path / "again") == 0
    assert adaptivit.load(tmp_path / "again").notes["random_weights"] is True
    assert run(*start, static(tmp_path / "trained"), "--out", tmp_path / "other") == 0
    assert "random_weights" not in adaptivit.load(tmp_path / "other").notes
