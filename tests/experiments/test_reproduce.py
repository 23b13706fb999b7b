"""Tables as lists of runs: what runs, what is not run again, what a failure and a kill leave."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from adaptivit.evaluation.evaluate import paired_difference
from adaptivit.experiments.job import Job
from adaptivit.experiments.reproduce import TABLES, Run, Table, process, report
from adaptivit.experiments.reproduce import run as execute
from adaptivit.experiments.reproduce.plan import ReproduceConfig, plan
from adaptivit.experiments.store import as_row
from tests.support.commands import refused, run, static
from tests.support.processes import begin, ended
from tests.support.tables import (
    TINY,
    Done,
    planned,
    words,
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setitem(TABLES, "tiny", TINY)
    return TINY


def correct(job: Job) -> Any:
    return job.rows.correct(job.key)


def rows_of(where: Path) -> dict[tuple[str, int], dict[str, str]]:
    with (where / "out" / "results.csv").open(newline="") as file:
        return {(row["method"], int(row["seed"])): row for row in csv.DictReader(file)}


# -- what runs ------------------------------------------------------------------------------------------------------
def test_a_table_runs_and_a_second_call_runs_what_failed_alone(
    tmp_path: Path, small: Path, tiny: Table, launched: list[str], capsys: Any
) -> None:
    given = (*words("tiny", small, tmp_path), "--seeds", 0, 3, "--device", "cpu")
    assert run(*given) == 1
    printed = capsys.readouterr()
    assert "4 of 14 rows failed" in printed.err
    assert launched.count("AHT-ViT") == 2
    assert "goes on from broken" not in launched
    rows = rows_of(tmp_path)
    assert set(rows) == {(r.name, seed) for r in tiny.runs for seed in (0, 3)}
    assert {name for (name, _), row in rows.items() if row["status"] == "failed"} == {"broken", "goes on from broken"}
    assert len({row["top1"] for row in rows.values()}) > 2  # there is something to tell apart
    assert "planner_blocks" in rows["broken", 0]["reason"]
    assert rows["goes on from broken", 0]["reason"] == "broken, which it starts from, failed"
    assert rows["broken", 0]["top1"] == ""
    config = ReproduceConfig(table="tiny", data=str(small), weights="none", seeds=(0, 3), work=str(tmp_path / "work"))
    jobs = {(job.name, job.seed): job for job in plan(config)}
    for key, row in rows.items():
        if row["status"] == "ok":
            assert row["recipe"] == jobs[key].key
            assert int(row["epochs"]) == jobs[key].epochs == {"static": 2}.get(key[0], 4)
            own, reference = (correct(jobs[name, key[1]]) for name in (key[0], "trained on"))
            assert own is not None
            assert reference is not None
            assert float(row["top1"]) == pytest.approx(own.score, abs=1e-3)
            if key[0] != "trained on":
                assert float(row["difference"]) == pytest.approx(paired_difference(own, reference)[0], abs=1e-3)
            assert row["torch"] == torch.__version__
            assert row["date"]
            assert row["device"]
    text = (tmp_path / "out" / "results.md").read_text()
    assert "adaptivit reproduce tiny --data" in text
    assert "--seeds 0 3" in text
    assert tiny.protocol in text
    assert "50 / 0.1" in text
    assert "Mean over the seeds" in text
    assert "- broken, seed 3, failed:" in text
    pair = next(line for line in text.splitlines() if line.startswith("| AHT-ViT | EViT |"))
    both = [correct(jobs[name, seed]) for seed in (0, 3) for name in ("AHT-ViT", "EViT")]
    mean = sum(paired_difference(both[i], both[i + 1])[0] for i in (0, 2)) / 2  # type: ignore[arg-type]
    assert f"| 2 | {mean + 0.0:+.2f} ±" in pair
    for picture in ("pareto.png", "curves.png"):
        with Image.open(tmp_path / "out" / picture) as image:
            assert image.width > 400
    with (tmp_path / "out" / "curves.csv").open(newline="") as file:
        points = list(csv.DictReader(file))
    assert {(p["method"], p["seed"], p["epoch"]) for p in points} >= {("EViT", "3", "1"), ("EViT", "3", "2")}
    along = list(report._curves(replace(tiny, curves=("accuracy",), training=True), list(jobs.values())))
    assert along
    assert {(c.name, c.seed) for c in along} < {(j.name, j.seed) for j in jobs.values() if j.needs}
    assert all(0 < c.epochs[0] <= c.epochs[-1] <= 2 and min(c.values["accuracy"]) >= 0 for c in along)
    assert (tmp_path / "work" / ".gitignore").read_text() == "*\n"
    with np.load(tmp_path / "out" / "correct.npz") as file:
        assert len(file.files) == 1 + sum(row["status"] == "ok" for row in rows.values())
        for (name, seed), row in rows.items():
            if row["status"] == "ok":
                hits = np.unpackbits(file[f"{name}, seed {seed}"], count=len(file["indices"]))
                assert 100 * hits.mean() == pytest.approx(float(row["top1"]), abs=1e-3)

    launched.clear()
    assert run(*given) == 1
    assert launched == ["broken", "broken"]
    assert capsys.readouterr().err.count("not run again") == 10
    assert {k: v for k, v in rows_of(tmp_path).items() if v["status"] == "ok"} == {
        k: v for k, v in rows.items() if v["status"] == "ok"
    }
    job = jobs["EViT", 3]
    job.rows.path(job.key).with_suffix(".npz").write_bytes(b"damaged")
    launched.clear()
    assert run(*given, "--only", "EViT") == 0
    assert launched == ["EViT"]
    assert len(rows_of(tmp_path)) == 10  # finished rows that were not asked for stay in the table
    assert "4 of 14 rows have not been run" in (tmp_path / "out" / "results.md").read_text()
    assert run(*given, "--dry-run") == 0
    assert capsys.readouterr().out.count("finished ") == 10


def test_the_digits_table_cut_to_seconds(tmp_path: Path, small: Path, launched: list[str], capsys: Any) -> None:
    assert run(*words("digits", small, tmp_path), "--set", "batch_size=8", "epochs=1", "--device", "cpu") == 0
    assert launched == ["static", "static, trained on", "AHT-ViT", "A-ViT", "EViT", "fold"]
    assert "wrote correct.npz, pareto.png, results.csv, results.md to" in " ".join(capsys.readouterr().out.split())
    rows = rows_of(tmp_path)
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert float(rows["fold", 0]["gmacs_share"]) <= 0.5 + 0.02
    assert {row["compared_to"] for (name, _), row in rows.items() if "trained" not in name} == {"static, trained on"}


@pytest.mark.usefixtures("launched")
def test_smaller_images_are_a_share_of_the_references_macs(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distilled from a model that sees them at its own size."""
    runs = (
        Run("static", "static", change={"loss.distill": 0.0}),
        Run("static at 16 px", "static", start="static", change={"img_size": 16}),
    )
    table = Table("sizes", "", "", runs, "", shared=TINY.shared | {"loss.distill": 1.0}, reference="static")
    monkeypatch.setitem(TABLES, "sizes", table)
    assert run(*words("sizes", small, tmp_path), "--device", "cpu") == 0
    rows = rows_of(tmp_path)
    assert {row["status"] for row in rows.values()} == {"ok"}
    whole, part = (rows[name.name, 0] for name in runs)
    assert (whole["img_size"], part["img_size"]) == ("32", "16")
    share = float(part["gmacs"]) / float(whole["gmacs"])
    assert float(part["gmacs_share"]) == pytest.approx(share, rel=1e-4)
    assert share < 0.6


