"""Pictures and the HTML report: valid, true to the data, self-contained, never half-written."""

from __future__ import annotations

import base64
import io
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adaptivit.errors import UserError
from adaptivit.utils import plotting
from adaptivit.utils.plotting import halting_maps, layer_curve
from adaptivit.visualize.html import Picture, write_report

LAYERS = 12


def pixels(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as image:
        assert image.format == "PNG"
        image.load()
        return np.asarray(image.convert("RGB"), dtype=np.int64)


def maps(depth: Any, count: int = 1, **options: Any) -> np.ndarray:
    images = np.full((count, 32, 32, 3), 0.5)
    depths = np.broadcast_to(np.asarray(depth), (count, 2, 2))
    return pixels(halting_maps(images, depths, LAYERS, **options))


# Where the map of the first panel stands in a figure without titles.
LEFT, TOP, TILE = plotting._MARGIN + plotting._TILE + plotting._GUTTER, plotting._MARGIN, plotting._TILE


def patch_colour(figure: np.ndarray, row: int, column: int) -> np.ndarray:
    return figure[TOP + TILE // 4 + row * TILE // 2, LEFT + TILE // 4 + column * TILE // 2]


class TestHaltingMaps:
    def test_the_figure_grows_by_whole_panels(self) -> None:
        one, two, three = (maps(np.ones((2, 2), int), n, columns=2).shape for n in (1, 2, 3))
        assert one[1] == 2 * plotting._MARGIN + 2 * TILE + plotting._GUTTER
        assert two[1] - one[1] == 2 * TILE + plotting._GUTTER + plotting._GAP
        assert one[0] == two[0] == plotting._MARGIN + TILE + plotting._LEGEND
        assert three[:2] == (two[0] + TILE + plotting._ROW_GAP, two[1])

    def test_titles_take_room_and_ink(self) -> None:
        bare, named, other = (maps([[1, 1], [1, 1]], titles=t) for t in (None, ["label 7"], ["label $x_1 · 38 %"]))
        assert named.shape[0] == bare.shape[0] + plotting._TITLE
        assert (named != other).any()

    def test_a_long_title_stays_inside_its_panel(self) -> None:
        figure = maps([[1, 1], [1, 1]], titles=["a very long title " * 12])
        band = figure[plotting._MARGIN - 12 : plotting._MARGIN + plotting._TITLE]
        assert (band[:, plotting._MARGIN : -plotting._MARGIN] < 128).any()
        assert (band[:, -plotting._MARGIN + 4 :] == 255).all()

    def test_depth_is_seen_patch_by_patch(self) -> None:
        figure = maps([[12, 1], [1, 12]])
        deep, shallow = patch_colour(figure, 0, 0), patch_colour(figure, 0, 1)
        assert deep.sum() > shallow.sum() + 150  # halted early: dimmed
        np.testing.assert_array_equal(deep, patch_colour(figure, 1, 1))
        np.testing.assert_array_equal(shallow, patch_colour(figure, 1, 0))

    def test_patch_borders_are_sharp(self) -> None:
        row = maps([[12, 1], [12, 1]])[TOP + TILE // 4, LEFT : LEFT + TILE]
        assert len(np.unique(row, axis=0)) == 2
        assert (row[TILE // 2 - 1] != row[TILE // 2]).any()

    def test_every_depth_has_its_own_brightness(self) -> None:
        every = np.arange(LAYERS + 1)
        images, depths = np.full((len(every), 32, 32, 3), 0.5), every[:, None, None]
        figure = pixels(halting_maps(images, depths, LAYERS, columns=1))
        rows = TOP + TILE // 2 + every * (TILE + plotting._ROW_GAP)
        light = figure[rows, LEFT + TILE // 2] @ [0.299, 0.587, 0.114]
        assert (np.diff(light) > 0).all()

    def test_the_input_is_shown_unchanged(self) -> None:
        figure = maps([[12, 1], [1, 12]])
        tile = figure[TOP : TOP + TILE, plotting._MARGIN : plotting._MARGIN + TILE]
        assert np.abs(tile - 128).max() <= 1

    def test_grids_that_do_not_divide_the_image_and_wide_images(self) -> None:
        images, depths = np.random.default_rng(0).random((2, 30, 50, 3)), np.ones((2, 7, 3), int)
        figure = pixels(halting_maps(images, depths, LAYERS, columns=1))
        assert figure.shape[0] == plotting._MARGIN + 2 * round(TILE * 30 / 50) + plotting._ROW_GAP + plotting._LEGEND

    def test_grey_images_and_values_out_of_range(self) -> None:
        halting_maps(np.full((1, 8, 8, 1), 1.5), np.ones((1, 2, 2), int), LAYERS)

    def test_same_input_same_bytes(self) -> None:
        arguments = (np.full((1, 8, 8, 3), 0.5), np.ones((1, 2, 2), int), LAYERS)
        assert halting_maps(*arguments) == halting_maps(*arguments)

    @pytest.mark.parametrize(
        ("images", "depths", "options", "says"),
        [
            (np.zeros((0, 8, 8, 3)), np.zeros((0, 2, 2), int), {}, "images must be"),
            (np.zeros((1, 3, 8, 8)), np.zeros((1, 2, 2), int), {}, "images must be"),
            (np.zeros((1, 8, 8, 3)), np.zeros((2, 2, 2), int), {}, "depths must be"),
            (np.zeros((1, 8, 8, 3)), np.full((1, 2, 2), 13), {}, r"0\.\.12"),
            (np.zeros((1, 8, 8, 3)), np.full((1, 2, 2), 1.5), {}, "whole numbers"),
            (np.zeros((1, 8, 8, 3)), np.zeros((1, 2, 2), int), {"titles": []}, "one title per image"),
            (np.zeros((1, 8, 8, 3)), np.zeros((1, 2, 2), int), {"columns": 0}, "columns"),
        ],
    )
    def test_wrong_input_is_named(self, images: Any, depths: Any, options: Any, says: str) -> None:
        with pytest.raises(UserError, match=says):
            halting_maps(images, depths, LAYERS, **options)


class TestLayerCurve:
    def test_bars_follow_the_tokens(self) -> None:
        few, many = (pixels(layer_curve([65.0, n, n], 65)) for n in (5.0, 50.0))
        accent = np.array([int(plotting.ACCENT[i : i + 2], 16) for i in (1, 3, 5)])
        few_ink, many_ink = ((figure == accent).all(-1).sum() for figure in (few, many))
        assert few.shape == many.shape
        assert many_ink / few_ink == pytest.approx(165 / 75, rel=0.03)

    def test_the_histogram_stands_beside_or_below(self) -> None:
        alone = pixels(layer_curve([3.0, 2.0], 4))
        beside = pixels(layer_curve([3.0, 2.0], 4, depths=[1, 2]))
        below = pixels(layer_curve([3.0, 2.0], 4, depths=[1, 2], stacked=True))
        assert beside.shape[0] == alone.shape[0]
        assert beside.shape[1] > alone.shape[1] > below.shape[1]
        assert below.shape[0] == 2 * alone.shape[0]
        assert (beside != pixels(layer_curve([3.0, 2.0], 4, depths=[0, 2]))).any()

    def test_many_blocks(self) -> None:
        pixels(layer_curve(np.linspace(197, 9, 40), 197, depths=np.arange(41)))

    @pytest.mark.parametrize(
        ("live", "total", "depths"),
        [([], 4, None), ([5.0], 4, None), ([float("nan")], 4, None), ([0.0], 0, None), ([1.0], 4, [2]), ([1.0], 4, [])],
    )
    def test_wrong_input_is_named(self, live: Any, total: float, depths: Any) -> None:
        with pytest.raises(UserError):
            layer_curve(live, total, depths=depths)


NASTY = "<script>alert('&\"x')</script>"


def small_png(shade: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (3, 2), shade).save(buffer, "PNG")
    return buffer.getvalue()


def report(path: Path, **changes: Any) -> str:
    arguments: dict[str, Any] = {
        "title": f"T {NASTY}",
        "lead": f"L {NASTY}",
        "summary": [(f"V {NASTY}", f"S {NASTY}")],
        "table": [{f"C {NASTY}": f"R {NASTY}", "top-1 %": 97.123, "images": 12345}, {"top-1 %": 5.0, "extra": None}],
        "table_caption": f"TC {NASTY}",
        "pictures": [Picture(small_png(), f"P {NASTY}", f"A {NASTY}", small_png(9))],
        "notes": [f"N {NASTY}"],
        "command": f"X {NASTY}",
        "environment": {f"E {NASTY}": f"F {NASTY}"},
    }
    write_report(path, **(arguments | changes))
    return path.read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Checks that tags nest and collects attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "img", "source"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


class TestReport:
    def test_text_is_escaped_and_complete(self, tmp_path: Path) -> None:
        text = report(tmp_path / "r.html")
        reader = Reader(text)
        assert "<script" not in text.lower()
        for mark in ("T", "L", "V", "S", "C", "R", "TC", "P", "N", "X", "E", "F"):
            assert f"{mark} {NASTY}" in reader.words
        assert [a["alt"] for tag, a in reader.tags if tag == "img"] == [f"A {NASTY}"]

    def test_it_stands_alone(self, tmp_path: Path) -> None:
        text = report(tmp_path / "r.html")
        tags = Reader(text).tags
        assert not {tag for tag, _ in tags} & {"script", "link", "iframe", "object", "base"}
        assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
        sources = [a[n] or "" for _, a in tags for n in ("src", "srcset", "href") if n in a]
        assert [base64.b64decode(s.removeprefix("data:image/png;base64,")) for s in sources] == [
            small_png(9),
            small_png(),
        ]
        assert not re.search(r"https?:|@import|url\(", text)

    def test_it_is_accessible_and_fluid(self, tmp_path: Path) -> None:
        text = report(tmp_path / "r.html")
        tags = Reader(text).tags
        names = [tag for tag, _ in tags]
        assert names.count("h1") == names.count("main") == names.count("header") == names.count("footer") == 1
        assert all(a.get("scope") in {"row", "col"} for tag, a in tags if tag == "th")
        assert ("html", {"lang": "en"}) in tags
        assert any(a.get("name") == "viewport" for tag, a in tags if tag == "meta")
        assert "prefers-color-scheme: dark" in text
        assert any((a.get("width"), a.get("height")) == ("3", "2") for tag, a in tags if tag == "img")

    def test_table_cells(self, tmp_path: Path) -> None:
        text = report(tmp_path / "r.html")
        assert '<td class="n">97.1</td><td class="n">12,345</td>' in text
        assert '<td class="n">5.0</td><td class="n">—</td>' in text
        text = report(tmp_path / "r.html", table=[{"a": "x", "b": np.float32(0.25), "c": True, "d": float("nan")}])
        assert ">0.250<" in text
        assert ">yes<" in text
        assert ">nan<" not in text

    def test_empty_parts_are_left_out(self, tmp_path: Path) -> None:
        write_report(tmp_path / "r.html", title="Nothing yet")
        names = {tag for tag, _ in Reader((tmp_path / "r.html").read_text(encoding="utf-8")).tags}
        assert not names & {"table", "figure", "dl", "section", "footer", "pre"}

    def test_bytes_that_are_not_utf8(self, tmp_path: Path) -> None:
        assert "run caf?" in report(tmp_path / "r.html", command="run caf\udce9")

    def test_a_picture_must_be_a_png(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="PNG"):
            report(tmp_path / "r.html", pictures=[Picture(b"GIF89a", "", "")])
        assert list(tmp_path.iterdir()) == []

    def test_a_failing_write_leaves_nothing_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        report(tmp_path / "old.html", title="before")
        before = (tmp_path / "old.html").read_bytes()
        monkeypatch.setattr(os, "replace", full)
        for name in ("new.html", "old.html"):
            with pytest.raises(UserError, match="No space left"):
                report(tmp_path / name)
        assert [p.name for p in tmp_path.iterdir()] == ["old.html"]
        assert (tmp_path / "old.html").read_bytes() == before

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(UserError, match="Cannot write"):
            report(tmp_path / "file" / "r.html")
        assert (tmp_path / "file").read_text() == "x"
