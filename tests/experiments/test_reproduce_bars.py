"""How tables are drawn: those whose rows cost the same as differences, others against cost."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adaptivit.evaluation.evaluate import paired_difference
from adaptivit.experiments.reproduce import TABLES, Run, Table, plots, report
from adaptivit.experiments.reproduce.plan import ReproduceConfig, plan
from tests.support.commands import run
from tests.support.tables import TINY, words


def pixels(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert("L"))


def test_ingredients_and_ablations_are_tables_of_one_cost() -> None:
    ours = TABLES.values()
    one = {table.name for table in ours if table.one_cost}
    assert one == {t.name for t in ours if t.name.startswith("ablation-")} - {"ablation-threshold"} | {
        "cifar100-ingredients",
        "cifar100-static",
    }  # T is not calibrated away, and changes the cost


@pytest.mark.usefixtures("launched")
def test_a_table_of_one_cost(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = (
        Run("static", "static", change={"loss.distill": 0.0}),
        Run("trained on", "static", start="static"),
        Run("EViT", "evit:keep=0.5", start="static"),
        Run("fold", "fold:budget=0.7", start="static"),
    )
    table = Table("one", "", "", runs, "", shared=TINY.shared, seeds=(0, 3), reference="trained on", one_cost=True)
    monkeypatch.setitem(TABLES, "one", table)
    drawn: list[plots.Bar] = []
    draw = plots.draw_bars
    monkeypatch.setattr(report, "draw_bars", lambda found, *rest: drawn.extend(found) or draw(found, *rest))
    assert run(*words("one", small, tmp_path), "--device", "cpu") == 0
    assert (tmp_path / "out" / "bars.png").exists()
    assert not (tmp_path / "out" / "pareto.png").exists()
    assert "](bars.png)" in (tmp_path / "out" / "results.md").read_text()
    assert [bar.name for bar in drawn] == ["EViT", "fold"]  # not what all go on from, nor the reference
    config = ReproduceConfig(table="one", data=str(small), weights="none", work=str(tmp_path / "work"))
    right = {(job.name, job.seed): job.rows.correct(job.key) for job in plan(config)}
    for bar in drawn:
        each = [paired_difference(right[bar.name, s], right["trained on", s])[0] for s in (0, 3)]  # type: ignore[arg-type]
        assert bar.points == pytest.approx(np.mean(each))
        hits = [[np.array(right[n, s].scores) for n in (bar.name, "trained on")] for s in (0, 3)]  # type: ignore[union-attr]
        apart = np.mean([a - b for a, b in hits], axis=0)
        assert bar.spread == pytest.approx(1.96 * apart.std(ddof=1) / len(apart) ** 0.5)
        assert bar.top1 == pytest.approx(np.mean([right[bar.name, s].score for s in (0, 3)]), abs=1e-3)  # type: ignore[union-attr]


@pytest.mark.usefixtures("launched")
def test_rows_without_training_are_hollow_beside_others(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = (
        Run("static", "static", train=False),
        Run("EViT -10 %, as it is", "evit:keep=0.8", train=False),
        Run("EViT -20 %, as it is", "evit:keep=0.6", train=False),
        Run("EViT -20 %, adapted", "evit:keep=0.6"),
    )
    shared = TINY.shared | {"loss.distill": 0.0}
    table = Table("both", "", "", runs, "", shared=shared, reference="static")
    monkeypatch.setitem(TABLES, "both", table)
    shown: list[Any] = []
    monkeypatch.setattr(report, "pareto", lambda points, **rest: shown.append((points, rest["detail"])) or b"")
    assert run(*words("both", small, tmp_path), "--device", "cpu") == 0
    points, detail = shown[-1]
    assert [p.hollow for p in points] == [True, True, True, False]
    assert "hollow" in detail
    curves = [p.curve for p in points]
    assert curves[1] == curves[2] != curves[3]
    bare = [row for row in runs if not row.train]
    monkeypatch.setitem(TABLES, "both", Table("both", "", "", tuple(bare), "", shared=shared, reference="static"))
    assert run(*words("both", small, tmp_path), "--device", "cpu") == 0
    points, detail = shown[-1]
    assert not any(p.hollow for p in points[1:])
    assert "hollow" not in detail


def test_a_table_of_one_cost_with_its_start_alone(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    """Nothing to draw yet, and no picture without rows."""
    runs = (Run("static", "static", change={"loss.distill": 0.0}), Run("trained on", "static", start="static"))
    table = Table("one", "", "", runs, "", shared=TINY.shared, reference="trained on", one_cost=True)
    monkeypatch.setitem(TABLES, "one", table)
    assert run(*words("one", small, tmp_path), "--device", "cpu", "--only", "static") == 0
    assert launched == ["static"]
    assert not (tmp_path / "out" / "bars.png").exists()
    assert "bars.png" not in (tmp_path / "out" / "results.md").read_text()


def test_long_names_and_far_rows_are_inside_the_picture() -> None:
    near = plots.Bar("a name that is longer than all the others of this table", -0.5, 0.4, 83.5)
    far = plots.Bar("far", -40.0, 1.0, 44.0)
    image = pixels(plots.draw_bars([near, far], "static", "title", "detail"))
    assert (image[:, :4] > 250).all()  # nothing is cut off at the left
    other = pixels(plots.draw_bars([near, replace(far, points=-50.0)], "static", "title", "detail"))
    places = np.argwhere(image != other)  # the figure beside the arrow is all that differs
    assert len(places)
    high, left, right = image.shape[0], places[:, 1].min(), places[:, 1].max()
    assert (places[:, 0] > high / 3).all()  # in the second row
    assert image.shape[1] / 3 < left < right < image.shape[1] - 300
    assert pixels(plots.draw_bars([near], "static", "title", "detail")).shape[0] < high


def test_curves_have_a_panel_a_backbone_and_the_colour_of_their_policy() -> None:
    table = TABLES["amod-figure-3"]
    rows = [(run.name, run.name.partition("-")[0]) for run in table.runs]
    curves = [plots.Curve(name, 0, [1.0, 2.0], {"top1": [50.0, 60.0]}, policy) for name, policy in rows]
    three, one = (Image.open(io.BytesIO(plots.draw_curves(c, table))) for c in (curves, curves[::3]))
    assert three.size == one.size  # a panel without curves stays
    assert three.width > 3 * 520
    assert plots._without("amod-cars-later-tiny", table.panels) == "amod-cars-later"
    styles = plots._styles([("mod-cars", "mod"), ("amod-cars", "amod"), ("amod-cars-later", "amod"), ("x", "")])
    assert styles["amod-cars"][1] == styles["amod-cars-later"][1] != styles["mod-cars"][1]
    assert styles["amod-cars"][0] != styles["amod-cars-later"][0]