@pytest.mark.parametrize(
    ("method", "share"),
    [
        ("aht:beta=-1", 0.7),
        ("avit", 0.7),
        ("confidence", 0.6),
        ("similarity", 0.6),
        ("pondernet", 0.7),
        ("act:bias=-1", 0.6),
    ],
)
def test_a_budget_is_calibrated_for_the_share(tmp_path: Path, small: Path, method: str, share: float) -> None:
    table = Table("knob", "", "", (Run("x", method, train=False, share=share),), "", shared={"backbone": "test_vit"})
    given = {"table": "knob", "data": str(small), "weights": str(static(tmp_path / "s")), "device": "cpu"}
    TABLES["knob"] = table
    try:
        (job,) = plan(ReproduceConfig(**given, work=str(tmp_path / "work"), set=("img_size=32", "batch_size=8")))
        row = process.run(job)
    finally:
        del TABLES["knob"]
    assert row["status"] == "ok", row["reason"]
    assert f"for a budget of -{100 - 100 * share:g}%" in row["settings"]
    # calibrated on 8 images of noise, measured on 24 others; one block of an image is 2 % of all
    assert float(row["gmacs_share"]) == pytest.approx(share, abs=0.15)


def test_a_budget_that_cannot_be_met_is_a_failed_row(tmp_path: Path, small: Path) -> None:
    jobs = planned("cifar100-main", data=str(small), weights=str(static(tmp_path / "s")), work=str(tmp_path / "work"))
    job = replace(jobs["static"], trains=False, share=0.01)
    row = process.run(replace(job, training=replace(job.training, backbone="test_vit", img_size=32, device="cpu")))
    assert row["status"] == "failed"
    assert "below the least" in row["reason"]


