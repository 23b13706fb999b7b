"""Progress: the count and the time that remains at any width, lines where there is no terminal."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from adaptivit.utils import console
from tests.support.commands import run, static, train
from tests.support.data_sets import folder

FIGURES = ["loss 0.153", "accuracy 95.10 %", "11.3 GMACs", "depth 5.14", "1234 img/s", "target_depth 0.123"]


def last(width: int, what: str, done: int, total: int) -> str:
    """The last line that a terminal of this width shows."""
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=width, color_system=None)
    with console.bars(terminal, keep=True) as step:
        step(what, done - 1, total)
        step(what, done, total, FIGURES)
    return re.sub(r"\x1b\[[?\d]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n").strip().splitlines()[-1].strip()


@pytest.mark.parametrize("width", [60, 61, 70, 80, 100, 140, 200])
def test_extra_figures_are_cut_first(width: int) -> None:
    """At 80 columns the count was cut off: `training static ViT ━━━━ 528… loss 0.15`."""
    for what, done, total in (("train", 1234, 9000), ("static ViT", 528, 528), ("train", 99_999, 450_000)):
        line = last(width, what, done, total)
        assert len(line) < width
        assert re.match(rf"{what} +━+ +{done}/{total} (-|\d):", line), line
        shown = [f for f in FIGURES if f in line]
        assert shown == FIGURES[: len(shown)], "the last go first"
        assert "…" not in line
        assert len(shown) >= (2 if done < 10_000 else 1) + (width >= 80) + 2 * (width >= 140), line


def test_names_are_below_each_other_and_nothing_is_known_of_the_end() -> None:
    file = io.StringIO()
    with console.bars(Console(file=file, force_terminal=True, width=60, color_system=None), keep=True) as step:
        step("a longer name", 3, 10)
        step("b", 0)
    lines = re.sub(r"\x1b\[[?\d]*[A-Za-z]", "", file.getvalue()).split("\r")[-1].strip().splitlines()
    assert lines[0].startswith("a longer name ━")
    assert re.fullmatch(r"b {14}0:00 *", lines[1])


def test_a_pipe_gets_a_line_every_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while no step ends."""
    assert console._EVERY <= 30
    monkeypatch.setattr(console, "_EVERY", 0.05)
    file = io.StringIO()
    with console.bars(Console(file=file, width=60), keep=True) as step:
        step("train", 2, 10, FIGURES)
        deadline = time.monotonic() + 5
        while file.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        step("train", 10, 10)
    lines = file.getvalue().splitlines()
    assert len(lines) >= 4
    assert all(line == "train: 2/10, -:-- left, " + ", ".join(FIGURES) for line in lines[:3]), "at any width"
    assert lines[-1].startswith("train: 10/10, 0:00 in all, loss 0.153")
    printed = file.getvalue()
    time.sleep(0.15)
    assert file.getvalue() == printed, "it ends with the block"
    with console.bars(Console(file=file), hide=True, keep=True) as step:
        step("hidden", 1, 2)
    assert file.getvalue() == printed


def test_the_first_line_says_what_is_done(tmp_path: Path, capsys: Any) -> None:
    where, model = folder(tmp_path / "in"), static(tmp_path / "model")
    given = ("--val-split", 0.25, "--optim.freeze-epochs", 1)
    assert train(where, tmp_path / "out", *given, "--policy", "avit", "--backbone", "test_vit") == 0
    line = capsys.readouterr().err.splitlines()[0]
    found = re.fullmatch(
        r"train avit on test_vit: 18 images of 3 classes, 6 for validation, 2 steps an epoch, 2 in all, .*"
        r"\(1 thread\), trained: 0\.\d+ M weights, \d+ of them the policy's \(the backbone from epoch 1 on\)",
        line,
    )
    assert found, line
    for words, start in (
        (("evaluate", "--data", where, "--checkpoint", model), "evaluate static: 24 images of 3 classes, 1 batch, "),
        (("calibrate", model, "--data", where), f"calibrate static: 24 images of {where}, "),
    ):
        capsys.readouterr()
        assert run(*words) == 0
        assert capsys.readouterr().err.startswith(start)
