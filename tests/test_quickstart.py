"""The quickstart, shortened: everything it promises is there; the digits of training and test never meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_data import run

import adaptivit
from adaptivit import digits
from adaptivit.digits import Digits
from adaptivit.evaluate import evaluate


@pytest.fixture(scope="module")
def loaded() -> Digits:
    return Digits.load()


def test_the_quickstart_writes_what_it_promises(tmp_path: Path, capsys: Any, loaded: Digits) -> None:
    assert run("quickstart", "--fast", "--out", tmp_path / "q") == 0
    said = capsys.readouterr().out
    assert "less" in said
    assert "report.html" in said
    html = (tmp_path / "q" / "report.html").read_text()
    assert html.startswith("<!doctype html>") or html.startswith("<!DOCTYPE html>")
    assert "http://" not in html.replace("http://www.w3.org", "")
    with Image.open(tmp_path / "q" / "halting_maps.png") as picture:
        assert min(picture.size) > 100
    results = json.loads((tmp_path / "q" / "results.json").read_text())
    assert [r["model"] for r in results["rows"]] == ["static", "AHT-ViT, masked", "AHT-ViT, packed"]
    for name, row in (("static", results["rows"][0]), ("aht", results["rows"][2])):
        model = adaptivit.load(tmp_path / "q" / name)
        assert model.policy_name == name
        again = evaluate(model, loaded.testing(), layout="packed")
        assert row["top-1 %"] == round(again.top1, 2)
        assert row["MMACs"] == round(1e3 * again.gmacs, 2)
        assert row["mean depth"] == round(again.mean_depth, 2)
    assert sorted(p.name for p in (tmp_path / "q").iterdir()) == [
        "aht",
        "halting_maps.png",
        "report.html",
        "results.json",
        "static",
    ]


def test_digits_of_training_and_test_are_disjoint(loaded: Digits) -> None:
    from sklearn.datasets import load_digits

    whole = torch.tensor(load_digits().images / 16, dtype=torch.float32)
    assert len(loaded.train_x) + len(loaded.test_x) == len(whole)
    both = torch.cat([loaded.train_x, loaded.test_x]).flatten(1)
    key = [tuple(row) for row in both.tolist()]
    assert sorted(key) == sorted(tuple(row) for row in whole.flatten(1).tolist())
    same = {tuple(r) for r in loaded.train_x.flatten(1).tolist()} & {
        tuple(r) for r in loaded.test_x.flatten(1).tolist()
    }
    assert not same
    assert set(loaded.train_y.tolist()) == set(loaded.test_y.tolist()) == set(range(10))


def test_pictures_are_in_range_and_hold_the_digit(loaded: Digits) -> None:
    for distort in (False, True):
        pictures = digits.draw(loaded.train_x[:50], torch.Generator().manual_seed(0), distort)
        assert pictures.shape == (50, 3, 64, 64)
        assert 0 <= float(pictures.min()) <= float(pictures.max()) <= 1
    bright = (pictures.amax(1) > 0.5).flatten(1).float().mean(1)
    assert (bright > 0.002).all()
    assert (bright < 16 * 16 / 64 / 64 + 1e-6).all(), "the ink stays inside its box"
    restored = digits.visible(digits.normalise(pictures))
    torch.testing.assert_close(restored, pictures.permute(0, 2, 3, 1), rtol=0, atol=1e-6)


def test_the_same_seed_draws_the_same_pictures(loaded: Digits) -> None:
    def first(seed: int, epoch: int) -> Any:
        return next(loaded.training(seed, epoch, 32))

    a, b = first(0, 0), first(0, 0)
    assert torch.equal(a.images, b.images)
    assert torch.equal(a.labels, loaded.train_y[a.indices])
    for other in (first(1, 0), first(0, 1)):
        assert not torch.equal(a.images, other.images)
    tests = [loaded.testing() for _ in range(2)]
    assert all(torch.equal(x.images, y.images) for x, y in zip(*tests, strict=True))
    assert sum(len(b.labels) for b in tests[0]) == digits.TEST * digits.PLACEMENTS


def test_an_epoch_shows_every_digit_once(loaded: Digits) -> None:
    seen = torch.cat([b.indices for b in loaded.training(0, 0, 32)])
    assert len(seen) == len(seen.unique()) == len(loaded.train_x) // 32 * 32
