"""Comparing methods: what a method means, one recipe for all, rows that survive an interruption, table and plot."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from test_data import refused, run

import adaptivit
from adaptivit import compare, compare_table, data, digits, policies
from adaptivit.bench_config import CompareConfig
from adaptivit.compare_plan import plan, report_images
from adaptivit.compare_results import COLUMNS, TRAINED_ON, Results
from adaptivit.config import LOSSES, TrainConfig
from adaptivit.digits import Digits
from adaptivit.errors import UserError
from adaptivit.evaluate import Result, evaluate, paired_difference
from adaptivit.factory import create, load
from adaptivit.methods import full_spec, parse_method, slug
from adaptivit.pareto import Point, below_axis, drawn, front, pareto
from adaptivit.recipes import DEFAULTS, get
from adaptivit.timing import interleaved

SHARED = TrainConfig(data="d", policy="static", epochs=3, lr=5e-4, distill=0.5, augment="flip", seed=4)
TINY = ("--backbone", "test_vit", "--img-size", 32, "--batch-size", 8, "--device", "cpu", "--augment", "none")


# -- what a method means --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "policy", "losses"),
    [
        ("static", "static", {}),
        ("aht", "aht:straight_through=true", {"budget": 10.0, "target_depth": 0.1}),
        ("aht:balanced", "aht", {"ponder": 5e-2, "target_depth": 0.5}),
        ("aht:aht-balanced", "aht", {"ponder": 5e-2, "target_depth": 0.5}),
        ("aht:budget,straight_through=false", "aht:straight_through=false", {"budget": 10.0, "target_depth": 0.1}),
        ("aht:balanced,stages=3+6,ponder=0.2", "aht:stages=3+6", {"ponder": 0.2, "target_depth": 0.5}),
        ("aht:high-accuracy, mass = hazard", "aht", {"ponder": 1e-3, "target_depth": 1.0, "mass": "hazard"}),
        ("avit:paper", "avit:gate_scale=5,gate_center=10", {"ponder": 5e-4, "prior": 0.1}),
        ("avit:tiny", "avit:gate_scale=10,gate_center=30", {"ponder": 5e-4, "prior": 1e-3, "prior_form": "reference"}),
    ],
)
def test_a_method_changes_the_policy_and_its_losses_alone(spec: str, policy: str, losses: dict[str, Any]) -> None:
    made = parse_method(spec, SHARED)
    plain = TrainConfig(data="")
    assert made.policy == policy
    assert {k: getattr(made, k) for k in LOSSES} == {k: getattr(plain, k) for k in LOSSES} | losses
    assert replace(made, policy="static", **{k: getattr(SHARED, k) for k in LOSSES}) == SHARED


def test_a_policy_without_a_recipe_takes_its_default_ones_losses() -> None:
    for policy, name in DEFAULTS.items():
        if policy in policies.names():
            made = parse_method(policy, SHARED)
            assert {k: getattr(made, k) for k in LOSSES} == {k: getattr(get(name), k) for k in LOSSES}
            assert made.distill == SHARED.distill


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("ahtt", "'aht'"),
        ("aht:balancd", "'balanced'"),
        ("aht:avit-paper", "recipe of method 'aht'"),
        ("aht:treshold=1", "'threshold'"),
        ("aht:lr=1", "setting or loss"),
        ("aht:balanced,budget", "at most one recipe"),
        ("aht:ponder=much", "expected a number"),
        ("aht:ponder=-1", "at least 0"),
        ("aht:mass=sum", "crossing"),
        ("aht:threshold=-1", "threshold"),
        ("replay", "one batch"),
    ],
)
def test_mistakes_in_a_method_are_explained(spec: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_method(spec, SHARED)
    with pytest.raises(UserError, match=said):
        CompareConfig(data="digits", methods=("avit", spec))


@pytest.mark.parametrize("spec", ["aht", "aht:balanced", "aht:beta=-3.0,budget_share=0.5", "avit:small", "static"])
def test_a_method_written_out_is_the_same_method(spec: str) -> None:
    made = parse_method(spec, SHARED)
    again = parse_method(full_spec(made), SHARED)
    assert replace(again, policy=made.policy) == made
    assert full_spec(again) == full_spec(made)
    assert ("beta=-3.0" in again.policy) == ("beta" in spec)


def test_names_of_runs_are_unique_and_plain() -> None:
    specs = ["aht", "aht:balanced", "aht-balanced", "aht:a=1,b=2", "aht:a=1;b=2", "../x", "static, trained on", "AHT"]
    names = [slug(s, seed).lower() for s in specs for seed in (0, 1)]
    assert len(set(names)) == len(names)
    assert all(set(n) <= set("abcdefghijklmnopqrstuvwxyz0123456789.=+-") and not n.startswith(".") for n in names)


# -- what is run ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 + 8 + 24 pictures of 32 px, the classes told apart by their colour."""
    draw, arrays = np.random.default_rng(0), {}
    for split, count in (("train", 16), ("val", 8), ("test", 24)):
        x, y = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), np.arange(count) % 3
        x[np.arange(count), ..., y] |= 128
        arrays |= {f"{split}_x": x, f"{split}_y": y}
    path = tmp_path_factory.mktemp("small") / "small.npz"
    np.savez(path, **arrays)
    return path


