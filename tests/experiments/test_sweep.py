"""The sweep: its space is checked before it runs, no trial is run twice, and the best one is a recipe for `train`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaptivit.data import dataset
from adaptivit.errors import UserError
from adaptivit.experiments.sweep import report
from adaptivit.experiments.sweep.config import SweepConfig
from adaptivit.experiments.sweep.report import best, front, hypervolume
from adaptivit.experiments.sweep.run import search
from adaptivit.experiments.sweep.space import parse, points
from adaptivit.experiments.sweep.trials import Record
from adaptivit.training.config import OptimConfig, TrainConfig
from adaptivit.training.recipes import get
from tests.support.commands import SMALL, refused, run, static
from tests.support.data_sets import npz, split_folder
from tests.support.sweeps import BASE, LR, config, pairs, result, rows


def record(number: int, top1: float, share: float) -> Record:
    return Record(number, {"optim.lr": f"{number}e-4"}, "finished", {"result": result(top1, share).summary()})


# -- which points ---------------------------------------------------------------------------------------------------
def test_a_mistake_in_the_space_stops_it_before_anything_runs(tmp_path: Path, fake: Any) -> None:
    for space in ((LR, "optim.lrr=1|2"), ("optim.lr=1e-4|0",), ()):
        with pytest.raises(UserError, match=r"optim.lr|space"):
            search(SweepConfig(replace(BASE, out=str(tmp_path / "out")), space))
    assert not fake
    assert not (tmp_path / "out").exists()


def test_a_grid_over_a_range_is_refused(tmp_path: Path, fake: Any) -> None:
    with pytest.raises(UserError, match=r"write optim\.lr=v1\|v2\|v3, or --method random"):
        search(config(tmp_path / "out", "optim.lr=1e-4..1e-3"))
    assert not (tmp_path / "out").exists()


def test_a_grid_runs_every_point_once_and_goes_on_with_the_rest(tmp_path: Path, fake: list[TrainConfig]) -> None:
    search(config(tmp_path, trials=4))
    assert len(fake) == 4
    search(config(tmp_path, trials=4))
    assert len(fake) == 4
    search(config(tmp_path))
    everything = [(lr, ponder) for lr in (1e-4, 3e-4, 1e-3) for ponder in (0, 0.1)]
    assert pairs(fake) == everything
    assert [c.out for c in fake] == [str(tmp_path / "trials" / f"000{i}") for i in range(1, 7)]
    assert [(r["trial"], r["status"]) for r in rows(tmp_path)] == [(str(i), "finished") for i in range(1, 7)]


def test_random_follows_from_the_seed(tmp_path: Path, fake: list[TrainConfig]) -> None:
    space = ("optim.lr=1e-5..1e-3:log", "loss.ponder=0..1", "epochs=1..4:int", "batch_size=8|16")
    axes = parse(space, BASE)
    ten = points(axes, "random", 3, 10)
    assert points(axes, "random", 3, 20)[:10] == ten
    assert points(axes, "random", 4, 10) != ten
    assert all(1e-5 <= p["optim.lr"] <= 1e-3 and 0 <= p["loss.ponder"] <= 1 and p["epochs"] in range(1, 5) for p in ten)  # type: ignore[operator]
    for name in ("a", "b"):
        search(config(tmp_path / name, *space, method="random", trials=3, seed=3))
    assert pairs(fake[:3]) == pairs(fake[3:]) == [(p["optim.lr"], p["loss.ponder"]) for p in ten[:3]]


def test_random_draws_no_point_twice(tmp_path: Path, fake: list[TrainConfig]) -> None:
    search(config(tmp_path, method="random", trials=50))
    assert len(set(pairs(fake))) == len(fake) == 6


def test_tpe_is_reproducible_and_goes_on(tmp_path: Path, fake: list[TrainConfig]) -> None:
    for out, trials in ((tmp_path / "a", 12), (tmp_path / "b", 5), (tmp_path / "b", 12)):
        search(config(out, "optim.lr=1e-5..1e-3:log", method="tpe", trials=trials))
    first, second = pairs(fake[:12]), pairs(fake[12:])
    assert len(fake) == 24
    assert first == second
    assert len(set(first)) == 12


def test_another_search_in_the_same_place_is_refused(tmp_path: Path, fake: list[TrainConfig]) -> None:
    search(config(tmp_path))
    for changes, message in (
        ({"optim": OptimConfig(lr=5e-4)}, r"optim.lr \(was 0.0001, now 0.0005\)"),
        ({"objective": "accuracy"}, r"objective \(was 'budget', now 'accuracy'\)"),
        ({"max_share": 0.5}, "max_share"),
    ):
        with pytest.raises(UserError, match=message):
            search(config(tmp_path, **changes))
    with pytest.raises(UserError, match="space"):
        search(config(tmp_path, LR))
    search(config(tmp_path, workers=1, device="cpu"))  # of the machine
    assert len(fake) == 6
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        search(config(tmp_path))


def test_a_directory_of_something_else_is_refused(tmp_path: Path, fake: list[TrainConfig]) -> None:
    (tmp_path / "trials").mkdir()
    with pytest.raises(UserError, match=r"no sweep\.json"):
        search(config(tmp_path))
    assert not fake


# -- what is best ---------------------------------------------------------------------------------------------------
def test_the_budget_chooses_the_best_within_it(tmp_path: Path, fake: list[TrainConfig], capsys: Any) -> None:
    """Shares 0.54, 0.62, 0.9: the best trial of all is over the budget."""
    chosen = search(config(tmp_path / "a", LR, objective="budget", max_share=0.67))
    assert chosen is not None
    assert chosen.params == {"optim.lr": "3e-4"}
    assert json.loads((tmp_path / "a" / "best.json").read_text())["within_budget"]
    assert "over the budget" in capsys.readouterr().err
    plain = search(config(tmp_path / "b", LR, objective="accuracy"))
    assert plain is not None
    assert plain.params == {"optim.lr": "1e-3"}
    none = search(config(tmp_path / "c", LR, objective="budget", max_share=0.5))
    assert none is not None
    assert none.params == {"optim.lr": "1e-4"}
    assert not json.loads((tmp_path / "c" / "best.json").read_text())["within_budget"]
    assert "no trial is within 0.5" in capsys.readouterr().out


def test_a_trial_in_the_budget_comes_before_a_better_score_over_it() -> None:
    wanted = SweepConfig(BASE, (LR,), objective="budget", max_share=0.5)
    over, under = record(1, 90, 0.501), record(2, 60, 0.5)
    assert report.score(wanted, 90, 0.501) == pytest.approx(89)
    assert best(wanted, [over, under]) is under
    assert best(wanted, [over]) is over


def test_front_and_hypervolume_by_hand() -> None:
    """Three steps, a trial under the front and one dearer than static: 40 * 0.8 + 30 * 0.5 + 10 * 0.2 = 49."""
    trials = [(40.0, 0.2), (70.0, 0.5), (80.0, 0.8), (60.0, 0.6), (99.0, 1.2)]
    assert hypervolume(trials) == pytest.approx(49)
    assert hypervolume([]) == 0
    assert hypervolume([(50.0, 0.0)]) == 50
    records = [record(i, *point) for i, point in enumerate(trials)]
    assert [r.number for r in front(records)] == [0, 1, 2, 4]
    wanted = SweepConfig(BASE, (LR,), objective="hypervolume")
    assert best(wanted, records) is records[1]  # 35, the largest rectangle: 32, 35, 16, 24, 0


def test_the_hypervolume_is_said_after_every_trial(tmp_path: Path, fake: list[TrainConfig], capsys: Any) -> None:
    search(config(tmp_path, LR, objective="hypervolume"))
    printed = capsys.readouterr()
    # 51 % at 0.54, 53 % at 0.62, 60 % at 0.9
    for value in (51 * 0.46, 51 * 0.46 + 2 * 0.38, 51 * 0.46 + 2 * 0.38 + 7 * 0.1):
        assert f"hypervolume {value:.2f} %" in printed.err
    assert f"hypervolume {51 * 0.46 + 2 * 0.38 + 7 * 0.1:.2f} %" in printed.out


@pytest.mark.parametrize("shares", [(0.4, 0.6, 0.9), (1.0, 1.0, 1.0), (0.5,)])
def test_the_front_is_drawn(tmp_path: Path, shares: tuple[float, ...]) -> None:
    records = [record(i, 50 + 10 * i, share) for i, share in enumerate(shares)]
    report.draw(config(tmp_path), records)
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


# -- for real -------------------------------------------------------------------------------------------------------
def test_best_json_trains_and_the_test_split_is_not_read(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, out = split_folder(tmp_path / "photos"), tmp_path / "out"
    for name in ("a", "b", "c"):
        (where / "test" / name).mkdir(parents=True)
        (where / "test" / name / "0.png").write_bytes(b"no image")
    opened, image = [], dataset.Labelled.image
    monkeypatch.setattr(dataset.Labelled, "image", lambda self, i: opened.append(self.name(i)) or image(self, i))
    common = ("--data", where, *SMALL, "--device", "cpu", "--policy", "avit", "--augment.kind", "none")
    space = ("--space", "policy.gate_center=0|10", "--objective", "accuracy")
    assert run("sweep", *common, *space, "--out", out) == 0
    assert opened
    assert not [name for name in opened if "/test/" in name]
    assert f"adaptivit train --recipe {out / 'best.json'}" in capsys.readouterr().out
    written = json.loads((out / "best.json").read_text())
    assert not {"data", "out", "resume", "recipe", "device"} & set(written["recipe"])
    assert (out / "front.png").exists()
    assert (out / "trials" / "0001" / "model").is_dir()
    assert not (out / "trials" / "0001" / "checkpoint").exists()
    recipe = out / "trials" / "0001" / "recipe.json"
    assert get(str(recipe)).policy == "avit:gate_center=0.0"
    best_json = out / "best.json"
    command = ("train", "--recipe", best_json, "--data", where, "--device", "cpu", "--out", tmp_path / "run")
    assert run(*command, "--optim.lr", "2e-4") == 0
    ran = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert (ran["recipe"], ran["optim.lr"], ran["batch_size"]) == (str(best_json), 2e-4, 8)
    assert ran["policy"] == written["recipe"]["policy"]


def test_without_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 epochs: the model as it is on the validation images; the recipe leaves the epochs to train."""
    where = npz(tmp_path / "d.npz")
    seen, image = set(), dataset.Labelled.image
    monkeypatch.setattr(dataset.Labelled, "image", lambda self, i: seen.add(self.source) or image(self, i))
    small = ("--backbone", "test_vit", "--img-size", 32, "--batch-size", 8, "--device", "cpu", "--epochs", 0)
    words = ("--space", "policy.gate_center=-9..9", "--method", "random", "--trials", 2, "--val-split", 0.25)
    weights, out = static(tmp_path / "static"), tmp_path / "out"
    assert run("sweep", "--data", where, *small, *words, "--policy", "avit", "--out", out, "--weights", weights) == 0
    assert seen == {f"{where}:train"}  # the part that was held out
    assert [r["status"] for r in rows(out)] == ["finished"] * 2
    assert "epochs" not in json.loads((out / "best.json").read_text())["recipe"]
    assert get(str(out / "best.json")).epochs == TrainConfig.epochs


