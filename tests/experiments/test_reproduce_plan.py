"""Tables as lists of runs: what there is, what is planned, what tables share, rows from committed results."""

from __future__ import annotations

import csv
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import adaptivit
from adaptivit.errors import UserError
from adaptivit.experiments.job import Job
from adaptivit.experiments.reproduce import TABLES, process
from adaptivit.experiments.reproduce import run as execute
from adaptivit.experiments.reproduce.plan import ReproduceConfig, plan
from adaptivit.experiments.reproduce.tables import OURS
from adaptivit.policies import spec as settings
from adaptivit.training.methods import full_spec
from adaptivit.training.recipes import RECIPES
from tests.support.commands import refused, run
from tests.support.tables import ELSEWHERE, planned
from tests.support.training import named

ROOT = Path(__file__).parents[2]


# -- what there is --------------------------------------------------------------------------------------------------
def test_the_listing_names_every_table_and_what_it_corresponds_to(capsys: Any) -> None:
    assert run("reproduce") == 0
    printed = " ".join(capsys.readouterr().out.split())
    for table in TABLES.values():
        assert table.name in printed
        assert all(word in printed for word in table.source.split())
    wanted = {
        "digits",
        "cifar100-static",
        "cifar100-main",
        "cifar100-longer",
        "cifar100-peers",
        "cifar100-front",
        "cifar100-one-checkpoint",
        "cifar100-ingredients",
        "imagenet-adapt",
    }
    wanted |= {f"ablation-{x}" for x in ("threshold", "sigma", "stages", "planner", "feature", "mass", "kl")}
    wanted |= {"ablation-target-depth", "aht-table-3", "aht-table-5", "avit-table-2", "avit-table-3", "avit-figure-7"}
    wanted |= {f"amod-table-{n}" for n in (1, 3, 4, 5, 6)} | {f"amod-figure-{n}" for n in (1, 2, 3, 6, 7, 8, 9)}
    assert wanted <= set(TABLES)


@pytest.mark.parametrize("name", list(TABLES))
def test_every_table_can_be_planned_and_shown(name: str, tmp_path: Path, capsys: Any) -> None:
    jobs, table = plan(ReproduceConfig(table=name, dry_run=True)), TABLES[name]
    assert len(jobs) == sum(len(table.seeds) if run.seed is None else 1 for run in table.runs)
    assert len({(job.name, job.seed) for job in jobs}) == len(jobs)
    assert len({job.key for job in jobs}) == len(jobs), "two rows are the same"
    for job in jobs:
        settings.make(*settings.parse(job.training.policy))
        assert full_spec(job.training)
    assert run("reproduce", name, "--dry-run", "--work", tmp_path) == 0  # not what was run here
    printed = capsys.readouterr().out
    assert table.protocol in printed
    assert printed.count("to run  ") == len(jobs)
    assert all(f"{job.name}, seed {job.seed}:" in printed for job in jobs)


def test_every_recipe_of_a_paper_is_in_a_table() -> None:
    used = {run.recipe for table in TABLES.values() for run in table.runs}
    elsewhere = ELSEWHERE | {"spatial-act", "branchynet", "fastbert", "deebert"}
    assert used - {""} | elsewhere == set(RECIPES)


def test_the_settings_of_the_peers_have_the_cost_that_they_stand_for() -> None:
    images = torch.zeros(1, 3, 224, 224)
    for policy in ("evit", "dynamicvit", "amod", "mod", "tome"):
        for share in (0.80, 0.67, 0.52):
            method = OURS.at(policy, share)
            if method is None:
                assert (policy in ("amod", "mod"), share) == (True, 0.52)
                continue
            name, values = settings.parse(method)
            model = adaptivit.create("deit_tiny_patch16_224", name, **values)
            with torch.inference_mode():
                output = model(images)
            assert float(output.macs_deployed[0]) / model.static_macs(output) == pytest.approx(share, abs=0.003)


def test_aht_stands_in_one_place() -> None:
    """In all tables but the one that compares its forms."""
    own = [
        run
        for table in OURS.tables.values()
        for run in table.runs
        if run.method.startswith("aht") and table.name != "cifar100-ingredients"
    ]
    assert len(own) > 40
    assert all(run.method.startswith((OURS.names["aht"] + ":", OURS.names["sampled"])) for run in own)


# -- the plan -------------------------------------------------------------------------------------------------------
def test_all_go_on_from_the_same_static_model_and_learn_from_it() -> None:
    jobs = planned("cifar100-main")
    first = jobs["static"]
    begun, more = 20, 10
    assert (first.training.weights, first.training.loss.distill, first.epochs) == (None, 0.0, begun)
    for name, job in jobs.items():
        if name != "static":
            assert job.training.weights == first.model == str(Path(first.training.out) / "model")
            assert (job.needs, job.training.loss.distill, job.training.teacher, job.epochs) == (
                first.key,
                1.0,
                None,
                begun + more,
            )
            assert job.training.optim.lr == 1e-4 < first.training.optim.lr
        for field in ("batch_size", "augment", "val_split"):
            assert getattr(job.training, field) == getattr(first.training, field)
        assert job.training.optim.weight_decay == first.training.optim.weight_decay
    assert {job.seed for job in plan(ReproduceConfig(table="cifar100-main", dry_run=True))} == {0, 1, 2}
    assert [j.share for n, j in jobs.items() if n.startswith("AHT")] == [0.83, 0.67, 0.52]


