"""A run that was interrupted, at whatever moment, ends in the same weights as one that was not: bit for bit."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from safetensors.torch import load_file, save_file

import adaptivit
from adaptivit.training.config import TrainConfig
from adaptivit.training.run import Trainer, fit
from tests.support.checkpoints import Bomb
from tests.support.commands import SMALL, assert_same_weights, log, refused, train, weights
from tests.support.data_sets import split_folder
from tests.support.processes import LIMIT, begin

pytestmark = pytest.mark.xdist_group("resume")  # one run that all compare with

# Everything random and everything with a state of its own.
HARD = ("--policy", "aht:straight_through=true", "--loss.target-depth", 0.5, "--loss.ponder", 0.01, "--optim.ema", 0.9)
HARD += (
    "--optim.drop-path",
    0.3,
    "--augment.kind",
    "rand",
    "--augment.erasing",
    0.5,
    "--epochs",
    3,
    "--optim.lr",
    1e-3,
    "--loss.cost",
    10,
    "--optim.warmup-epochs",
    0.5,
)


def assert_clean_log(out: Path, steps: int = 9, epochs: int = 3) -> None:
    assert [r["step"] for r in log(out) if r["kind"] == "train"] == list(range(1, steps + 1))
    assert [r["epoch"] for r in log(out) if r["kind"] == "validation"] == list(range(1, epochs + 1))


def trained(where: Path, out: Path, words: tuple[Any, ...], first: Callable[[], None] | None = None) -> int:
    """In a process of its own: train, after something was changed there."""
    if first is not None:
        first()
    return train(where, out, *words)


def child(*given: Any, until: Callable[[], bool] | None = None) -> int | None:
    """`trained` in a process that is killed when `until` is true; returns minus the signal, or its code."""
    process, deadline = begin(trained, *given), time.monotonic() + LIMIT
    while process.is_alive():
        if (until is not None and until()) or time.monotonic() > deadline:
            process.kill()
        process.join(0.002)
    assert time.monotonic() < deadline, "the child hung"
    return process.exitcode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The data, and the weights of the run that nothing interrupted."""
    root = tmp_path_factory.mktemp("whole")
    assert train(split_folder(root / "in"), root / "out", *HARD) == 0
    assert_clean_log(root / "out")
    return root / "in", weights(root / "out")


def slow() -> None:
    """Steps slow enough to be killed between them, and one near the end that waits for it."""
    inner = Trainer.step

    def slower(self: Trainer, batch: Any, step: int, *arguments: Any) -> Any:
        time.sleep(600 if step == 7 else 0.04)
        return inner(self, batch, step, *arguments)

    Trainer.step = slower  # type: ignore[method-assign]


def test_the_same_run_twice_is_the_same(whole: Any, tmp_path: Path) -> None:
    torch.manual_seed(123)
    assert train(whole[0], tmp_path, *HARD, "--run.checkpoint-steps", 1, "--workers", 1) == 0
    assert_same_weights(weights(tmp_path), whole[1])


@pytest.mark.parametrize(("every", "at"), [(2, 5), (0, 5), (0, 1)])
def test_killed_and_resumed_is_bit_for_bit_the_same(whole: Any, tmp_path: Path, every: int, at: int) -> None:
    """A checkpoint every so many steps (0: epochs of 3 steps alone), killed when this step has been logged."""
    words = (*HARD, "--run.checkpoint-steps", every)
    code = child(whole[0], tmp_path, words, slow, until=lambda: any(r["step"] >= at for r in log(tmp_path)))
    assert code == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    assert at <= max(r["step"] for r in log(tmp_path)) < 9, "it was killed in the middle"
    assert train(whole[0], tmp_path, *words, "--resume") == 0
    assert_same_weights(weights(tmp_path), whole[1])
    assert_clean_log(tmp_path)


# the first checkpoint in its place; the old one put aside for the second, and the second in its place; the tables of
# the second epoch; the picture, the final model's weights and the model in its place
MOMENTS = [("checkpoint", 1), (".checkpoint.old", 1), ("checkpoint", 2), ("train.csv", 2), ("validation.csv", 2)]
MOMENTS += [("curves.png", 1), ("model.safetensors", 4), ("model", 1), ("environment.json", 1)]


def deadly(name: str, time: int) -> None:
    """Kill this process just before a file or directory is moved to this name the nth time."""
    replace, count = os.replace, 0

    def move(source: Any, target: Any) -> None:
        nonlocal count
        count += Path(target).name == name
        if count == time:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = move