def test_as_many_at_a_time_as_asked_for(
    tmp_path: Path, small: Path, tiny: Table, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    alive: dict[str, int] = {}
    seen: list[set[str]] = []

    class Slow(Done):
        def __init__(self, job: Job) -> None:
            super().__init__(7)
            self.job, self.polls = job, 0
            alive[job.name] = 1

        def poll(self) -> Any:
            self.polls += 1
            seen.append(set(alive))
            if self.polls < 3:
                return None
            alive.pop(self.job.name, None)
            if self.job.name == "static":
                self.returncode = 0
                row = as_row({"status": "ok", "top1": 1, "gmacs": 1, "method": "static"})
                self.job.rows.put(self.job.key, row, SimpleNamespace(scores=[100.0], indices=[0]))  # type: ignore[arg-type]
            return self.returncode

    monkeypatch.setattr(execute, "launch", lambda job, at_a_time: Slow(job))
    monkeypatch.setattr(execute, "_report", lambda *_: SimpleNamespace(rows=[], figure=None, write=lambda plots: None))
    monkeypatch.setattr(execute, "_POLL", 0.0)
    assert run(*words("tiny", small, tmp_path), "--jobs", 3, "--device", "cpu") == 1
    assert max(map(len, seen)) == 3
    assert all(live == {"static"} for live in seen if "static" in live)
    assert "its process ended with code 7; see" in capsys.readouterr().err


# -- a limited time -------------------------------------------------------------------------------------------------
def test_no_time_at_all_writes_what_is_finished(
    tmp_path: Path, small: Path, tiny: Table, launched: list[str], capsys: Any
) -> None:
    given = (*words("tiny", small, tmp_path), "--device", "cpu")
    assert run(*given, "--minutes", 0) == 75
    assert "7 of 7 rows are not finished" in capsys.readouterr().err
    assert launched == []
    assert not (tmp_path / "out").exists()
    assert run(*given, "--only", "EViT") == 0
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "work" / "runs")  # no weights are needed for the table
    launched.clear()
    assert run(*given, "--minutes", 0) == 75
    assert launched == []
    assert set(rows_of(tmp_path)) == {("static", 0), ("EViT", 0)}
    text = (tmp_path / "out" / "results.md").read_text()
    assert "5 of 7 rows have not been run" in text
    assert "--minutes" not in text
    assert "minutes: expected at least 0" in refused(capsys, *given, "--minutes", -1)


def test_when_the_time_is_up_jobs_are_asked_to_stop_and_those_that_got_done_count(
    tmp_path: Path, small: Path, tiny: Table, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[str] = []

    class Slow(Done):
        def __init__(self, job: Job) -> None:
            super().__init__(75)
            self.job = job

        def poll(self) -> Any:
            return 0 if self.job.name == "static" else None

        def terminate(self) -> None:
            asked.append(self.job.name)

        def wait(self, timeout: float = 0.0) -> int:
            assert timeout <= 20
            if self.job.name == "EViT":  # was at its end
                process.run(self.job)
            return self.returncode

    def launch(job: Job, at_a_time: int) -> Slow:
        if job.name == "static":
            process.run(job)
        return Slow(job)

    now = itertools.count(0, 4)  # seconds, one look at the clock after the other
    monkeypatch.setattr(execute, "launch", launch)
    monkeypatch.setattr(execute, "_POLL", 0.0)
    monkeypatch.setattr("adaptivit.experiments.reproduce.run.time.monotonic", lambda: next(now))
    config = {"table": "tiny", "data": str(small), "weights": "none", "device": "cpu", "jobs": 2, "minutes": 1.0}
    places = {"out": str(tmp_path / "out"), "work": str(tmp_path / "work")}
    rows = execute.execute(ReproduceConfig(**config, **places))
    assert asked == ["trained on", "EViT"]
    assert [row["method"] for row in rows] == ["static", "EViT"]
    assert {row["status"] for row in rows} == {"ok"}
    assert "trained on, seed 0: stopped; the same command goes on" in capsys.readouterr().err
    assert set(rows_of(tmp_path)) == {("static", 0), ("EViT", 0)}


# -- paired ---------------------------------------------------------------------------------------------------------
def test_pairs_are_tested_image_by_image() -> None:
    draw = np.random.default_rng(0)

    def result(right: Any, order: Any) -> Any:
        return SimpleNamespace(scores=[100.0 * right[i] for i in order], indices=[int(i) for i in order])

    count = 4000
    first, second = (draw.random((2, count)) < share for share in (0.85, 0.83))  # two seeds each
    order = draw.permutation(count)
    pairs = [(result(first[s], range(count)), result(second[s], order)) for s in (0, 1)]
    each = report.differences(pairs)
    assert each.mean() == pytest.approx(100 * (first.mean() - second.mean()))
    # one seed: the z of the paired differences is McNemar's, (b - c) / sqrt(b + c), up to 1 / n
    one = report.differences(pairs[:1])
    b, c = int((first[0] & ~second[0]).sum()), int((~first[0] & second[0]).sum())
    error = one.std(ddof=1) / math.sqrt(count)
    assert one.mean() / error == pytest.approx((b - c) / math.sqrt(b + c), rel=2e-3)
    assert float(report.chance(one.mean(), error)) == pytest.approx(
        math.erfc(abs(b - c) / math.sqrt(2 * (b + c))), rel=0.06
    )
    # two seeds: the interval is that of a bootstrap over images
    means = each[draw.integers(0, count, (2000, count))].mean(1)
    assert each.std(ddof=1) / math.sqrt(count) == pytest.approx(means.std(), rel=0.06)
    assert report.chance(0.0, 0.0) == "1"
    assert report.chance(5.0, 0.5) == "< 0.0001"
    assert len(report.differences([])) == 0


# -- processes of their own -----------------------------------------------------------------------------------------
def wait_for(what: Callable[[], Any], seconds: float = 300) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.05)
    return found


