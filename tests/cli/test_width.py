"""Listings begin with three to start from, and nothing that is printed is wider than the terminal or cut off."""

from __future__ import annotations

from typing import Any

import pytest

from adaptivit.evaluation.predict import Prediction, as_table
from adaptivit.experiments.reproduce.tables import TABLES
from adaptivit.tasks import get
from adaptivit.training.recipes import RECIPES
from adaptivit.utils.console import screen_table, show
from tests.support.commands import run

Capture = pytest.CaptureFixture[str]


@pytest.fixture(params=[60, 80, 120])
def width(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def lines(capsys: Capture, width: int) -> list[str]:
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= width
    return printed


@pytest.mark.parametrize(("command", "known"), [("recipes", RECIPES), ("reproduce", TABLES)])
def test_listings_begin_with_three(command: str, known: Any, width: int, capsys: Capture) -> None:
    assert run(command) == 0
    printed = lines(capsys, width)
    assert printed[0] == "to start from"
    blocks = [block.splitlines() for block in "\n".join(printed).split("\n\n")]
    named = [[line.split(":")[0].strip() for line in block if line[:3].strip()] for block in blocks]
    assert len(named[0]) == 4
    assert all(name in known for name in named[0][1:])
    listed = [name for block in named[1:] for name in block[1:] if name in known]
    assert sorted(listed) == sorted(known)


def test_tables_fit(width: int, capsys: Capture) -> None:
    figures = [f"{1000 * i}.{i}±0.01" for i in range(9)]
    table = screen_table(
        "a title", [["aht_merge:threshold=0.9", *figures]], ["method", *(f"column {i}" for i in range(9))]
    )
    show(table)
    printed = " ".join("\n".join(lines(capsys, width)).split())
    assert all(figure in printed for figure in figures)  # in one piece
    assert "column 8" in printed


def test_a_file_name_is_not_cut_off(width: int, capsys: Capture) -> None:
    name = "/a/long/way/to/" + "x" * 60 + ".jpg"
    answer = {"classes": [{"name": "tabby", "probability": 0.5, "index": 0}]}
    show(as_table([Prediction(name, answer, 0.8, 1.2, 9.0, [197])], get("classification")))
    printed = "".join("\n".join(lines(capsys, width)).split())
    assert "tabby" in printed
    assert printed.count("x") == 60