@pytest.mark.parametrize(("name", "time"), MOMENTS)
def test_killed_at_any_move_of_a_file(whole: Any, tmp_path: Path, capsys: Any, name: str, time: int) -> None:
    assert child(whole[0], tmp_path, HARD, partial(deadly, name, time)) == -signal.SIGKILL
    assert train(whole[0], tmp_path, *HARD, "--resume") == 0
    assert_same_weights(weights(tmp_path), whole[1])
    assert_clean_log(tmp_path)
    if (name, time) not in (("checkpoint", 1), ("environment.json", 1)):  # the first checkpoint had been finished
        assert "resumed after step" in capsys.readouterr().err, "a finished checkpoint was lost"
    leftovers = [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert not leftovers, f"remains of the killed run: {leftovers}"


def test_interrupted_by_hand_and_resumed(whole: Any, tmp_path: Path, capsys: Any) -> None:
    step = Trainer.step

    def interrupted(self: Trainer, batch: Any, number: int, *arguments: Any) -> Any:
        if number == 4:
            raise KeyboardInterrupt
        return step(self, batch, number, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        assert train(whole[0], tmp_path, *HARD) == 130
    assert "go on with --resume" in capsys.readouterr().err
    assert train(whole[0], tmp_path, *HARD, "--resume") == 0
    assert_same_weights(weights(tmp_path), whole[1])
    assert_clean_log(tmp_path)


@pytest.mark.parametrize("after", [4, 6])
def test_asked_to_stop_it_leaves_a_checkpoint_of_that_very_step(whole: Any, tmp_path: Path, after: int) -> None:
    """In the middle of an epoch of 3 steps, and at its end, where validation comes first."""
    out = tmp_path / "out"
    words = ["--data", whole[0], "--out", out, "--device", "cpu", *SMALL, *HARD]
    config = tyro.cli(TrainConfig, args=[str(w) for w in words])
    with pytest.raises(KeyboardInterrupt):
        fit(config, show=False, stop=lambda: sum(r["kind"] == "train" for r in log(out)) >= after)
    assert torch.load(out / "checkpoint" / "training.pt", weights_only=True)["step"] == after
    assert [r["epoch"] for r in log(out) if r["kind"] == "validation"] == list(range(1, after // 3 + 1))
    fit(replace(config, resume=True), show=False)
    assert_same_weights(weights(out), whole[1])
    assert_clean_log(out)


def test_resuming_a_finished_run_changes_nothing(whole: Any, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(whole[0].parent / "out", tmp_path / "out")
    assert train(whole[0], tmp_path / "out", *HARD, "--resume") == 0
    assert "saved" in capsys.readouterr().out
    assert_same_weights(weights(tmp_path / "out"), whole[1])
    assert_clean_log(tmp_path / "out")


def test_a_cut_line_of_the_log_is_dropped(whole: Any, tmp_path: Path) -> None:
    shutil.copytree(whole[0].parent / "out", tmp_path / "out")
    with (tmp_path / "out" / "log.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 10, "lo')
    assert train(whole[0], tmp_path / "out", *HARD, "--resume") == 0
    assert_clean_log(tmp_path / "out")


# -- what cannot be resumed -----------------------------------------------------------------------------------------
def words(whole: Any, out: Path, *more: Any) -> tuple[Any, ...]:
    return ("train", "--data", whole[0], "--out", out, "--device", "cpu", *SMALL, *HARD, *more)


def test_another_configuration_is_refused_with_what_differs(whole: Any, capsys: Any) -> None:
    out = whole[0].parent / "out"
    message = refused(capsys, *words(whole, out, "--resume", "--optim.lr", 0.5, "--optim.ema", 0.5))
    assert "lr (was 0.001, now 0.5)" in message
    assert "ema (was 0.9, now 0.5)" in message
    assert "drop_path" not in message
    refused(capsys, *words(whole, out, "--resume", "--policy", "static"))
    assert_same_weights(weights(out), whole[1])


def test_resume_without_a_run_and_a_run_without_resume(whole: Any, tmp_path: Path, capsys: Any) -> None:
    assert "there is no run" in refused(capsys, *words(whole, tmp_path / "none", "--resume"))
    assert not (tmp_path / "none").exists()
    assert "pass --resume" in refused(capsys, *words(whole, whole[0].parent / "out"))
    assert_same_weights(weights(whole[0].parent / "out"), whole[1])


def grown(state: Any) -> None:
    next(iter(state["optimizer"]["state"].values()))["exp_avg"] = torch.zeros(7)


STATES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no_step": (lambda state: state.pop("step"), "KeyError"),
    "negative": (lambda state: state.update(step=-5), r"step: expected 1\.\.9, got -5"),
    "later": (lambda state: state.update(step=10**9), r"step: expected 1\.\.9, got 1000000000"),
    "half": (lambda state: state.update(step=1.5), r"step: expected 1\.\.9, got 1\.5"),
    "no_average": (lambda state: state.update(average=None), "average: expected weights, got None"),
    "nan": (lambda state: state["average"]["vit.norm.bias"].fill_(float("nan")), "not finite"),
    "optimizer": (grown, r"AdamW's state .*\(7,\)"),
}
WEIGHTS = {"cut": b"cut", "other_step": b""}


@pytest.mark.parametrize("damage", [*STATES, *WEIGHTS, "text", "pickle"])
def test_a_damaged_checkpoint_is_named(whole: Any, tmp_path: Path, capsys: Any, damage: str) -> None:
    shutil.copytree(whole[0].parent / "out", tmp_path / "out")
    file, weights = (tmp_path / "out/checkpoint" / name for name in ("training.pt", "model.safetensors"))
    message = ""
    if damage in STATES:
        state = torch.load(file, weights_only=True)
        STATES[damage][0](state)
        torch.save(state, file)
        message = STATES[damage][1]
    elif damage == "other_step":  # as good as the right ones
        stored = load_file(weights)
        save_file({k: v + 0.01 for k, v in stored.items()}, weights)
        message = "model.safetensors is not of the step"
    else:
        where = weights if damage == "cut" else file
        content = {"cut": file.read_bytes()[:1000], "text": b"hello", "pickle": pickle.dumps(Bomb(tmp_path / "ran"))}
        where.write_bytes(content[damage])
        message = re.escape(str(where))
    line = refused(capsys, *words(whole, tmp_path / "out", "--resume"))
    assert re.search(message, line), line
    assert str(tmp_path / "out/checkpoint") in line
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "line",
    ["garbage", "{}", "[1]", '{"kind": "train", "step": "3"}', '{"kind": "train", "step": -1}', "\0" * 99, "[" * 9999],
)
def test_a_damaged_log_is_named(whole: Any, tmp_path: Path, capsys: Any, line: str) -> None:
    shutil.copytree(whole[0].parent / "out", tmp_path / "out")
    log = tmp_path / "out/log.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    assert f"{log} is damaged in line 3 (" in refused(capsys, *words(whole, tmp_path / "out", "--resume"))


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 9999, "{}", '{"config": 3}', "\xff"])
def test_a_damaged_configuration_is_named(whole: Any, tmp_path: Path, capsys: Any, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json is damaged" in refused(capsys, *words(whole, tmp_path, "--resume"))


def test_a_disk_that_fills_up_keeps_the_old_checkpoint(whole: Any, tmp_path: Path, capsys: Any) -> None:
    """The last move of a checkpoint fails: the one before is still in its place, as the message says."""
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).name == "checkpoint" and (tmp_path / "log.jsonl").read_text().count("validation") > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert train(whole[0], tmp_path, *HARD) == 2
    assert "No space left" in capsys.readouterr().err.splitlines()[-1]
    assert torch.load(tmp_path / "checkpoint" / "training.pt", weights_only=True)["step"] == 3
    assert train(whole[0], tmp_path, *HARD, "--resume") == 0
    assert_same_weights(weights(tmp_path), whole[1])


# -- a loss that is not finite --------------------------------------------------------------------------------------
def test_a_nan_loss_stops_the_run_and_keeps_the_last_good_checkpoint(whole: Any, tmp_path: Path, capsys: Any) -> None:
    from adaptivit.training.losses import TaskLoss

    call, count = TaskLoss.sums, 0

    def spoilt(self: Any, *arguments: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return call(self, *arguments) * (float("nan") if count == 7 else 1.0)  # the first is the probe

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskLoss, "sums", spoilt)
        assert train(whole[0], tmp_path, *HARD, "--run.checkpoint-steps", 2) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "'task' became nan at step" in message
    assert [r["step"] for r in log(tmp_path) if r["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert torch.load(tmp_path / "checkpoint" / "training.pt", weights_only=True)["step"] == 4
    assert train(whole[0], tmp_path, *HARD, "--run.checkpoint-steps", 2, "--resume") == 0
    assert_same_weights(weights(tmp_path), whole[1])
    assert adaptivit.load(tmp_path / "model").class_names == ["a", "b", "c"]


def test_the_step_in_the_message_is_the_step_in_the_log(whole: Any, tmp_path: Path, capsys: Any) -> None:
    assert (
        train(
            whole[0],
            tmp_path,
            "--policy",
            "static",
            "--optim.lr",
            1e30,
            "--optim.clip-grad",
            0,
            "--optim.warmup-epochs",
            0,
        )
        == 2
    )
    last = max(r["step"] for r in log(tmp_path))
    assert f"at step {last + 1}." in capsys.readouterr().err


def test_a_checkpoint_never_holds_weights_that_are_not_finite(whole: Any, tmp_path: Path) -> None:
    """A finite loss can have a gradient that is not: the step spoils the weights, the next loss shows it."""
    from adaptivit.training.losses import TaskLoss

    call = TaskLoss.sums

    def spoilt(self: Any, *arguments: Any) -> torch.Tensor:
        loss = call(self, *arguments)
        return loss + (0 * loss).sqrt()  # the slope of a root at 0 is infinite

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskLoss, "sums", spoilt)
        assert train(whole[0], tmp_path, *HARD, "--run.checkpoint-steps", 1) == 2
    if (tmp_path / "checkpoint").exists():
        stored = load_file(tmp_path / "checkpoint" / "model.safetensors")
        assert all(v.isfinite().all() for v in stored.values())