def rows_of(out: Path) -> dict[tuple[str, int], dict[str, str]]:
    with (out / "results.csv").open(newline="") as file:
        return {(row["method"], int(row["seed"])): row for row in csv.DictReader(file)}


def files_of(out: Path) -> set[str]:
    return {path.name for path in out.iterdir()}


def test_training_one_recipe_for_all_and_a_second_call_runs_nothing_again(
    tmp_path: Path, small: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = ("compare", "--data", small, "--out", out, *TINY, "--epochs", 1, "--timing-batch", 4)
    methods = ("--methods", "avit", "aht:balanced", "aht:stages=99")
    assert run(*words, *methods, "--timing-repeats", 2) == 0
    said = capsys.readouterr().out
    assert "aht:balanced" in said
    assert "wrote" in said
    rows = rows_of(out)
    assert list(rows) == [("static", 0), ("avit", 0), ("aht:balanced", 0), ("aht:stages=99", 0)]
    assert all(tuple(row) == COLUMNS for row in rows.values())
    failed = rows["aht:stages=99", 0]
    assert (failed["status"], failed["top1"]) == ("failed", "")
    assert "stages" in failed["reason"]
    static = load(out / "runs" / slug("static", 0) / "model")
    for (method, seed), row in rows.items():
        if method == "aht:stages=99":
            continue
        assert row["status"] == "ok"
        model = load(out / "runs" / slug(method, seed) / "model")
        assert row["policy"] == model.policy_name
        results = [_tested(m, small) for m in (model, static)]
        assert float(row["top1"]) == pytest.approx(results[0].top1, abs=1e-4)
        assert float(row["gmacs"]) == pytest.approx(results[0].gmacs, rel=1e-5)
        assert row["live"] == " ".join(f"{n:.2f}" for n in results[0].live)
        if method != "static":
            difference, half, _ = paired_difference(*results)
            assert float(row["difference"]) == pytest.approx(difference, abs=1e-4)
            assert float(row["difference_ci95"]) == pytest.approx(half, abs=1e-4)
        assert float(row["images_per_second_masked"]) > 0
        assert row["compact_layout"] not in ("", "masked")
        assert float(row["speed_masked"]) > 0
        assert (float(row["speed_compact"]) == 1) or method != "static"
    assert len({row["timed"] for row in rows.values() if row["status"] == "ok"}) == 1
    assert {"results.csv", "results.md", "pareto.png", "compare.json", "correct", "runs"} <= files_of(out)
    with Image.open(out / "pareto.png") as picture:
        assert picture.width > picture.height > 300
    text = (out / "results.md").read_text()
    assert "24 images" in text
    assert "± " in text
    assert "--methods avit aht:balanced" in text
    assert adaptivit.__version__ in text
    for name in ("lr", "augment", "batch_size", "epochs", "seed"):
        assert len({getattr(entry.training, name) for entry in plan(_config(small, out))}) == 1

    # again: finished rows stay, the failed one is tried again, another method is added
    def fit(config: TrainConfig, show: bool = True) -> Result:
        raise RuntimeError("out of memory\nand more") if "stages" not in config.policy else UserError("no such stage")

    monkeypatch.setattr(compare, "fit", fit)
    before = {key: row for key, row in rows.items() if row["status"] == "ok"}
    assert run(*words, *methods, "aht", "--timing-repeats", 0) == 0
    assert capsys.readouterr().err.count("not run again") == 3
    rows = rows_of(out)
    assert {key: row for key, row in rows.items() if row["status"] == "ok"} == before
    assert rows["aht:stages=99", 0]["reason"] == "no such stage"
    assert rows["aht", 0]["reason"] == "RuntimeError: out of memory"
    assert "more" in (out / "errors" / f"{slug('aht', 0)}.txt").read_text()
    # another recipe does not mix with these rows
    line = refused(capsys, *words, *methods, "--lr", 0.5, "--timing-repeats", 0)
    assert "lr (was 0.0001, now 0.5)" in line
    assert rows_of(out) == rows
    # a row without its images is run again
    (out / "correct" / f"{slug('static', 0)}.npz").write_bytes(b"damaged")
    run(*words, "--methods", "static", "--timing-repeats", 0)
    assert rows_of(out)["static", 0]["status"] == "failed"


def _config(small: Path, out: Path, **given: Any) -> CompareConfig:
    values = {"data": str(small), "out": str(out), "methods": ("avit",), "backbone": "test_vit", "img_size": 32}
    return CompareConfig(**values | {"batch_size": 8, "epochs": 1, "timing_repeats": 0, "device": "cpu"} | given)


def _tested(model: adaptivit.AdaptiveViT, small: Path) -> Result:
    labelled = data.for_evaluation(small, "test").for_model(model.vit.num_classes, model.class_names)
    images = data.Images(labelled, model.preprocessing.evaluation())
    return evaluate(model, data.batches(images, data.in_order(len(images), 8)))


def test_without_training_and_with_several_seeds(tmp_path: Path, small: Path) -> None:
    config = _config(small, tmp_path / "out", epochs=0, seeds=(0, 3), limit=12, methods=("aht", "static", "avit"))
    compare.run(replace(config, timing_repeats=1, timing_batch=2))
    rows = rows_of(tmp_path / "out")
    assert {(m, s) for m in ("static", "aht", "avit") for s in (0, 3)} == set(rows)
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {row["images"] for row in rows.values()} == {"12"}
    assert {row["epochs"] for row in rows.values()} == {"0"}
    assert {row["seconds_training"] for row in rows.values()} == {""}
    assert not (tmp_path / "out" / "runs").exists()
    text = (tmp_path / "out" / "results.md").read_text()
    assert "Mean over the seeds" in text
    points = compare_table.points(list(rows.values()))
    assert [len(p.seeds) for p in points] == [2, 2, 2]
    again = compare.run(config)
    assert {(row["method"], int(row["seed"])): row for row in again} == rows


def test_going_on_from_the_static_model(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(small, tmp_path / "out", start="static", distill=1.0, methods=("avit",))
    seen: list[TrainConfig] = []

    def fit(training: TrainConfig, show: bool = True) -> None:
        seen.append(training)
        torch.manual_seed(len(seen))
        policy = training.policy.partition(":")[0]
        model = create("test_vit", policy, weights=training.weights, num_classes=3, img_size=32)
        model.class_names = ["0", "1", "2"]
        model.save_pretrained(Path(training.out) / "model")

    monkeypatch.setattr(compare, "fit", fit)
    rows = {row["method"]: row for row in compare.run(config)}
    assert list(rows) == ["static", TRAINED_ON, "avit"]
    assert [c.distill for c in seen] == [0.0, 1.0, 1.0]
    model = str(Path(seen[0].out) / "model")
    assert [(c.weights, c.teacher) for c in seen] == [(None, None), (model, model), (model, model)]
    assert [row["epochs"] for row in rows.values()] == ["1", "2", "2"]
    assert [row["compared_to"] for row in rows.values()] == [TRAINED_ON, "", TRAINED_ON]
    with pytest.raises(UserError, match="epochs"):
        replace(config, epochs=0)


def test_an_interrupted_comparison_goes_on(
    tmp_path: Path, small: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("compare", "--data", small, "--out", tmp_path / "out", *TINY, "--epochs", 0, "--timing-repeats", 0)
    real = compare.evaluate
    calls: list[str] = []

    def second_never_ends(model: adaptivit.AdaptiveViT, *given: Any, **more: Any) -> Result:
        calls.append(model.policy_name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(model, *given, **more)

    monkeypatch.setattr(compare, "evaluate", second_never_ends)
    assert run(*words, "--methods", "avit", "aht") == 130
    assert "goes on" in capsys.readouterr().err
    assert [row["status"] for row in rows_of(tmp_path / "out").values()] == ["ok"]
    assert run(*words, "--methods", "avit", "aht") == 0
    assert calls == ["static", "avit", "avit", "aht"]


def test_when_everything_fails_the_command_says_so(tmp_path: Path, small: Path, capsys: Any) -> None:
    words = ("compare", "--data", small, "--out", tmp_path / "out", *TINY, "--epochs", 0, "--methods", "avit")
    assert run(*words, "--weights", tmp_path / "none.safetensors") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "Every method failed" in line
    assert "not found" in line
    assert {row["status"] for row in rows_of(tmp_path / "out").values()} == {"failed"}
    assert "pareto.png" not in files_of(tmp_path / "out")
    assert "not found" in refused(capsys, "compare", "--data", tmp_path / "nowhere", "--methods", "avit")


def test_images_of_the_report_were_not_trained_on(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=draw.integers(0, 255, (20, 8, 8, 3), dtype=np.uint8), y=np.arange(20) % 2)
    config = CompareConfig(data=str(tmp_path / "a.npz"), methods=("avit",), val_split=0.25)
    train, _ = data.for_training(config.data, 0.25, 5)
    held = report_images(config, 5)
    assert len(held) == 5
    assert not {i.tobytes() for i in held.items} & {i.tobytes() for i in train.items}
    assert len(report_images(replace(config, epochs=0), 5)) == 20
    with pytest.raises(UserError, match="test"):
        report_images(replace(config, split="test"), 5)


def test_another_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="something else"):
        Results(CompareConfig(data="digits", methods=("avit",), out=str(tmp_path)))
    assert files_of(tmp_path) == {"config.json"}


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
    points = compare_table.points(made_up(count))
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
    points = compare_table.points(made_up(13))
    assert below_axis(points, 71) == {6, 12}
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
    alone = compare_table.points(made_up(1))
    assert alone[0].high > alone[0].low
    assert any("interval of top-1" in t.get_text() for t in drawn(alone).axes[0].texts)


def test_short_labels_are_what_differs_within_a_policy() -> None:
    long = "tome:r=" + "+".join(["12", "13"] * 6)
    few = dict.fromkeys(("tome:r=10,a=1", long, "tome:r=8+8+8+8"), "tome") | {"aht": "aht", "aht:balanced": "aht"}
    assert list(compare_table.labels(few).values()) == [
        "tome:r=10,a=1",
        "tome:r=12…13",
        "tome:r=8",
        "aht",
        "aht:balanced",
    ]
    many = few | {f"evit:keep=0.{i},fuse=false": "evit" for i in range(1, 8)} | {"static, trained on": "static"}
    found = list(compare_table.labels(many).values())
    assert found == ["r=10, a=1", "r=12…13", "r=8", "aht", "balanced"] + [f"keep=0.{i}" for i in range(1, 8)] + [
        "static, trained on"
    ]
    curves = compare_table.curves_of(many)
    assert curves[long] == curves["tome:r=8+8+8+8"] != curves["tome:r=10,a=1"]
    assert curves["aht"] == curves["aht:balanced"]
    assert compare_table.shortened("x" * 30 + "y" * 30, 21) == "x" * 10 + "…" + "y" * 10


def test_the_table_fits_and_numbers_stay_whole() -> None:
    rows = made_up(30) + [row | {"seed": "1"} for row in made_up(3)]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(compare_table.screen(rows))
    said = console.export_text()
    assert len(said.strip().splitlines()) == 4 + len(rows)  # title, blank, head, rule
    assert "21,722" in said
    assert "tome:r=12…13,inflection=0.5" in said
    assert "12+13+12+13+12+13+12+13+12+13+12+13" in compare_table.markdown(rows, CompareConfig("d", methods=("avit",)))


def test_intervals_hold_at_the_ends() -> None:
    for top1, images in ((0.0, 50), (100.0, 50), (96.0, 1440)):
        low, high = compare_table.interval(top1, images)
        assert -1e-9 <= low <= top1 + 1e-9
        assert top1 - 1e-9 <= high <= 100 + 1e-9
        assert high > low


# -- the embedded data and backbone ---------------------------------------------------------------------------------
def test_digits_without_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = data.splits("digits")
    assert [(name, len(part)) for name, part in found.items()] == [("train", 7764), ("val", 572), ("test", 1440)]
    model = create("digits_vit", "static")
    images = data.Images(found["test"], model.preprocessing.evaluation())
    quick = torch.cat([b.images for b in Digits.load().testing()])
    chosen = range(0, 1440, 97)
    seen = torch.stack([x for x in (images[i].image for i in chosen) if x is not None])
    assert float((seen - quick[list(chosen)]).abs().max()) * digits.STD <= 0.51 / 255
    assert found["test"].labels == torch.cat([b.labels for b in Digits.load().testing()]).tolist()
    (tmp_path / "digits").mkdir()
    with pytest.raises(UserError, match="no class folders"):
        data.splits("digits")


def test_digits_held_out_are_other_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "_placed", lambda x, places, seed, distort: x[:, None].expand(-1, 3, -1, -1).clone())
    drawn = digits.splits.__wrapped__()
    kinds = [{item.tobytes() for item in drawn[name].items} for name in ("train", "val", "test")]
    assert not kinds[0] & kinds[1] | kinds[0] & kinds[2] | kinds[1] & kinds[2]


def test_the_backbone_of_the_quickstart_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = create("digits_vit", "avit")
    assert 0.15 < float(model.vit.pos_embed.detach().std()) < 0.25
    made = model.preprocessing
    assert (made.mean, made.std, made.crop_pct, made.interpolation) == ((0.2,) * 3, (0.25,) * 3, 1.0, "bilinear")
    model.save_pretrained(tmp_path / "m")
    images = torch.randn(2, 3, 64, 64)
    for again in (load(tmp_path / "m"), create("digits_vit", "avit", weights=tmp_path / "m")):
        assert again.backbone_name == "digits_vit"
        assert again.preprocessing == made
        torch.testing.assert_close(again(images).logits, model(images).logits)
    assert create("digits_vit", "static", num_classes=7, img_size=32).vit.num_classes == 7
    with pytest.raises(UserError, match="download"):
        create("digits_vit", "static", weights=True)


# -- the command line -----------------------------------------------------------------------------------------------
def test_help_without_torch() -> None:
    code = (
        "import sys; from adaptivit.cli import main; main(['compare', '--help']); "
        "assert not {'torch', 'timm', 'matplotlib'} & set(sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for word in ("--methods", "--start", "--timing-repeats", "aht-balanced", "gate_scale"):
        assert word in said


def test_the_command_of_a_configuration() -> None:
    config = CompareConfig(data="my data", methods=("aht:balanced", "avit"), seeds=(0, 1), epochs=0)
    expected = "adaptivit compare --data 'my data' --methods aht:balanced avit --epochs 0 --seeds 0 1"
    assert config.command() == expected
    assert config.fingerprint() == replace(config, methods=("avit",), out="x", timing_repeats=0).fingerprint()
    assert config.fingerprint() != replace(config, lr=1.0).fingerprint()
