"""The papers' experiments, each whole on its stand-in: every row, figure and picture."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from adaptivit.experiments.reproduce import TABLES, Run, Table
from adaptivit.experiments.reproduce.figures import Found, Given, retuned, throughput
from tests.support.commands import refused, run

PAPERS = [name for name, table in TABLES.items() if table.paper]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stand-in")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.xdist_group(f"papers_{n.startswith('amod')}")) for n in PAPERS]
)
def test_an_experiment_runs_on_its_stand_in(name: str, work: Path, tmp_path: Path, capsys: Any) -> None:
    table, out = TABLES[name], tmp_path / "out"
    assert run("reproduce", name, "--stand-in", "--work", work, "--out", out, "--device", "cpu") == 0
    printed = capsys.readouterr().out
    text = (out / "results.md").read_text()
    if table.runs:
        found = rows(out / "results.csv")
        assert {row["method"] for row in found} == {r.name for r in table.runs}
        assert {row["status"] for row in found} == {"ok"}
        assert {row["differs"] for row in found} == {"stand-in: 64 digits, a ViT of 6 blocks, 1 epoch"}
        assert "stand-in:" in printed
        assert "stand-in:" in text
        assert all(run.paper in text for run in table.runs)
    if table.figure:
        assert rows(out / "figure.csv")
        assert "Raw figures" in text
    for picture in out.glob("*.png"):
        with Image.open(picture) as image:
            assert image.width > 200, picture.name
            assert image.convert("L").getextrema()[0] < 200, picture.name  # something is drawn
    assert any(out.glob("*.png")) or not table.runs


def test_experiments_of_a_paper_are_listed_by_what_was_run(capsys: Any) -> None:
    for paper in ("aht", "avit", "amod"):
        assert run("reproduce", "--paper", paper) == 0
        printed = capsys.readouterr().out
        for name, table in TABLES.items():
            assert (f"  {name}: " in printed) == (table.paper == paper)
    assert "run on the paper's data\n  amod-table-" in printed


def test_mistakes(tmp_path: Path, capsys: Any) -> None:
    assert "brings its own data" in refused(capsys, "reproduce", "avit-figure-7", "--stand-in", "--data", "x.npz")
    assert "leave --models out" in refused(capsys, "reproduce", "avit-figure-7", "--stand-in", "--models", tmp_path)
    assert "got both" in refused(capsys, "reproduce", "avit-figure-7", "--paper", "avit")
    assert "avit-paper" in refused(capsys, "reproduce", "avit-figure-7", "--models", f"no-row={tmp_path}")


def test_a_trained_model_takes_a_rows_place(work: Path, tmp_path: Path) -> None:
    """With its own budget: the second row is otherwise set to one."""
    given = ("reproduce", "avit-table-1", "--device", "cpu")
    assert run(*given, "--stand-in", "--work", work, "--out", tmp_path / "a") == 0
    model = next(work.glob("runs/avit-*/model"))
    data = work / "stand-in" / "data.npz"
    more = ("--data", data, "--models", f"static={model}", model, "--work", tmp_path / "w")
    assert run(*given, *more, "--out", tmp_path / "b") == 0
    again = rows(tmp_path / "b" / "results.csv")
    assert [row["method"] for row in again] == ["static", "A-ViT-T"]
    assert len({(row["top1"], row["gmacs"]) for row in again}) == 1
    assert {(row["model"], row["policy"], row["epochs"]) for row in again} == {("digits_vit", "avit", "0")}
    assert all("data data.npz (paper: ImageNet-1k" in row["differs"] for row in again)
    assert all("given by --models" in row["differs"] for row in again)


def test_the_page_of_the_papers_has_a_line_for_each() -> None:
    page = (Path(__file__).parents[2] / "docs" / "results" / "papers.md").read_text()
    lines = {line.split("`")[1]: line.split(" | ")[2] for line in page.splitlines() if line.startswith("| `")}
    assert lines == {name: TABLES[name].ran_on or "not run" for name in PAPERS}


def test_lambda_is_chosen_by_cost_then_by_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    validation = {"full": (70.0, 3.1), "a": (72.0, 3.6), "b": (68.0, 3.11), "c": (69.0, 3.09), "d": (60.0, 2.0)}
    found = {name: SimpleNamespace(score=s, gmacs=g, images=8) for name, (s, g) in validation.items()}
    monkeypatch.setattr(retuned, "evaluated", lambda model, *_: found[model])
    timed: list[list[str]] = []
    monkeypatch.setattr(throughput, "measure", lambda given: timed.append(given.names) or Found())
    monkeypatch.setattr(Given, "model", lambda given, name: name)
    monkeypatch.setattr(Given, "choosing", None)
    rows = {name: {"top1": str(s), "gmacs": str(g)} for name, (s, g) in validation.items()}
    table = Table("t", "t", "", tuple(Run(name, "static") for name in rows), "", options={"like": "full"})
    given = Given(table, dict.fromkeys(rows), rows, "cpu", False)  # type: ignore[arg-type]
    kept = retuned.measure(given)
    assert [row["row"] for row in kept.rows if row["chosen"]] == ["c"]  # as near as b, and more accurate
    assert timed == [["full", "c"]]
    assert [line["ours"] for line in kept.compared] == ["70.00 / 3.1", "69.00 / 3.09"]
