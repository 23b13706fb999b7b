"""How the trials of a sweep end: failed, interrupted, shared between processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptivit.errors import NotFiniteError, UserError
from adaptivit.evaluation.evaluate import Result
from adaptivit.experiments.sweep import run
from adaptivit.experiments.sweep.config import TrialConfig
from adaptivit.experiments.sweep.run import search
from adaptivit.experiments.sweep.space import parse
from adaptivit.experiments.sweep.trials import Trials
from adaptivit.training.config import TrainConfig
from tests.support.sweeps import config, pairs, rows

BASE = TrialConfig(data="photos")
LR, PONDER = "optim.lr=1e-4|3e-4|1e-3", "loss.ponder=0|0.1"


# -- how trials end -------------------------------------------------------------------------------------------------
def patched(monkeypatch: pytest.MonkeyPatch, fails: Callable[[TrainConfig], BaseException | None]) -> None:
    inner = run.run_trial

    def trial(config: TrialConfig, show: bool = True) -> Result:
        error = fails(config)
        if error is not None:
            raise error
        return inner(config, show)

    monkeypatch.setattr(run, "run_trial", trial)


@pytest.mark.parametrize("error", [NotFiniteError("The loss became nan."), torch.OutOfMemoryError("The loss no")])
def test_a_failing_trial_is_recorded_and_the_rest_runs(
    tmp_path: Path, fake: list[TrainConfig], monkeypatch: pytest.MonkeyPatch, capsys: Any, error: Exception
) -> None:
    patched(monkeypatch, lambda c: error if c.optim.lr == 1e-3 else None)
    for _ in range(2):  # and is not run again
        search(config(tmp_path, LR))
    assert pairs(fake) == [(1e-4, 0), (3e-4, 0)]
    found = rows(tmp_path)
    assert [r["status"] for r in found] == ["finished", "finished", "failed"]
    assert found[2]["reason"].startswith("The loss")
    assert found[2]["optim.lr"] == "1e-3"
    printed = capsys.readouterr()
    assert "1 trials failed" in printed.out
    assert "failed: The loss" in printed.err


def test_a_combination_that_cannot_be_is_a_failed_trial(tmp_path: Path, fake: list[TrainConfig]) -> None:
    search(config(tmp_path, "policy.eps=0.01|1.5", "policy.threshold=1|2"))
    assert [r["status"] for r in rows(tmp_path)] == ["finished", "finished", "failed", "finished"]
    assert "eps" in rows(tmp_path)[2]["reason"]


def test_when_all_fail_the_reason_is_said(tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, lambda _: UserError("No teacher."))
    with pytest.raises(UserError, match=r"No trial ended well\. The first one: No teacher"):
        search(config(tmp_path, LR))


@pytest.mark.parametrize("method", ["grid", "tpe"])
def test_an_interrupted_trial_is_run_again(
    tmp_path: Path, fake: list[TrainConfig], monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    """By Ctrl-C, and by a death without a word."""
    wanted = config(tmp_path, "optim.lr=1e-4|3e-4|1e-3", method=method, trials=3)
    begun: list[float] = []

    def stop(c: TrainConfig) -> BaseException | None:
        begun.append(c.optim.lr)
        return KeyboardInterrupt() if len(begun) == 2 else None

    patched(monkeypatch, stop)
    with pytest.raises(KeyboardInterrupt):
        search(wanted)
    trials = Trials(wanted, parse(wanted.space, wanted.train))
    claim = trials.claim()
    assert claim is not None
    assert (claim.number, claim.params["optim.lr"]) == (2, f"{begun[1]:.0e}".replace("e-0", "e-"))
    assert trials.records()[1].status == "running"
    claim.lock.release()  # as the system does when a process dies
    search(wanted)
    assert begun[2] == begun[1]
    assert [r["status"] for r in rows(tmp_path)] == ["finished"] * 3
    assert len(fake) == 3


def test_an_interrupted_run_directory_is_resumed(tmp_path: Path) -> None:
    wanted = config(tmp_path)
    (tmp_path / "trials" / "0002").mkdir(parents=True)
    (tmp_path / "trials" / "0002" / "config.json").write_text("{}")
    assert not run.trial_config(wanted, 1, {}).resume
    assert run.trial_config(wanted, 2, {}).resume


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_those_who_share_a_directory_share_the_trials(
    tmp_path: Path, fake: list[TrainConfig], monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    meet, inner, errors = threading.Barrier(2, timeout=300), run.run_trial, []
    first = threading.local()

    def together(c: TrialConfig, show: bool = True) -> Result:
        if not getattr(first, "done", False):  # each has a trial of its own before either ends one
            first.done = True
            meet.wait()
        return inner(c, show)

    monkeypatch.setattr(run, "run_trial", together)

    def work() -> None:
        try:
            search(config(tmp_path, "optim.lr=1e-5..1e-3:log", method=method, trials=8))
        except BaseException as error:  # an exception of a thread ends nothing
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len({c.out for c in fake}) == len(fake) == 8
    assert len({c.optim.lr for c in fake}) == 8
    assert [r["status"] for r in rows(tmp_path)] == ["finished"] * 8


_WORKER = """
import sys, time
from adaptivit.experiments.sweep.config import SweepConfig, TrialConfig
from adaptivit.experiments.sweep.space import parse
from adaptivit.experiments.sweep.trials import Trials
config = SweepConfig(TrialConfig(data="photos", out=sys.argv[1]), ("optim.lr=1e-4|3e-4|1e-3", "loss.ponder=0|0.1"))
trials = Trials(config, parse(config.space, config.train))
while (claim := trials.claim()) is not None:
    print(claim.number, *claim.params.values(), flush=True)
    time.sleep(float(sys.argv[2]))
    trials.end(claim, "finished", {"result": {}})
"""


def test_two_processes_share_the_trials_and_that_of_a_dead_one(tmp_path: Path) -> None:
    def start(seconds: float) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", _WORKER, str(tmp_path), str(seconds)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    dying = start(600)
    try:
        assert dying.stdout is not None
        assert dying.stdout.readline().split() == ["1", "1e-4", "0"]
    finally:
        dying.kill()
        dying.communicate()
    both = [start(0.1) for _ in range(2)]
    ran = [line for p in both for line in p.communicate(timeout=300)[0].splitlines()]
    assert [p.returncode for p in both] == [0, 0]
    grid = [f"{lr} {ponder}" for lr in ("1e-4", "3e-4", "1e-3") for ponder in ("0", "0.1")]
    assert sorted(ran) == [f"{i} {point}" for i, point in enumerate(grid, 1)]
