"""What a newcomer runs: the quickstart, shortened, and predict."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import adaptivit
from adaptivit.data import digits
from adaptivit.data.digits import Digits
from adaptivit.evaluation.evaluate import evaluate
from tests.support.commands import refused, run, static
from tests.support.data_sets import folder, pixels
from tests.support.models import model_of


@pytest.fixture(scope="module")
def loaded() -> Digits:
    return Digits.load()


def test_the_quickstart_writes_what_it_promises(tmp_path: Path, capsys: Any) -> None:
    assert run("quickstart", "--fast", "--out", tmp_path / "q") == 0
    printed = capsys.readouterr().out
    assert "less" in printed
    assert "report.html" in printed.replace("\n", "")  # a long path is broken over lines
    html = (tmp_path / "q" / "report.html").read_text()
    assert html.lower().startswith("<!doctype html>")
    assert "http://" not in html.replace("http://www.w3.org", "")
    with Image.open(tmp_path / "q" / "halting_maps.png") as picture:
        assert min(picture.size) > 100
    results = json.loads((tmp_path / "q" / "results.json").read_text())
    assert [r["model"] for r in results["rows"]] == ["static", "AHT-ViT, masked", "AHT-ViT, packed"]
    for name, row in (("static", results["rows"][0]), ("aht", results["rows"][2])):
        model = adaptivit.load(tmp_path / "q" / name)
        assert model.policy_name == name
        again = evaluate(model, Digits.load(few=True).testing(), layout="packed")
        assert row["top-1 %"] == round(again.score, 2)
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
    torch.testing.assert_close(restored, pictures.permute(0, 2, 3, 1).pow(0.7), rtol=0, atol=1e-4)  # brightened


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


# -- adaptivit predict ----------------------------------------------------------------------------------------------
def test_predict_prints_what_the_model_says(tmp_path: Path, capsys: Any) -> None:
    model = model_of("aht", 3)
    model.class_names = ["ant", "bee", "cat"]
    model.save_pretrained(tmp_path / "model")
    where = folder(tmp_path / "in", each=2, size=40)
    (where / "notes.txt").write_text("not a picture")
    start = ("predict", where, "--checkpoint", tmp_path / "model", "--batch-size", 4)
    assert run(*start, "--format", "jsonl") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [f["image"] for f in found] == [str(p) for p in sorted(where.rglob("*.png"))]
    transform = model.preprocessing.evaluation()
    for record in found:
        with Image.open(record["image"]) as file, torch.no_grad():
            out = model(transform(file.convert("RGB"))[None])
        order = out.logits[0].softmax(0).sort(descending=True)
        assert [c["name"] for c in record["classes"]] == [model.class_names[i] for i in order.indices]
        assert [c["class"] for c in record["classes"]] == order.indices.tolist()
        assert [c["probability"] for c in record["classes"]] == pytest.approx(order.values.tolist(), rel=1e-4)
        assert record["gmacs"] == pytest.approx(float(out.macs_deployed) / 1e9)
        assert record["mean_depth"] == pytest.approx(float(out.trace.mean_depth))
    assert run(*start) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in model.class_names)
    assert run(*start, "--format", "csv", "--top-k", 1, "--out", tmp_path / "p.csv") == 0
    assert capsys.readouterr().out == ""
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["image"], r["class_1"]) for r in rows] == [(f["image"], f["classes"][0]["name"]) for f in found]
    assert "class_2" not in rows[0]
    (tmp_path / "names.txt").write_text("x\ny\nz\n")
    assert run(*start, "--format", "jsonl", "--top-k", 99, "--class-names", tmp_path / "names.txt") == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert {c["name"] for c in first["classes"]} == {"x", "y", "z"}
    assert run(*start, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == {"model": str(tmp_path / "model"), "images": found}


def test_predict_names_what_is_wrong(tmp_path: Path, capsys: Any) -> None:
    model = ("--checkpoint", static(tmp_path / "model"))
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.fromarray(pixels(1)[0]).save(good)
    bad.write_bytes(good.read_bytes()[:300])
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "none.png") in refused(capsys, "predict", good, tmp_path / "none.png", *model)
    assert run("predict", good, bad, *model) == 1  # the rest is answered
    assert str(bad) in capsys.readouterr().err
    assert "has no images" in refused(capsys, "predict", tmp_path / "empty", *model)
    assert "none.txt" in refused(capsys, "predict", good, *model, "--class-names", tmp_path / "none.txt")
    out = tmp_path / "p.csv"
    refused(capsys, "predict", bad, *model, "--format", "csv", "--out", out)
    assert not out.exists()
