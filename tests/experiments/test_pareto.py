"""What a comparison draws and prints: turns of timing, the front, labels, the axis, the table."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

from adaptivit.errors import UserError
from adaptivit.execution.timing import interleaved
from adaptivit.experiments import table
from adaptivit.experiments.compare import run as compare
from adaptivit.experiments.compare.config import CompareConfig
from adaptivit.experiments.store import COLUMNS
from adaptivit.factory import create
from adaptivit.visualize.pareto import Point, below_axis, drawn, front, pareto


# -- timing and plot ------------------------------------------------------------------------------------------------
def test_models_take_turns() -> None:
    models = {name: create("test_vit", name, img_size=32, num_classes=3) for name in ("static", "avit")}
    models["avit"].train()
    contenders = {f"{n} {layout}": (m, layout) for n, m in models.items() for layout in ("masked", "auto")}
    done: list[int] = []
    times = interleaved(contenders, torch.randn(2, 3, 32, 32), 3, progress=done.append)
    assert done == [1, 2, 3]
    assert all(len(t.seconds) == 3 and min(t.seconds) > 0 and t.batch == 2 for t in times.values())
    assert times["avit masked"].layout == "masked" != times["avit auto"].layout
    assert times["static auto"].speed(times["static auto"]) == 1
    assert (models["static"].training, models["avit"].training) == (False, True)


def test_the_front_is_what_no_other_beats() -> None:
    top1, cost = (70, 72, 71, 75, 75), (1.0, 2.0, 3.0, 4.0, 5.0)
    points = [Point(str(i), "aht", a, a - 1, a + 1, c, 1 / c) for i, (a, c) in enumerate(zip(top1, cost, strict=True))]
    assert front(points, cost, cheap=True) == [0, 1, 3]
    assert front(points, [1 / c for c in cost], cheap=False) == [3, 1, 0]


def test_hollow_points_have_no_filling_and_a_dashed_line() -> None:
    points = [Point(f"{h}{c}", "evit", 70.0 + c, 69.0, 75.0, c, curve=str(h), hollow=h) for h in (0, 1) for c in (1, 2)]
    axes = drawn(points).axes[0]
    filled = [tuple(dot.get_facecolor()[0]) != (1, 1, 1, 1) for dot in axes.collections]
    assert filled == [True, True, False, False]
    joined = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_xdata()[0] != line.get_xdata()[1]]
    assert {line.get_linestyle() for line in joined} >= {"-", "--"}


@pytest.mark.parametrize("count", [1, 2, 25])
def test_the_plot_takes_any_number_of_methods(tmp_path: Path, count: int) -> None:
    def point(i: int) -> Point:
        seeds = ((1.0, 70.0), (1.1, 71.0)) if i == 1 else ()
        return Point(
            f"own{i}:$a_{i}$", f"own{i % 9}", 70 + i % 4, 69, 75, 1 + i % 5 / 10, 100.0 if i % 2 else 90.0, seeds
        )

    (tmp_path / "a.png").write_bytes(pareto([point(i) for i in range(count)]))
    (tmp_path / "b.png").write_bytes(pareto([replace(point(i), speed=None) for i in range(count)]))
    with Image.open(tmp_path / "a.png") as both, Image.open(tmp_path / "b.png") as one:
        assert both.width == 2 * one.width
    with pytest.raises(UserError, match="at least one"):
        pareto([])


def made_up(count: int) -> list[dict[str, str]]:
    """Rows of `static` and of four policies with long names; every sixth far below the rest."""
    rows = [dict.fromkeys(COLUMNS, "") | {"method": "static", "policy": "static", "top1": "71", "gmacs": "1.25"}]
    for i in range(count - 1):
        policy, top1 = ("tome", "evit", "fold", "amod")[i % 4], 24.21 + i if i % 6 == 5 else 71 - i % 7 / 2
        settings = "+".join(["12", "13"] * 6) if i == 4 else str(i)
        row = {"method": f"{policy}:r={settings},inflection=0.5", "policy": policy, "top1": str(top1)}
        row |= {"gmacs": f"{0.6 + i / 50}", "difference": f"{top1 - 71}", "difference_ci95": "0.8"}
        rows.append(dict.fromkeys(COLUMNS, "") | row | {"compared_to": "static"})
    for i, row in enumerate(rows):
        row |= {"seed": "0", "status": "ok", "images": "2000", "gmacs_share": "0.5", "mean_depth": "6", "timed": "now"}
        row |= {"images_per_second_compact": str(21721.7 - 400 * (i % 9)), "speed_compact": "0.5"}
    return rows


@pytest.mark.parametrize("count", [3, 8, 13, 30])
def test_labels_never_overlap(count: int) -> None:
    points = table.points(made_up(count))
    figure = drawn(points)
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        far = [t for t in axes.texts if t.get_gid() == "far"]
        named = [t for t in axes.texts if t.get_gid() == "label"]
        assert len(far) == len(below_axis(points, 71)) == (count - 1) // 6
        assert "static" in [t.get_text() for t in named]
        boxes = [t.get_window_extent(renderer) for t in far + named]
        assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
        assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 for box in boxes)
        if count > 10:
            assert all(len(t.get_text()) < 12 for t in named)
    assert 1500 < figure.bbox.width < 1700


def test_points_far_below_do_not_press_the_others_together() -> None:
    points = table.points(made_up(13))
    assert below_axis(points, 71) == {6, 12}
    assert below_axis(points, None) == set()
    axes = drawn(points).axes[0]
    low, high = axes.get_ylim()
    assert 60 < low < 68
    assert 71 < high < 75
    assert [t.get_text() for t in axes.texts if t.get_gid() == "far"] == ["29.2 %", "35.2 %"]
    assert below_axis(points[5:7] + points[12:], 71) == set()
    assert drawn(points[5:7]).axes[0].get_ylim()[0] < 29.21
    assert drawn(points[:5] + points[6:7] * 40).axes[0].get_ylim()[0] < low
    # bars are those of the paired difference, and static has none
    assert [round(p.high - p.low, 6) for p in points] == [0.0] + [1.6] * 12
    assert any("paired difference from static" in t.get_text() for t in axes.texts)
    alone = table.points(made_up(1))
    assert alone[0].high > alone[0].low
    assert any("interval of top-1" in t.get_text() for t in drawn(alone).axes[0].texts)


def test_short_labels_are_what_differs_within_a_policy() -> None:
    long = "tome:r=" + "+".join(["12", "13"] * 6)
    few = dict.fromkeys(("tome:r=10,a=1", long, "tome:r=8+8+8+8"), "tome") | {"aht": "aht", "aht:balanced": "aht"}
    assert list(table.labels(few).values()) == [
        "tome:r=10,a=1",
        "tome:r=12…13",
        "tome:r=8",
        "aht",
        "aht:balanced",
    ]
    many = few | {f"evit:keep=0.{i},fuse=false": "evit" for i in range(1, 8)} | {"static, trained on": "static"}
    found = list(table.labels(many).values())
    assert found == ["r=10, a=1", "r=12…13", "r=8", "aht", "balanced"] + [f"keep=0.{i}" for i in range(1, 8)] + [
        "static, trained on"
    ]
    curves = table.curves_of(many)
    assert curves[long] == curves["tome:r=8+8+8+8"] != curves["tome:r=10,a=1"]
    assert curves["aht"] == curves["aht:balanced"]
    assert table.shortened("x" * 30 + "y" * 30, 21) == "x" * 10 + "…" + "y" * 10


def test_the_table_fits_and_numbers_stay_whole() -> None:
    rows = made_up(30) + [row | {"seed": "1"} for row in made_up(3)]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table.screen(rows))
    printed = console.export_text()
    assert len(printed.strip().splitlines()) == 4 + len(rows)  # title, blank, head, rule
    assert "21,722" in printed
    assert "tome:r=12…13,inflection=0.5" in printed
    assert "12+13+12+13+12+13+12+13+12+13+12+13" in compare.markdown(rows, CompareConfig("d", methods=("avit",)))


def test_intervals_hold_at_the_ends() -> None:
    for top1, images in ((0.0, 50), (100.0, 50), (96.0, 1440)):
        low, high = table.interval(top1, images)
        assert -1e-9 <= low <= top1 + 1e-9
        assert top1 - 1e-9 <= high <= 100 + 1e-9
        assert high > low