def test_what_is_wrong_with_every_trial_is_said_first(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, where = tmp_path / "out", npz(tmp_path / "d.npz")
    words = ("--space", LR, "--out", out, *SMALL, "--device", "cpu")
    assert "Data not found" in refused(capsys, "sweep", "--data", tmp_path / "none", *words)
    missing = ("--weights", tmp_path / "none.safetensors")
    assert "none.safetensors" in refused(capsys, "sweep", "--data", where, *words, *missing)
    assert "Did you mean 'optim.lr'" in refused(
        capsys, "sweep", "--data", where, "--out", out, "--space", "optim.lrr=1|2"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "several with the same --out" in refused(capsys, "sweep", "--data", where, *words)
    assert not out.exists()


def test_without_optuna_the_extra_is_named(tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r'pip install "adaptivit\[sweep\]"'):
        search(config(tmp_path / "out", method="tpe"))
    assert not (tmp_path / "out").exists()
    search(config(tmp_path / "out", trials=1))  # a grid needs no optuna


def test_a_recipe_is_the_base_of_a_sweep(tmp_path: Path, fake: list[TrainConfig]) -> None:
    words = ("--recipe", "avit-tiny", "--data", tmp_path, "--out", tmp_path, "--epochs", 3, "--trials", 1)
    assert run("sweep", *words, "--space", LR) == 0
    assert fake[0].loss.prior == get("avit-tiny").loss.prior > 0
    assert (fake[0].epochs, fake[0].policy, fake[0].optim.lr) == (3, get("avit-tiny").policy, 1e-4)