def test_several_seeds_may_go_on_from_one_model() -> None:
    jobs = plan(ReproduceConfig(table="ablation-target-depth", dry_run=True))
    (static,) = [job for job in jobs if job.name == "static"]
    others = [job for job in jobs if job is not static]
    assert static.key == plan(ReproduceConfig(table="cifar100-main", dry_run=True))[0].key
    assert {job.needs for job in others} == {static.key}
    assert {(job.name, job.seed) for job in others} == {(job.name, s) for job in others for s in (0, 1, 2)}
    assert len({job.key for job in others}) == len(others) == 3 * 4


def test_tables_share_what_they_have_in_common_and_a_change_touches_its_rows_alone() -> None:
    one, other = planned("cifar100-main"), planned("cifar100-front")
    common = {"static", "static, trained on", "AHT-ViT -33 %", "fold -48 %"}
    assert all(one[name].key == other[name].key for name in common)
    assert all(one[name].training.out == other[name].training.out for name in common)
    short = planned("ablation-sigma")
    assert short["static"].key == one["static"].key
    assert short["static, trained on"].key != one["static, trained on"].key
    for given in ({"data": "e.npz"}, {"seeds": (5,)}, {"set": ("optim.lr=1e-3",)}, {"limit": 10}, {"split": "val"}):
        changed = planned("cifar100-main", **given)
        assert not {job.key for job in changed.values()} & {job.key for job in one.values()}, given
    same = planned("cifar100-main", device="cpu", workers=3, jobs=2, out="x", set=("run.compile=true",))
    assert [job.key for job in same.values()] == [job.key for job in one.values()]
    moved = planned("cifar100-main", work="elsewhere")
    assert [job.key for job in moved.values()] == [job.key for job in one.values()]


