"""Comparing methods: what a method means, one recipe for all, rows that survive an interruption, table and plot."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import adaptivit
from adaptivit.data import dataset
from adaptivit.errors import UserError
from adaptivit.evaluation.evaluate import Result, evaluate, paired_difference
from adaptivit.experiments import measure, table
from adaptivit.experiments.compare import run as compare
from adaptivit.experiments.compare.config import CompareConfig
from adaptivit.experiments.compare.run import plan
from adaptivit.experiments.measure import report_images
from adaptivit.experiments.store import COLUMNS, TRAINED_ON
from adaptivit.factory import create, load
from adaptivit.training.config import OptimConfig, TrainConfig
from adaptivit.training.methods import slug
from tests.support.commands import refused, run
from tests.support.data_sets import folder
from tests.support.training import named

SHARED = named(TrainConfig("d"), policy="static", epochs=3, seed=4, lr=5e-4, distill=0.5, augment="flip")
TINY = ("--backbone", "test_vit", "--img-size", 32, "--batch-size", 8, "--device", "cpu", "--augment.kind", "none")


# -- what is run ----------------------------------------------------------------------------------------------------


def rows_of(out: Path) -> dict[tuple[str, int], dict[str, str]]:
    with (out / "results.csv").open(newline="") as file:
        return {(row["method"], int(row["seed"])): row for row in csv.DictReader(file)}


def files_of(out: Path) -> set[str]:
    return {path.name for path in out.iterdir()}


def test_training_one_recipe_for_all_and_a_second_call_runs_nothing_again(
    tmp_path: Path, small: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = ("compare", "--data", small, "--out", out, *TINY, "--epochs", 1, "--timing-batch", 4)
    methods = ("--methods", "avit", "aht:balanced", "aht:planner_blocks=99")
    assert run(*words, *methods, "--timing-repeats", 2) == 0
    printed = capsys.readouterr().out
    assert "aht:balanced" in printed
    assert "wrote" in printed
    rows = rows_of(out)
    assert list(rows) == [("static", 0), ("avit", 0), ("aht:balanced", 0), ("aht:planner_blocks=99", 0)]
    assert all(tuple(row) == COLUMNS for row in rows.values())
    failed = rows["aht:planner_blocks=99", 0]
    assert (failed["status"], failed["top1"]) == ("failed", "")
    assert "planner_blocks" in failed["reason"]
    static = load(out / "runs" / slug("static", 0) / "model")
    for (method, seed), row in rows.items():
        if method == "aht:planner_blocks=99":
            continue
        assert row["status"] == "ok"
        model = load(out / "runs" / slug(method, seed) / "model")
        assert row["policy"] == model.policy_name
        results = [_tested(m, small) for m in (model, static)]
        assert float(row["top1"]) == pytest.approx(results[0].score, abs=1e-4)
        assert float(row["gmacs"]) == pytest.approx(results[0].gmacs, rel=1e-5)
        assert row["live"] == " ".join(f"{n:.2f}" for n in results[0].live)
        if method != "static":
            difference, half, _ = paired_difference(*results)
            assert float(row["difference"]) == pytest.approx(difference, abs=1e-4)
            assert float(row["difference_ci95"]) == pytest.approx(half, abs=1e-4)
        assert float(row["images_per_second_masked"]) > 0
        assert row["compact_layout"] not in ("", "masked")
        assert float(row["speed_masked"]) > 0
        assert (float(row["speed_compact"]) == 1) or method != "static"
    assert len({row["timed"] for row in rows.values() if row["status"] == "ok"}) == 1
    assert {"results.csv", "results.md", "pareto.png", "compare.json", "rows", "runs"} <= files_of(out)
    with Image.open(out / "pareto.png") as picture:
        assert picture.width > picture.height > 300
    text = (out / "results.md").read_text()
    assert "24 images" in text
    assert "± " in text
    assert "--methods avit aht:balanced" in text
    assert adaptivit.__version__ in text
    for name in ("optim", "augment", "batch_size", "epochs", "seed"):
        assert len({getattr(entry.training, name) for entry in plan(_config(small, out))}) == 1

    # again: finished rows stay, the failed one is tried again, another method is added
    def fit(config: TrainConfig, show: bool = True, stop: Any = None) -> Result:
        raise (
            RuntimeError("out of memory\nand more")
            if "planner_blocks" not in config.policy
            else UserError("no such stage")
        )

    monkeypatch.setattr(measure, "fit", fit)
    before = {key: row for key, row in rows.items() if row["status"] == "ok"}
    assert run(*words, *methods, "aht", "--timing-repeats", 0) == 0
    assert capsys.readouterr().err.count("not run again") == 3
    rows = rows_of(out)
    assert {key: row for key, row in rows.items() if row["status"] == "ok"} == before
    assert rows["aht:planner_blocks=99", 0]["reason"] == "no such stage"
    assert rows["aht", 0]["reason"] == "RuntimeError: out of memory"
    assert "more" in (out / "errors" / f"{slug('aht', 0)}.txt").read_text()
    # another recipe does not mix with these rows
    line = refused(capsys, *words, *methods, "--optim.lr", 0.5, "--timing-repeats", 0)
    assert "lr (was 0.0001, now 0.5)" in line
    assert rows_of(out) == rows
    # a row without its images is run again
    (out / "rows" / f"{slug('static', 0)}.npz").write_bytes(b"damaged")
    run(*words, "--methods", "static", "--timing-repeats", 0)
    assert rows_of(out)["static", 0]["status"] == "failed"


def _config(small: Path, out: Path, **given: Any) -> CompareConfig:
    values = {"data": str(small), "out": str(out), "methods": ("avit",), "backbone": "test_vit", "img_size": 32}
    return CompareConfig(**values | {"batch_size": 8, "epochs": 1, "timing_repeats": 0, "device": "cpu"} | given)


def _tested(model: adaptivit.AdaptiveViT, small: Path) -> Result:
    labelled = dataset.for_evaluation(small, "test").for_model(model)
    images = dataset.Images(labelled, model.preprocessing.evaluation())
    return evaluate(model, dataset.batches(images, dataset.in_order(len(images), 8)))


def test_without_training_and_with_several_seeds(tmp_path: Path, small: Path) -> None:
    config = _config(small, tmp_path / "out", epochs=0, seeds=(0, 3), limit=12, methods=("aht", "static", "avit"))
    compare.run(replace(config, timing_repeats=1, timing_batch=2))
    rows = rows_of(tmp_path / "out")
    assert {(m, s) for m in ("static", "aht", "avit") for s in (0, 3)} == set(rows)
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {row["images"] for row in rows.values()} == {"12"}
    assert {row["epochs"] for row in rows.values()} == {"0"}
    assert {row["seconds_training"] for row in rows.values()} == {""}
    assert not (tmp_path / "out" / "runs").exists()
    text = (tmp_path / "out" / "results.md").read_text()
    assert "Mean over the seeds" in text
    points = table.points(list(rows.values()))
    assert [len(p.seeds) for p in points] == [2, 2, 2]
    again = compare.run(config)
    assert {(row["method"], int(row["seed"])): row for row in again} == rows


def test_going_on_from_the_static_model(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(small, tmp_path / "out", start="static", distill=1.0, methods=("avit",))
    seen: list[TrainConfig] = []

    def fit(training: TrainConfig, show: bool = True, stop: Any = None) -> None:
        seen.append(training)
        torch.manual_seed(len(seen))
        policy = training.policy.partition(":")[0]
        model = create("test_vit", policy, weights=training.weights, num_classes=3, img_size=32)
        model.class_names = ["0", "1", "2"]
        model.save_pretrained(Path(training.out) / "model")

    monkeypatch.setattr(measure, "fit", fit)
    rows = {row["method"]: row for row in compare.run(config)}
    assert list(rows) == ["static", TRAINED_ON, "avit"]
    assert [c.loss.distill for c in seen] == [0.0, 1.0, 1.0]
    model = str(Path(seen[0].out) / "model")
    assert [(c.weights, c.teacher) for c in seen] == [(None, None), (model, model), (model, model)]
    assert [row["epochs"] for row in rows.values()] == ["1", "2", "2"]
    assert [row["compared_to"] for row in rows.values()] == [TRAINED_ON, "", TRAINED_ON]
    with pytest.raises(UserError, match="epochs"):
        replace(config, epochs=0)


def test_an_interrupted_comparison_goes_on(
    tmp_path: Path, small: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("compare", "--data", small, "--out", tmp_path / "out", *TINY, "--epochs", 0, "--timing-repeats", 0)
    real = measure.report.measure
    calls: list[str] = []

    def second_never_ends(model: adaptivit.AdaptiveViT, *given: Any, **more: Any) -> Result:
        calls.append(model.policy_name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(model, *given, **more)

    monkeypatch.setattr(measure.report, "measure", second_never_ends)
    assert run(*words, "--methods", "avit", "aht") == 130
    assert "goes on" in capsys.readouterr().err
    assert [row["status"] for row in rows_of(tmp_path / "out").values()] == ["ok"]
    assert run(*words, "--methods", "avit", "aht") == 0
    assert calls == ["static", "avit", "avit", "aht"]


def test_images_left_out_are_named(tmp_path: Path, capsys: Any) -> None:
    where = folder(tmp_path / "in", each=2)
    (where / "b" / "01.png").write_bytes(b"no picture")
    words = ("compare", "--data", where, "--out", tmp_path / "out", *TINY, "--epochs", 0, "--methods", "static")
    assert run(*words, "--timing-repeats", 0) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("compare: 1 method, 1 seed, 6 images to judge by, ") for line in lines)
    assert f"  {where / 'b' / '01.png'}: cannot be read as an image" in lines


def test_when_everything_fails_the_command_says_so(tmp_path: Path, small: Path, capsys: Any) -> None:
    words = ("compare", "--data", small, "--out", tmp_path / "out", *TINY, "--epochs", 0, "--methods", "avit")
    (tmp_path / "odd.safetensors").write_text("no weights")
    assert run(*words, "--weights", tmp_path / "odd.safetensors") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "Every method failed" in line
    assert "unreadable" in line
    assert {row["status"] for row in rows_of(tmp_path / "out").values()} == {"failed"}
    assert "pareto.png" not in files_of(tmp_path / "out")
    assert "not found" in refused(capsys, "compare", "--data", tmp_path / "nowhere", "--methods", "avit")


def test_images_of_the_report_were_not_trained_on(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=draw.integers(0, 255, (20, 8, 8, 3), dtype=np.uint8), y=np.arange(20) % 2)
    config = CompareConfig(data=str(tmp_path / "a.npz"), methods=("avit",), val_split=0.25, seeds=(5,))
    train, _ = dataset.for_training(config.data, 0.25, 5)

    def held(**change: Any) -> Any:
        return report_images(plan(replace(config, **change))[0])

    assert len(held()) == 5
    assert not {i.tobytes() for i in held().items} & {i.tobytes() for i in train.items}
    assert len(held(epochs=0)) == 20
    with pytest.raises(UserError, match="test"):
        held(split="test")


def test_another_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="something else"):
        compare.run(CompareConfig(data="digits", methods=("avit",), out=str(tmp_path)))
    assert files_of(tmp_path) == {"config.json"}


# -- the command line -----------------------------------------------------------------------------------------------
def test_the_command_of_a_configuration() -> None:
    config = CompareConfig(data="my data", methods=("aht:balanced", "avit"), seeds=(0, 1), epochs=0)
    expected = "adaptivit compare --data 'my data' --methods aht:balanced avit --epochs 0 --seeds 0 1"
    assert config.command() == expected
    assert config.fingerprint() == replace(config, methods=("avit",), out="x", timing_repeats=0).fingerprint()
    assert config.fingerprint() != replace(config, optim=OptimConfig(lr=1.0)).fingerprint()
