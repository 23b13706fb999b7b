"""What is shown is what was done: depths, scores, groups, pictures, importance, and the report in a browser."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import adaptivit
from adaptivit import visualize
from adaptivit.data.dataset import Labelled
from adaptivit.decision import AppliedDecision, Drop, Merge, Trace
from adaptivit.errors import DataError, UserError
from adaptivit.model import AdaptiveViT
from adaptivit.visualize import charts, collect, report_folder, statistics
from adaptivit.visualize import pictures as paint
from adaptivit.visualize.report_page import ReportData, report_page
from tests.support.commands import refused, run
from tests.support.data_sets import folder
from tests.support.models import pictures, tiny
from tests.support.traces import random_trace

RANKING: dict[str, dict[str, Any]] = {
    "mod": {},
    "amod": {},
    "dynamicvit": {},
    "spvit": {"select": "count"},
    "evit": {"keep": 0.6},
    "fold": {"keep": 0.7},
    "patch_slimming": {"counts": (14, 9, 9, 5, 2)},
    "tome": {"r": 2},
}
HALTING: dict[str, dict[str, Any]] = {
    "aht": {"gamma": 3.0, "beta": -1.0},
    "avit": {"gate_center": 1.0},
    "pondernet": {"unit": "token"},
}
WHOLE: dict[str, dict[str, Any]] = {"act": {"bias": -1.0}, "confidence": {"threshold": 0.5}}
EVERY = RANKING | HALTING | WHOLE


def made(policy: str, kind: str = "class", **more: Any) -> AdaptiveViT:
    model: AdaptiveViT = tiny(policy, kind, **(EVERY[policy] | more))
    return model


def seen_of(policy: str, batch: int = 4, **more: Any) -> visualize.Seen:
    return visualize.look(made(policy, **more), pictures(batch))


# -- what is collected ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", EVERY)
@torch.inference_mode()
def test_look_keeps_what_the_pass_did(policy: str) -> None:
    model, images = made(policy), pictures(5)
    seen, out = visualize.look(model, images, batch_size=2), model(images)
    assert (seen.depth == out.trace.depth[:, 1:].numpy()).all()
    assert (seen.attended == out.trace.attended[..., 1:].numpy()).all()
    assert (seen.live == out.trace.live.numpy()).all()
    assert seen.predicted.tolist() == out.logits.argmax(-1).tolist()
    np.testing.assert_allclose(seen.confidence, out.logits.softmax(-1).amax(-1).numpy(), rtol=1e-5)
    np.testing.assert_allclose(seen.macs, out.macs_deployed.numpy())
    assert seen.grid == (4, 4)
    assert seen.labels is None
    assert seen.correct is None


@pytest.mark.parametrize("policy", RANKING)
@torch.inference_mode()
def test_ranked_patches_with_the_best_scores_stay(policy: str) -> None:
    # without the fused patch of EViT, which sits in the seat of one that leaves
    seen = seen_of(policy, **({"fuse": False} if policy == "evit" else {}))
    assert seen.scores is not None
    assert not seen.scores.stops
    assert len(seen.scores.blocks) >= 2
    for block, values in zip(seen.scores.blocks, seen.scores.values, strict=True):
        for b in range(len(seen)):
            ranked, enters = np.isfinite(values[b]), seen.attended[block, b]
            assert ranked.any()
            stays, goes = values[b][ranked & enters], values[b][ranked & ~enters]
            assert len(goes)
            if len(stays):
                assert stays.min() >= goes.max()


@torch.inference_mode()
def test_asking_for_scores_changes_nothing_else() -> None:
    for policy in RANKING:
        torch.manual_seed(0)
        model, images = made(policy), pictures()
        plain, asked = model(images), model(images, aux=("keep_scores",))
        assert "keep_scores" not in plain.trace.facts
        assert torch.equal(plain.logits, asked.logits)
        assert torch.equal(plain.macs, asked.macs)


@pytest.mark.parametrize("policy", HALTING)
def test_halting_scores_stand_where_patches_were_live(policy: str) -> None:
    seen = seen_of(policy)
    assert seen.scores is not None
    assert seen.scores.stops
    assert seen.scores.blocks == list(range(1, 6))
    assert (np.isfinite(seen.scores.values) == seen.attended[:-1]).all()


@torch.inference_mode()
def test_plans_are_those_of_the_pass() -> None:
    model, images = made("aht"), pictures(3)
    seen, facts = visualize.look(model, images), model(images, aux=("plan",)).trace.facts
    assert seen.plans is not None
    assert seen.plans.stages == facts["stages"].tolist()
    assert (seen.plans.values == facts["plan"][..., 1:].numpy()).all()
    assert (seen.plans.halt == facts["halt"][..., 1:].numpy()).all()


@pytest.mark.parametrize("policy", ["fold", "tome", "evit"])
@torch.inference_mode()
def test_groups_are_the_tokens_that_are_left(policy: str) -> None:
    model, images = made(policy), pictures(3)
    seen, out = visualize.look(model, images), model(images)
    assert seen.groups is not None
    for layer in range(6):
        for b in range(3):
            alive = np.flatnonzero(out.trace.updated[layer, b, 1:].numpy())
            assert np.unique(seen.groups[layer, b]).tolist() == alive.tolist()
            assert (seen.groups[layer, b][alive] == alive).all()


@pytest.mark.parametrize("seed", range(4))
def test_groups_against_a_literal_loop(seed: int) -> None:
    kinds = ["merge", "drop", "none", "keep", "merge_nowhere", "drop", "merge", "share", "none"]
    trace = random_trace(kinds, seed)
    found = collect.merged(trace)
    assert found is not None
    for b in range(3):
        home = dict(enumerate(range(17)))
        for layer in range(3):
            for step in (s.decision for s in trace.steps if s.layer == layer):
                for i, at in home.items():
                    if at >= 0 and isinstance(step, Merge):
                        home[i] = int(step.target[b, at])
                    elif at >= 0 and isinstance(step, Drop) and bool(step.leaving[b, at]):
                        home[i] = -1
            assert found[layer, b].tolist() == list(home.values())


def test_a_policy_that_never_merges_has_no_groups() -> None:
    assert seen_of("aht").groups is None
    assert paint.views(seen_of("amod")) == ["tokens"]


def test_images_come_as_paths_folders_pictures_or_tensors(tmp_path: Path) -> None:
    model = made("fold")
    folder(tmp_path / "a", ("x", "y"), each=2)
    files = sorted((tmp_path / "a").rglob("*.png"))
    shots = [Image.open(f).convert("RGB") for f in files]
    tensor = torch.stack([model.preprocessing.evaluation()(s) for s in shots])
    looks = [visualize.look(model, i) for i in (files, str(tmp_path / "a"), shots, tensor)]
    assert all((s.depth == looks[0].depth).all() and len(s) == 4 for s in looks)
    for s in looks:
        assert (s.pixels(1) == np.asarray(shots[1])).all()
    assert looks[0].titles == ["x/00", "x/01", "y/00", "y/01"]
    assert looks[2].titles[0] == "image 1"


# -- pictures -------------------------------------------------------------------------------------------------------
def test_an_overlay_covers_just_those_that_are_not_computed() -> None:
    for policy in ("aht", "amod", "dynamicvit"):
        seen = seen_of(policy)
        for layer in range(6):
            cells = paint.overlay(seen, 1, layer)
            assert cells.shape == (4 * paint.CELL, 4 * paint.CELL, 4)
            covered = cells[paint.CELL // 2 :: paint.CELL, paint.CELL // 2 :: paint.CELL, 3] > 0
            assert (covered.ravel() == ~seen.attended[layer, 1]).all()


def test_a_halted_patch_has_the_colour_of_its_depth() -> None:
    seen = seen_of("aht")
    colours = paint.overlay(seen, 0, 5)[:: paint.CELL, :: paint.CELL].reshape(-1, 4)
    gone = ~seen.attended[5, 0]
    assert len(set(seen.depth[0][gone])) > 1
    assert (colours[gone][:, :3] == paint.shades(seen.depth[0][gone], 6, paint.DIM)).all()


def test_a_merged_region_has_its_mean_colour() -> None:
    seen = seen_of("fold", keep=0.5)
    assert seen.groups is not None
    group = seen.groups[5, 0]
    means = np.asarray(seen.pixels(0), dtype=float).reshape(4, 8, 4, 8, 3).mean((1, 3)).reshape(16, 3)
    middle = paint.CELL // 2 - 1
    cells = paint.overlay(seen, 0, 5, "groups")[middle :: paint.CELL, middle :: paint.CELL].reshape(16, 4)
    for number in np.unique(group):
        members = group == number
        if members.sum() == 1:
            assert (cells[members][:, 3] == 0).all()
        else:
            assert (cells[members][:, 3] == 255).all()
            assert np.abs(cells[members][:, :3] - means[members].mean(0)).max() <= 1.5


def test_the_animation_has_a_frame_for_every_block() -> None:
    seen = seen_of("aht")
    with Image.open(io.BytesIO(paint.animation(seen, 0, width=96))) as gif:
        assert gif.format == "GIF"
        assert gif.n_frames == 6  # type: ignore[attr-defined]
        frames = []
        for i in range(6):
            gif.seek(i)
            frames.append(np.asarray(gif.convert("RGB")))
    assert all((a != b).any() for a, b in itertools.pairwise(frames))


def test_strips_and_sheets_grow_with_what_they_show() -> None:
    routed = seen_of("amod")
    assert paint.changing(routed) == [i for i in range(6) if not routed.attended[i].all()]
    one, two = (paint.strip(routed, 0, layers=range(n)).width for n in (2, 3))
    assert two - one == paint.TILE + 14
    seen = seen_of("aht")
    assert paint.maps(seen, [0, 1, 2]).height < paint.maps(seen, [0, 1, 2, 3]).height
    assert paint.plan_sheet(seen, [0]).height < paint.plan_sheet(seen, [0, 1]).height


def test_easy_and_hard_are_the_extremes_and_right() -> None:
    seen = seen_of("aht", 12)
    easy, hard = paint.extremes(seen, 3)
    assert seen.mean_depth[easy].max() <= np.sort(seen.mean_depth)[3]
    assert seen.mean_depth[hard].min() >= np.sort(seen.mean_depth)[-4]
    labelled = visualize.look(made("aht"), pictures(12), labels=[*seen.predicted[:6].tolist(), *[99] * 6])
    assert set(itertools.chain(*paint.extremes(labelled))) <= set(range(6))


def test_pictures_refuse_what_is_not_there() -> None:
    seen, equal = seen_of("aht"), seen_of("fold")
    for broken, words in (
        (lambda: paint.overlay(seen, 0, 0, "groups"), "view: aht has tokens, plan, not 'groups'"),
        (lambda: paint.overlay(seen, 0, 6), "layer: expected 0..5, got 6"),
        (lambda: paint.plan_sheet(equal, [0]), "fold plans no depths"),
        (lambda: paint.easy_and_hard(equal), "equally deep"),
        (lambda: paint.maps(seen, []), "at least one image"),
        (lambda: charts.planned(equal, 0), "plans no depths"),
        (lambda: charts.accuracy(seen), "needs labels"),
        (lambda: charts.scores(seen_of("confidence")), "no scores"),
        (lambda: visualize.by_class(seen), "labels are known"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            broken()


# -- charts and figures ---------------------------------------------------------------------------------------------
def test_charts_are_svg_in_the_colours_of_the_theme() -> None:
    seen = visualize.look(made("aht"), pictures(24), labels=list(range(10)) * 2 + [0] * 4)
    for name in ("live", "depths", "positions", "scores", "confidence", "accuracy"):
        text = charts.svg(getattr(charts, name)(seen), name)
        assert text.startswith("<svg")
        assert "var(--ink)" in text
        assert not re.search(r"#1c2024|font-family|http(?!://www\.w3\.org/)", text)
        ids = re.findall(r'id="([^"]+)"', text)
        assert all(i.startswith(f"{name}-") for i in ids)
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)


def test_shares_and_correlations() -> None:
    low, high = statistics.wilson(0.8, 10)
    assert low == pytest.approx(0.4902, abs=1e-4)
    assert high == pytest.approx(0.9433, abs=1e-4)
    x = np.array([1.0, 2.0, 2.0, 5.0, 9.0])
    assert statistics.correlations(x, x**3)[1] == pytest.approx(1)
    assert statistics.correlations(x, -x)[0] == pytest.approx(-1)
    assert np.isnan(statistics.correlations(x, np.ones(5))).all()
    assert statistics.ranks(x).tolist() == [1, 2.5, 2.5, 4, 5]
    mean, half = statistics.mean_and_half(np.array([[1.0, 3.0, np.nan], [np.nan] * 3]))
    assert mean[0] == 2
    assert half[0] == pytest.approx(1.96)
    assert np.isnan(mean[1])


def test_p_values_worked_by_hand() -> None:
    """The t distribution has a closed form for whole degrees of freedom: 1, 2 and 4 of them are 3, 4 and 6 pairs."""
    for r in (0.0, 0.01, -0.3, 0.5, 0.8, 0.999, 1.0):
        a = abs(r)
        assert statistics.p_value(r, 3) == pytest.approx(1 - 2 / np.pi * np.arcsin(a), abs=1e-12)
        assert statistics.p_value(r, 4) == pytest.approx(1 - a, abs=1e-12)
        assert statistics.p_value(r, 6) == pytest.approx(1 - 1.5 * a + 0.5 * a**3, abs=1e-12)
    assert statistics.p_value(1 - 1e-6, 6) == pytest.approx(1.4999995e-12, rel=1e-6, abs=0)  # (1 - r)^2 (1 + r / 2)
    assert np.isnan([statistics.p_value(np.nan, 9), statistics.p_value(0.5, 2)]).all()


def test_routes_of_two_models_one_below_the_other() -> None:
    images = pictures(2)
    both = [visualize.look(made(policy), images) for policy in ("mod", "amod")]
    one = visualize.strip(both[0], 1)
    assert visualize.routes(both, 1).width >= one.width
    assert visualize.routes(both, 1).height > 1.5 * one.height


def test_classes_gain_and_lose() -> None:
    model, images = made("aht"), pictures(6)
    truth = model(images).logits.argmax(-1).tolist()
    seen = visualize.look(model, images, labels=[truth[0], truth[1], 99, 99, truth[4], 7])
    static = visualize.look(tiny("static"), images, labels=list(seen.labels))
    rows = {r["class"]: r for r in visualize.by_class(seen, static)}
    assert sum(r["images"] for r in rows.values()) == 6
    for r in rows.values():
        number = int(r["class"].split()[1])
        own = seen.labels == number
        assert r["top-1 %"] == pytest.approx(100 * (seen.predicted[own] == number).mean())
        assert r["change"] == pytest.approx(r["top-1 %"] - 100 * (static.predicted[own] == number).mean())
        assert r["mean depth"] == pytest.approx(seen.mean_depth[own].mean())
    table = [
        {"class": c, "images": 1, "change": d, "mean depth": d} for c, d in zip("abcd", (0, 5, -5, 9), strict=True)
    ]
    gain, lose = visualize.gain_and_lose(table)
    assert [r["class"] for r in gain] == ["d", "b"]
    assert [r["class"] for r in lose] == ["c"]
    assert [[r["class"] for r in part] for part in visualize.shallow_and_deep(table, 1)] == [["c"], ["d"]]


# -- leave one out --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["amod", "aht", "fold"])
@pytest.mark.parametrize("kind", ["class", "registers"])
@torch.inference_mode()
def test_leave_one_out_is_the_replay_of_a_single_drop(policy: str, kind: str) -> None:
    """In the vanilla transformer: every other token goes through every block."""
    model, images, labels = made(policy, kind), pictures(2), [3, 4]
    seen = visualize.look(model, images, labels=labels)
    found = visualize.leave_one_out(model, seen, tokens=4, images=[1], seed=1)
    slots = 16 + seen.prefix
    whole = float(F.cross_entropy(tiny_logits(model, images[1:], None, slots), torch.tensor([4])))
    for s, block in enumerate(found.blocks):
        for patch, change in zip(found.chosen[s, 0], found.change[s, 0], strict=True):
            if patch >= 0:
                loss = F.cross_entropy(
                    tiny_logits(model, images[1:], (block, patch + seen.prefix), slots), torch.tensor([4])
                )
                assert change == pytest.approx(float(loss) - whole, abs=2e-5)
        picked = found.chosen[s, 0][found.chosen[s, 0] >= 0]
        sign = -1 if seen.scores.stops else 1
        assert np.isfinite(seen.scores.values[s, 1, picked]).all()
        expected = statistics.correlations(sign * seen.scores.values[s, 1, picked], found.change[s, 0, : len(picked)])
        np.testing.assert_equal((found.pearson[s, 0], found.spearman[s, 0]), expected)
        p = statistics.p_value(found.spearman[s, 0], len(picked))
        np.testing.assert_equal(found.p_values(found.spearman)[s, 0], p)


def tiny_logits(model: AdaptiveViT, image: torch.Tensor, gone: tuple[int, int] | None, slots: int) -> torch.Tensor:
    leaving = torch.zeros(1, slots, dtype=torch.bool)
    block, slot = gone or (1, 0)
    leaving[0, slot] = gone is not None
    step = (
        AppliedDecision(0, "before", Drop(leaving))
        if block == 0
        else AppliedDecision(block - 1, "after", Drop(leaving))
    )
    shape = torch.zeros(6, 1, slots, dtype=torch.bool)
    trace = Trace(shape, shape, model.shape.num_prefix_tokens, (step,))
    return AdaptiveViT(model.vit, "replay", {"trace": trace}).eval()(image).logits


def test_leave_one_out_says_what_it_cannot_do() -> None:
    model = made("confidence")
    with pytest.raises(UserError, match="no scores"):
        visualize.leave_one_out(model, visualize.look(model, pictures(1)))
    model = made("amod")
    with pytest.raises(UserError, match="at least 3 patches, got 2"):
        visualize.leave_one_out(model, visualize.look(model, pictures(1)), tokens=2)


# -- the report -----------------------------------------------------------------------------------------------------
class Reader(HTMLParser):
    """Collects what a page refers to, and pictures without words."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.silent = 0
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        self.sources += [str(named[k]) for k in ("src", "srcset", "data", "action") if k in named]
        self.sources += [str(named["href"])] if tag != "use" and "href" in named else []
        self.ids += [str(named["id"])] if "id" in named else []
        self.silent += tag == "img" and "alt" not in named
        self.silent += named.get("role") == "img" and not named.get("aria-label")