@pytest.mark.xdist_group("processes")  # as in test_distributed.py
def test_after_a_kill_no_job_lives_on_and_the_same_command_goes_on(tmp_path: Path, small: Path, capsys: Any) -> None:
    stand_in = ["backbone=test_vit", "img_size=32", "batch_size=8", "epochs=4000"]
    given = [str(w) for w in (*words("digits", small, tmp_path), "--device", "cpu", "--only", "static", "--set")]
    parent = begin(run, *given, *stand_in)
    try:
        place = wait_for(lambda: next(iter((tmp_path / "work" / "runs").glob("*/checkpoint")), None)).parent
    finally:
        parent.kill()
        ended(parent)
    spec = next((tmp_path / "work" / "rows").glob("*.job"))
    wait_for(lambda: not _alive(str(spec)))
    assert not list((tmp_path / "work" / "rows").glob("*.json"))
    # as if fewer epochs had been asked for: the run is nearly at its end
    done = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()][-1]["step"]
    assert done >= 2
    job = process.read(str(spec))
    epochs = done // 2 + 2
    short = replace(job, training=replace(job.training, epochs=epochs))
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"config": config["config"] | {"epochs": epochs}}))
    row = process.run(short)
    assert row["status"] == "ok"
    steps = [json.loads(line)["step"] for line in (place / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] == 2 * epochs
    assert (place / "model").is_dir()
    # the command itself finds the row that was finished under its key
    assert run(*given, *stand_in) == 0
    assert "finished before, not run again" in capsys.readouterr().err


def test_asked_to_end_jobs_write_a_checkpoint_first(tmp_path: Path, small: Path) -> None:
    """Whatever step it was at: the log ends where the checkpoint does."""
    given = (*words("digits", small, tmp_path), "--device", "cpu", "--only", "static", "--set", "backbone=test_vit")
    more = ("img_size=32", "batch_size=2", "epochs=4000", "run.log_steps=1")
    log = tmp_path / "output.txt"
    parent = begin(run, *given, *more, output=log)
    try:
        place = wait_for(lambda: next(iter((tmp_path / "work" / "runs").glob("*/checkpoint")), None)).parent
        parent.terminate()
        assert ended(parent) == 130
    finally:
        parent.kill()
    printed = log.read_text()
    assert "stopped; the same command goes on with it" in printed
    assert "interrupted; the same command goes on" in printed
    spec = next((tmp_path / "work" / "rows").glob("*.job"))
    assert not _alive(str(spec))
    steps = [json.loads(line)["step"] for line in (place / "log.jsonl").read_text().splitlines()]
    assert torch.load(place / "checkpoint" / "training.pt", weights_only=True)["step"] == steps[-1]
    assert "Fatal" not in next((tmp_path / "work" / "logs").glob("*.log")).read_text()


def _alive(word: str) -> bool:
    """Whether a process has this word in its command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if word in (entry / "cmdline").read_text():
                    return True
            except OSError:
                continue
    return False
