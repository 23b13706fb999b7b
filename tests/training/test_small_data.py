"""Small data by default: enough steps, a warm-up that fits, a loss that makes a halting policy cheaper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaptivit.policies import spec
from adaptivit.training import recipes
from adaptivit.training.config import FOLLOW, AugmentConfig, OptimConfig, TrainConfig, fitted
from adaptivit.training.methods import LOSSES
from adaptivit.utils.settings import flat
from tests.support.commands import run
from tests.support.data_sets import folder

TINY = ("--backbone", "test_vit", "--img-size", 32, "--device", "cpu", "--augment.kind", "none")


def saved(out: Path) -> dict[str, Any]:
    return json.loads((out / "config.json").read_text())["config"]


@pytest.mark.parametrize(
    ("images", "batch", "size", "warm"),
    [
        (286, 128, 16, 50 / 17),  # two steps an epoch before
        (1_281_167, 1024, 1024, 1.0),
        (45_000, 128, 128, 1.0),
        (2_048, 128, 128, 50 / 16),
        (2_047, 128, 64, 50 / 31),
        (24, 128, 8, 5.0),  # a tenth of 50 epochs
        (5, 128, 4, 5.0),
        (24, 4, 4, 5.0),
    ],
)
def test_batch_and_warm_up_follow_the_images(images: int, batch: int, size: int, warm: float) -> None:
    given = TrainConfig("x", batch_size=batch)
    found = fitted(given, images, 1, FOLLOW)
    assert (found.batch_size, found.optim.warmup_epochs) == (size, pytest.approx(warm))
    assert fitted(given, images, 1, ()) == given
    assert replace(found, batch_size=batch, optim=given.optim) == given, "nothing else"


def test_what_a_batch_must_be_a_multiple_of_and_a_run_without_warm_up() -> None:
    given = TrainConfig("x", batch_size=96)
    assert fitted(given, 100, 3, FOLLOW).batch_size == 12
    mixed = replace(given, augment=AugmentConfig(mixup=0.8))
    assert fitted(mixed, 100, 8, FOLLOW).batch_size == 48
    assert fitted(replace(given, optim=OptimConfig(warmup_epochs=0)), 100, 1, FOLLOW).optim.warmup_epochs == 0


def test_the_command_takes_a_batch_for_so_few_images(tmp_path: Path, capsys: Any) -> None:
    where, policy = folder(tmp_path / "in", each=15), ("--policy", "static")
    assert run("train", "--data", where, "--out", tmp_path / "a", *TINY, *policy, "--epochs", 2) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "41 images of 3 classes, 4 for validation, 5 steps an epoch, 10 in all" in lines[0]
    assert lines[1] == "note: 10 steps in all are few to learn from; --epochs 40 makes 200"
    config = saved(tmp_path / "a")
    assert (config["batch_size"], config["optim.warmup_epochs"]) == (8, 0.2)
    given = ("--batch-size", 20, "--optim.warmup-epochs", 0.5, "--epochs", 1)
    assert run("train", "--data", where, "--out", tmp_path / "b", *TINY, *policy, *given) == 0
    config = saved(tmp_path / "b")
    assert (config["batch_size"], config["optim.warmup_epochs"]) == (20, 0.5)
    assert run("train", "--data", where, "--out", tmp_path / "a", *TINY, *policy, "--epochs", 2, "--resume") == 0


def test_without_a_recipe_a_policy_has_the_losses_of_its_own(tmp_path: Path) -> None:
    where = folder(tmp_path / "in", each=3)
    start = ("train", "--data", where, *TINY, "--epochs", 1, "--val-split", 0.2)

    def config(name: str, *words: Any) -> dict[str, Any]:
        assert run(*start, "--out", tmp_path / name, *words) == 0
        return saved(tmp_path / name)

    budget = flat(recipes.get("aht-budget"))
    found = config("a")
    assert found["policy"] == "aht:straight_through=true"
    assert found["loss.cost"] == 10
    assert all(found[name] == budget[name] for name in LOSSES)
    assert found["loss.distill"] == 0, "which needs a teacher of the same classes"
    found = config("b", "--policy=aht:threshold=0.9", "--loss.cost", 2, "--loss.cost-target", 0.5)
    assert spec.parse(found["policy"]) == ("aht", {"straight_through": True, "threshold": 0.9})
    assert (found["loss.cost"], found["loss.cost_target"], found["loss.target_depth"]) == (2, 0.5, 0.1)
    found = config("c", "--policy", "fold:budget=0.67")
    plain = flat(TrainConfig("x", policy="fold:budget=0.67"))
    assert all(found[name] == plain[name] for name in ("policy", *LOSSES))