@pytest.fixture
def only_html(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without the files beside them, which other tests look at and which take the time."""
    monkeypatch.setattr(report_folder, "_pictures", lambda data: ())


def labelled(count: int = 24, classes: int = 4) -> Labelled:
    images = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return Labelled("set", images, [i % classes for i in range(count)], tuple("abcd"[:classes]))


def standing_alone(text: str) -> Reader:
    """Nothing is fetched, every link leads somewhere, every picture has words, and the policy lets the script run."""
    read = Reader(text)
    assert all(s.startswith(("data:image/", "#")) for s in read.sources)
    assert {s[1:] for s in read.sources if s.startswith("#")} <= set(read.ids)
    assert len(read.ids) == len(set(read.ids))
    assert not read.silent
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script
    assert base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode() in text
    return read


@pytest.mark.parametrize("policy", EVERY)
def test_a_page_of_every_policy_stands_alone(policy: str) -> None:
    seen = seen_of(policy, 3)
    text = report_page(ReportData(seen, [0, 2]), "adaptivit <x>")
    read = standing_alone(text)
    assert "adaptivit &lt;x&gt;" in text
    assert read.tags.count("article") == text.count('type="range"') == 2
    assert ("Merged regions" in text) == (policy in ("spvit", "evit", "fold", "tome"))
    assert ("Planned depth" in text) == (policy == "aht")
    assert ("Easy and hard" in text) == (not seen.equal)
    assert text.count("data-text=") == 2 * 6
    read_by_script = set(re.findall(r"tile\.dataset\.(\w+)", text))
    assert read_by_script == set(re.findall(r'<figure data-(\w+)="[^"]*" data-(\w+)=', text)[0])


@pytest.mark.parametrize("policy", ["tome", "aht"])
def test_a_report_is_a_folder(policy: str, tmp_path: Path) -> None:
    made_at = visualize.report(made(policy), pictures(3), tmp_path / "out", shown=2)
    assert made_at == tmp_path / "out" / "report.html"
    standing_alone(made_at.read_text())
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "images.csv").read_text())))
    assert [r["image"] for r in rows] == ["image 1", "image 2", "image 3"]
    files = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert {"maps.png", "live.png", "images/01_image_1.gif", "images/02_image_2_tokens.png"} <= files
    assert ("images/01_image_1_groups.png" in files) == (policy == "tome")
    assert ("plans.png" in files) == (policy == "aht")
    assert not any(Path(f).name.startswith(".") for f in files)


def test_a_report_with_labels_and_a_static_model(tmp_path: Path) -> None:
    seen: list[str] = []
    made_at = visualize.report(
        made("aht"),
        labelled(),
        tmp_path,
        static=tiny("static"),
        class_names=["<cat>", "dog", "fish", "bee"],
        tokens=4,
        shown=3,
        progress=lambda what, done, total: seen.append(f"{what} {done}/{total}"),
    )
    text = made_at.read_text()
    assert "&lt;cat&gt;" in text
    assert "<cat>" not in text
    assert "Classes that take the most blocks" in text
    assert "answers that are the static model&#x27;s" in text
    assert {"accuracy.png", "confidence.png", "easy_and_hard.png", "importance.png"} <= {
        p.name for p in tmp_path.iterdir()
    }
    assert {r["class"] for r in csv.DictReader(io.StringIO((tmp_path / "classes.csv").read_text()))} == {
        "<cat>",
        "dog",
        "fish",
        "bee",
    }
    rows = list(csv.DictReader(io.StringIO((tmp_path / "importance.csv").read_text())))
    assert len(rows) == 5 * 3
    assert all(r["patches"] in "01234" for r in rows)
    assert all(0 <= float(r["pearson_p"]) <= 1 for r in rows if r["pearson_p"] != "nan")
    assert {"looking 24/24", "looking (static) 24/24", "leaving one out 15/15"} <= set(seen)
    assert seen[-1].startswith("drawing")
    assert len(set(seen[-1].split()[1].split("/"))) == 1


@pytest.mark.parametrize("kind", ["registers", "average", "distilled"])
@pytest.mark.usefixtures("only_html")
def test_other_backbones_and_shapes(kind: str, tmp_path: Path) -> None:
    model = tiny("fold", kind, more={"img_size": (32, 48)}, keep=0.8)
    images = torch.randn(2, 3, 32, 48)
    seen = visualize.look(model, images)
    assert seen.grid == (4, 6)
    assert seen.attended.shape == (6, 2, 24)
    made_at = visualize.report(model, images, tmp_path, tokens=3)
    assert "aspect-ratio: 48 / 32" in made_at.read_text()


def test_reports_refuse_what_they_cannot_show(tmp_path: Path) -> None:
    model, images = made("fold"), pictures(2)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.png").write_bytes(b"no picture")
    for given, more, words in (
        ((tiny("static"), images), {}, "computes every patch in every block"),
        ((model, pictures(2, 40)), {}, "Expected images of 32 x 32 px, got 40 x 40"),
        ((model, pictures(0)), {}, "at least one image"),
        ((model, []), {}, "at least one image"),
        ((model, 7), {}, "got int"),
        ((model, tmp_path / "none.png"), {}, "Image not found"),
        ((model, tmp_path / "empty"), {}, "has no images"),
        ((model, tmp_path / "bad.png"), {}, "Cannot read the image"),
        ((model, images), {"labels": [1]}, "2 images, 1 labels"),
        ((model, images), {"tokens": 2}, "at least 3 patches"),
        ((model, images), {"shown": 0}, "shown: expected at least 1"),
        ((model, images), {"static": tiny("static", more={"num_classes": 3})}, "same classes; it has 3, not 10"),
        ((tiny("fold", "no_classifier"), images), {}, "no classifier"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            visualize.report(*given, tmp_path / "out", **more)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="it is a file"):
        visualize.report(model, images, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_unreadable_images_of_a_data_set_are_named(tmp_path: Path) -> None:
    root = folder(tmp_path / "d", ("0", "1"), each=3)
    (root / "0" / "00.png").write_bytes(b"no picture")
    model = made("fold")
    seen = visualize.look(model, visualize.data_set(root, model))
    assert (seen.left_out, len(seen)) == ([f"{root / '0' / '00.png'}: cannot be read as an image"], 5)
    assert (seen.pixels(0) == np.asarray(Image.open(root / "0" / "01.png"))).all()
    for f in root.rglob("*.png"):
        f.write_bytes(b"no picture")
    with pytest.raises(DataError, match="No image could be read"):
        visualize.look(model, visualize.data_set(root, model))


# -- the command ----------------------------------------------------------------------------------------------------
def test_the_command(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path / "d", ("0", "1"), each=3)
    torch.manual_seed(0)
    adaptivit.create("test_vit", "fold", img_size=32, num_classes=2, keep=0.5).save_pretrained(tmp_path / "m")
    adaptivit.create("test_vit", "static", img_size=32, num_classes=2).save_pretrained(tmp_path / "s")
    out = tmp_path / "out"
    assert run("visualize", tmp_path / "m", "--images", root, "--out", out, "--shown", 1, "--device", "cpu") == 0
    assert f"wrote {out}/report.html" in capsys.readouterr().out
    assert 'class="right"' not in (out / "report.html").read_text()
    monkeypatch.setattr(report_folder, "_pictures", lambda data: ())
    given = ("--data", root, "--limit", 4, "--static", tmp_path / "s", "--tokens", 3, "--shown", 1)
    assert run("visualize", tmp_path / "m", *given, "--out", out, "--device", "cpu") == 0
    assert len(list(csv.DictReader(io.StringIO((out / "images.csv").read_text())))) == 4
    assert (out / "importance.csv").exists()
    names = tmp_path / "names.txt"
    names.write_text("\n".join(["ant", "bee", *map(str, range(998))]))
    bare = ("--backbone", "test_vit", "--policy", "tome:r=2", "--img-size", 32, "--class-names", names)
    assert run("visualize", *bare, "--images", root / "0", "--out", out, "--shown", 1, "--device", "cpu") == 0
    assert "ToMe" in (out / "report.html").read_text()
    names.write_text("ant\nbee\n")
    assert "class_names: expected 1000 names" in refused(
        capsys, "visualize", *bare, "--images", root / "0", "--out", out
    )


@pytest.mark.usefixtures("only_html")
def test_the_command_at_a_budget(tmp_path: Path, capsys: Any) -> None:
    root, model, out = folder(tmp_path / "d", ("0", "1"), each=1), tmp_path / "m", tmp_path / "out"
    torch.manual_seed(0)
    made = adaptivit.create("test_vit", "evit", img_size=32, num_classes=2)
    start = ("visualize", model, "--images", root, "--out", out, "--shown", 1, "--device", "cpu")
    made.save_pretrained(model)
    assert "not calibrated" in refused(capsys, *start, "--budget", "-20%")
    made.calibrate(torch.randn(1, 3, 32, 32))
    made.save_pretrained(model)
    cost = []
    for more in ([], ["--budget", "-20%"], ["--max-macs", "-25%"]):
        assert run(*start, *more) == 0
        assert ("at a budget of -20%" in (out / "report.html").read_text()) == ("--budget" in more)
        cost.append(float(next(csv.DictReader(io.StringIO((out / "images.csv").read_text())))["gmacs"]))
    assert cost[0] > cost[1] > cost[2]


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: Any) -> None:
    adaptivit.create("test_vit", "static", img_size=32, num_classes=2).save_pretrained(tmp_path / "s")
    root = folder(tmp_path / "d", ("0", "1"), each=1)
    static = tmp_path / "s"
    assert "either --images" in refused(capsys, "visualize", static)
    assert "either --images" in refused(capsys, "visualize", static, "--images", root, "--data", root)
    assert "there are no depths to see" in refused(capsys, "visualize", static, "--images", root)
    assert "either --checkpoint" in refused(capsys, "visualize", "--images", root)
    assert "Image not found" in refused(
        capsys, "visualize", "--backbone", "test_vit", "--policy", "fold", "--images", tmp_path / "no.jpg"
    )
    assert "tokens: expected at least 3" in refused(capsys, "visualize", static, "--images", root, "--tokens", 1)
    assert "shown: expected at least 1" in refused(capsys, "visualize", static, "--images", root, "--shown", 0)
    assert "was given 2 times" in refused(capsys, "visualize", static, "--images", root, "--images", root)


@pytest.mark.usefixtures("only_html")
def test_an_interruption_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.html").write_text("old")

    def stop(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(report_folder, "report_page", stop)
    with pytest.raises(KeyboardInterrupt):
        visualize.write(ReportData(seen_of("fold"), [0]), tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"
    assert not list(tmp_path.rglob(".*"))


# -- in a browser ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["aht", "fold", "amod"])
def test_the_report_in_chromium(policy: str, browser: Any, tmp_path: Path) -> None:
    page_file = visualize.report(made(policy), labelled(20), tmp_path, static=tiny("static"), shown=2)
    for width, scheme in ((360, "dark"), (1280, "light")):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = context.new_page()
        messages: list[str] = []
        asked: list[str] = []
        page.on("console", lambda m, messages=messages: messages.append(m.text))
        page.on("pageerror", lambda e, messages=messages: messages.append(str(e)))
        page.on("request", lambda r, asked=asked: asked.append(r.url))
        page.goto(page_file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        _scrub(page, policy)
        _switch(page, scheme)
        assert not messages
        assert [u for u in asked if not u.startswith("data:")] == [page_file.as_uri()]
        context.close()


def _scrub(page: Any, policy: str) -> None:
    """The slider, moved by keyboard, changes the picture and says so; so does Play."""
    shot = page.locator(".shot").first
    slider, shown = shot.locator("input[type=range]"), shot.locator(".now .over:visible")
    assert shown.count() == 1
    end = shown.get_attribute("src")
    slider.focus()
    page.keyboard.press("Home")
    start = shown.get_attribute("src")
    assert start != end
    assert shot.locator("output").inner_text().startswith("Block 1 of 6")
    assert slider.get_attribute("aria-valuetext") == shot.locator("output").inner_text()
    shot.locator("button").click()
    for _ in range(50):
        page.wait_for_timeout(100)
        if slider.input_value() != "1":
            break
    assert slider.input_value() != "1"
    shot.locator("button").click()
    if policy == "fold":
        page.get_by_label("Tokens at work").check()
        assert "tokens" in shown.get_attribute("class")


def _switch(page: Any, scheme: str) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    assert (sum(int(v) for v in re.findall(r"\d+", before)) < 384) == (scheme == "dark")
    page.locator(".theme").click()
    after = page.evaluate(colour)
    assert (sum(int(v) for v in re.findall(r"\d+", after)) < 384) == (scheme != "dark")