def test_what_two_tables_train_alike_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = planned("ablation-sigma")["sigma 1.0"], planned("ablation-mass")["mass act"]
    free = planned("ablation-threshold")["T 1.0"]  # the same training, another budget
    assert one.key == other.key != free.key
    assert one.training.out == other.training.out == free.training.out
    config = ReproduceConfig(table="ablation-mass", data="d.npz", weights="none", work=str(tmp_path))
    (job,) = [job for job in plan(config) if job.name == "mass act"]
    row = {"status": "ok", "top1": "1", "gmacs": "1", "method": "sigma 1.0"}
    began: list[Job] = []
    monkeypatch.setattr(execute, "launch", lambda job, _: began.append(job))
    batch = execute._Batch(config, [job], math.inf, lambda _: None)
    batch.rows[job.needs] = {"status": "ok"}
    job.rows.put(job.key, row, SimpleNamespace(scores=[100.0], indices=[0]))  # type: ignore[arg-type]  # by another call
    assert batch._begin(job)
    assert batch.rows[job.key] == row
    assert not began
    spec = process.save(job)
    monkeypatch.setattr(process, "run", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(process, "_with_parent", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        process.main(str(spec))
    assert ended.value.code == 0


def test_a_change_of_the_method_alone_leaves_static_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before, table = planned("cifar100-peers"), TABLES["cifar100-peers"]
    runs = tuple(replace(r, method=r.method + ",loss.sigma=2") if r.name.startswith("AHT") else r for r in table.runs)
    monkeypatch.setitem(TABLES, table.name, replace(table, runs=runs))
    after = planned("cifar100-peers")
    assert {name for name in after if after[name].key != before[name].key} == {"AHT-ViT -33 %"}


def test_rows_and_what_they_start_from_can_be_chosen() -> None:
    assert list(planned("cifar100-main", only=("AHT-ViT -33 %",))) == ["static", "AHT-ViT -33 %"]
    assert list(planned("cifar100-main", only=("AHT*", "static"))) == [
        "static",
        *(f"AHT-ViT -{n} %" for n in (17, 33, 48)),
    ]
    chain = planned("cifar100-one-checkpoint", only=("one checkpoint -17 %",))
    assert list(chain) == ["static", "AHT-ViT, one checkpoint", "one checkpoint -17 %"]
    last = chain["one checkpoint -17 %"]
    assert (last.trains, last.epochs, last.training.weights) == (False, 30, chain["AHT-ViT, one checkpoint"].model)


def test_the_longer_static_model_alone_is_mixed() -> None:
    jobs = planned("cifar100-longer")
    first = jobs.pop("static").training
    assert first == named(first, epochs=40, mixup=0.8, cutmix=1.0, distill=0.0)
    assert {
        (j.training.epochs, j.training.augment.mixup, j.training.augment.cutmix, j.training.loss.distill)
        for j in jobs.values()
    } == {(5, 0.0, 0.0, 1.0)}
    assert planned("cifar100-static")["static, mixup and CutMix, 40 epochs"].training.out == first.out


def test_weights_are_found_by_backbone(tmp_path: Path) -> None:
    for name in ("deit_tiny_patch16_224.safetensors", "deit_small_patch16_224.pth"):
        (tmp_path / name).write_bytes(b"")
    jobs = planned("amod-table-4", weights=str(tmp_path))
    found = {Path(str(job.training.weights)).name for job in jobs.values()}
    assert found == {"deit_tiny_patch16_224.safetensors", "deit_small_patch16_224.pth"}
    assert all(job.training.backbone in str(job.training.weights) for job in jobs.values())
    one = planned("amod-table-4", weights=str(tmp_path / "deit_tiny_patch16_224.safetensors"))
    assert {Path(str(job.training.weights)).name for job in one.values()} == {"deit_tiny_patch16_224.safetensors"}
    (tmp_path / "aht-balanced").mkdir()
    aht = planned("aht-table-4-cifar100", weights=str(tmp_path))["AHT-ViT"]
    assert aht.training.weights == str(tmp_path / "aht-balanced")
    with pytest.raises(UserError, match=r"vit_base_patch16_224\.safetensors"):
        planned("amod-table-1", weights=str(tmp_path))
    assert {job.training.weights for job in planned("amod-table-6", weights=str(tmp_path)).values()} == {None}


def test_mistakes_are_one_line(capsys: Any, tmp_path: Path, small: Path) -> None:
    assert "Did you mean 'cifar100-main'?" in refused(capsys, "reproduce", "cifar100-mian")
    assert "CIFAR-100 as an .npz" in refused(capsys, "reproduce", "cifar100-main")
    line = refused(capsys, "reproduce", "cifar100-main", "--data", small)
    assert "deit_tiny_patch16_224.safetensors" in line
    line = refused(capsys, "reproduce", "digits", "--only", "AHT-VIT33")
    assert "row of digits" in line
    assert "AHT-ViT" in line
    assert "expected key=value" in refused(capsys, "reproduce", "digits", "--set", "epochs")
    assert "Unknown setting 'epoch'" in refused(capsys, "reproduce", "digits", "--set", "epoch=1")
    assert "Unknown setting 'policy'" in refused(capsys, "reproduce", "digits", "--set", "policy=aht")
    assert "jobs: expected at least 1" in refused(capsys, "reproduce", "digits", "--jobs", 0)
    assert "Expected the name of a table" in refused(capsys, "reproduce", "--jobs", 2)
    out = ("--out", tmp_path / "out", "--work", tmp_path / "work")
    assert "not found" in refused(capsys, "reproduce", "digits", "--data", tmp_path / "nowhere", *out)
    assert not list(tmp_path.iterdir())


# -- rows of committed results --------------------------------------------------------------------------------------
def test_rows_come_back_from_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As finished as they were, but for those that others start from, whose weights are not there."""
    place = ROOT / "docs" / "results" / "raw" / "cifar100-main"
    monkeypatch.chdir(tmp_path)
    weights = Path("runs/deit_tiny_patch16_224.safetensors")  # rows are known by this name; it is not read
    weights.parent.mkdir()
    weights.touch()
    words = [sys.executable, str(ROOT / "benchmarks" / "restore_rows.py")]
    flags = ("--data", "runs/c100", "--weights", str(weights))
    printed = subprocess.run(
        [*words, str(place), str(tmp_path), *flags], capture_output=True, text=True, check=True
    ).stdout
    given = {"data": "runs/c100", "weights": str(weights), "work": str(tmp_path)}
    jobs = plan(ReproduceConfig(table="cifar100-main", dry_run=True, **given))
    rows = {(job.name, str(job.seed)): job.rows.finished(job.key) for job in jobs}
    with (place / "results.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found = rows[row["method"], row["seed"]]
            assert (found is None) == (row["method"] == "static")
            assert found is None or (found["top1"], found["commit"]) == (row["top1"], row["commit"])
    assert printed.count("restored") == sum(row is not None for row in rows.values()) == 21
    for job in jobs:
        right = job.rows.correct(job.key)
        assert (right is None) == (job.name == "static")
        assert right is None or f"{right.score:.2f}" == f"{float((rows[job.name, str(job.seed)] or {})['top1']):.2f}"
    for wrong, why in (("docs/results/raw/demo", "the name of a table"), (str(tmp_path / "digits"), "it is not there")):
        ran = subprocess.run([*words, wrong, str(tmp_path), *flags], capture_output=True, text=True)
        assert ran.returncode == 2
        assert why in ran.stderr
