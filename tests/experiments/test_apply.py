"""Training-free use: a policy on weights as they are becomes a checkpoint, and its budget can be changed and undone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import adaptivit
from tests.support.commands import refused, run, static
from tests.support.data_sets import folder

Capture = pytest.CaptureFixture[str]


def start(place: Path, *more: Any) -> tuple[Any, ...]:
    weights = place / "static"
    if not weights.exists():
        static(weights)
    return ("apply", "--backbone", "test_vit", "--weights", weights, "--out", place / "out", "--device", "cpu", *more)


def share(model: adaptivit.AdaptiveViT) -> float:
    with torch.inference_mode():
        out = model(torch.randn(4, 3, 32, 32))
    return float(out.macs.mean()) / out.costs.static


def test_a_budget_that_fixes_counts_needs_no_images(tmp_path: Path, capsys: Capture) -> None:
    assert run(*start(tmp_path, "--policy", "fold", "--budget", "-33%")) == 0
    printed, out = capsys.readouterr().out.splitlines(), tmp_path / "out"
    assert f"wrote {out}: fold" in printed[0]
    assert printed[-1].startswith(f"{out} costs ")
    assert "goal -33% reached" in printed[-1]
    assert f"to undo it: adaptivit calibrate {out} --budget none" in printed[-1]
    model = adaptivit.load(out)
    assert (model.policy_name, model.budget) == ("fold", "-33%")
    assert 0.55 < share(model) <= 0.67
    assert model.backbone_name == "test_vit"
    same = adaptivit.create("test_vit", "fold", weights=tmp_path / "static")
    assert torch.equal(model(images := torch.randn(2, 3, 32, 32), budget="none").logits, same(images).logits)
    photos = folder(tmp_path / "photos", each=1)
    assert run("predict", photos, "--checkpoint", out, "--budget", "-20%") == 0

    assert run("calibrate", out, "--budget", "-35%") == 0  # by the curve that is there
    assert "goal -35% reached" in capsys.readouterr().out
    assert adaptivit.load(out).budget == "-35%"
    assert run("calibrate", out, "--data", photos) == 0  # a new curve changes no budget
    assert adaptivit.load(out).budget == "-35%"
    capsys.readouterr()
    assert run("calibrate", out, "--budget", "none") == 0
    assert capsys.readouterr().out.startswith(f"{out} costs what its settings say, ")
    undone = adaptivit.load(out)
    assert undone.budget is None
    assert undone.calibration is not None
    assert share(undone) == pytest.approx(share(same))


def test_with_images_it_calibrates(tmp_path: Path, capsys: Capture) -> None:
    photos = folder(tmp_path / "photos", each=3)
    words = ("--policy", "confidence", "--budget", "-20%")
    assert "give some as --data (labels are not looked at)" in refused(capsys, *start(tmp_path, *words))
    assert not (tmp_path / "out").exists()
    assert run(*start(tmp_path, *words, "--data", photos)) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "goal -20% " in last
    assert "reached" in last or "missed by" in last
    assert (tmp_path / "out" / "calibration.csv").exists()
    assert adaptivit.load(tmp_path / "out").budget == "-20%"


def test_what_is_there_is_not_replaced(tmp_path: Path, capsys: Capture) -> None:
    words = start(tmp_path, "--policy", "tome:r=2")
    assert run(*words) == 0
    assert "costs what its settings say" in capsys.readouterr().out
    assert "is there already" in refused(capsys, *words)


def test_calibrate_without_images_needs_a_curve(tmp_path: Path, capsys: Capture) -> None:
    model = static(tmp_path / "model")
    before = json.loads((model / "config.json").read_text())
    assert "Expected --data" in refused(capsys, "calibrate", model)
    assert "not calibrated" in refused(capsys, "calibrate", model, "--budget", "-33%")
    assert json.loads((model / "config.json").read_text()) == before
