"""The report: one HTML file with everything in it, for desks and phones, light and dark, eyes and screen readers."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from . import charts, paint
from .classes import Row, gain_and_lose, shallow_and_deep
from .html_report import html_cards, html_footer, html_page, html_prose, html_table, html_text
from .importance import Importance
from .seen import Seen

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Found:
    """All that a report shows."""

    seen: Seen
    shown: Sequence[int]  # images with a picture of their own
    static: Seen | None = None  # the static model on the same images
    classes: Sequence[Row] = ()
    importance: Importance | None = None


def page(found: Found, command: str = "", environment: Mapping[str, object] | None = None) -> str:
    """The report as HTML."""
    seen = found.seen
    sections: list[tuple[str, str, str]] = [("images", "Images", _images(seen, found.shown))]
    if seen.plans is not None:
        sections.append(("plans", "Plan and execution", _plans(seen, found.shown)))
    sections.append(("depth", "Depth", _depth(seen)))
    if seen.scores is not None:
        sections.append(("scores", "Scores", _scores(found)))
    if len(seen) > 1 and not seen.equal:
        sections.append(("difficulty", "Easy and hard", _difficulty(seen)))
    if found.classes and (found.static is not None or not seen.equal):
        sections.append(("classes", "Classes", _classes(found)))
    links = "".join(f'<a href="#{key}">{html_text(name)}</a>' for key, name, _ in sections)
    body = "\n".join(
        f'<section aria-labelledby="{key}"><h2 id="{key}">{html_text(name)}</h2>{inner}</section>'
        for key, name, inner in sections
    )
    first = paint.views(seen)[1] if seen.groups is not None else "tokens"
    styles = [(_HERE / "page.css").read_text(), "[hidden] { display: none !important; }"]
    for view in paint.views(seen):
        here = f":root[data-view={view}]"
        styles.append(f"{here} .over.{view} {{ display: block; }} {here} .key.{view} {{ display: flex; }}")
    styles += [f".p{i} {{ background-image: url({_photo(seen, i)}); }}" for i in found.shown]
    return html_page(
        f"What {seen.method} does with {_count(len(seen), 'image')}",
        f'<nav class="contents" aria-label="Contents">{links}</nav>{html_cards(_summary(found))}{body}',
        _lead(seen),
        html_footer(command, environment or {}),
        style="\n".join(styles),
        script=(_HERE / "page.js").read_text(),
        attributes=f'data-view="{first}"',
        header='<button type="button" class="theme" hidden>Dark</button>',
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _lead(seen: Seen) -> str:
    if seen.skips:
        how = "In routed blocks only the chosen patches are computed; the others sit out and come back."
    elif seen.groups is not None:
        how = "Patches that are alike, or that little attention goes to, merge on the way: fewer tokens reach the end."
    else:
        how = "Every patch stops being computed when the model has seen enough of it."
    at = "" if seen.budget is None else f" at a budget of {seen.budget}"
    return f"{seen.model}, policy {seen.policy}{at}. {how}"


def _summary(found: Found) -> list[tuple[object, str]]:
    seen = found.seen
    saved = 1 - float(seen.macs.mean()) / seen.static_macs
    cards: list[tuple[object, str]] = [
        (f"{'−' if saved >= 0 else '+'}{100 * abs(saved):.0f} %", "work (MACs), against the static model"),
        (f"{seen.mean_depth.mean():.1f}", f"of {seen.layers} blocks that a patch goes through, on average"),
    ]
    if seen.correct is not None:
        words = "top-1"
        if found.static is not None and found.static.correct is not None:
            words += f"; static has {100 * found.static.correct.mean():.1f} %"
        cards.append((f"{100 * seen.correct.mean():.1f} %", words))
    if found.static is not None:
        same = float((found.static.predicted == seen.predicted).mean())
        cards.append((f"{100 * same:.0f} %", "answers that are the static model's"))
    left = f"; {_count(seen.unreadable, 'file')} could not be read" if seen.unreadable else ""
    return [*cards, (f"{len(seen):,}", f"image{'' if len(seen) == 1 else 's'}{left}")]


# -- pictures -------------------------------------------------------------------------------------------------------
def _data(picture: Image.Image, kind: str, **options: Any) -> str:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


def _photo(seen: Seen, index: int) -> str:
    return _data(Image.fromarray(seen.pixels(index)), "WEBP", quality=86, method=4)


def _over(cells: Any, view: str) -> str:
    """An overlay: one pixel a patch, or more where lines are drawn."""
    small = cells if view == "groups" else cells[:: paint.CELL, :: paint.CELL]
    return f'<img class="over {view}" alt="" src="{_data(Image.fromarray(small), "PNG", optimize=True)}">'


def _pic(seen: Seen, index: int, inner: str, label: str, more: str = "") -> str:
    high, wide = seen.pixels(index).shape[:2]
    style = f"aspect-ratio: {wide} / {high}"
    return f'<div class="pic p{index}{more}" role="img" aria-label="{html_text(label)}" style="{style}">{inner}</div>'


def _verdict(seen: Seen, index: int) -> str:
    """What the model says of an image."""
    name = html_text(seen.class_name(int(seen.predicted[index])))
    words = f"{name}, {100 * seen.confidence[index]:.0f} %"
    if seen.labels is not None and seen.correct is not None:
        if seen.correct[index]:
            words += ' · <span class="right">right</span>'
        else:
            truth = html_text(seen.class_name(int(seen.labels[index])))
            words += f' · <span class="wrong">wrong</span>, it is {truth}'
    return words


def _images(seen: Seen, shown: Sequence[int]) -> str:
    views = paint.views(seen)
    words = "Left the image as the model sees it, right its patches. Move the slider to follow them through the blocks."
    parts = [f'<p class="about">{words}</p>']
    if len(shown) < len(seen):
        parts.append(f'<p class="about">{len(shown)} of {len(seen):,} images are shown; the figures are of all.</p>')
    if len(views) > 1:
        first = views[1] if seen.groups is not None else views[0]
        choices = "".join(
            f'<label><input type="radio" name="view" value="{v}"{" checked" if v == first else ""}>'
            f"<span>{paint.VIEWS[v]}</span></label>"
            for v in views
        )
        parts.append(f'<fieldset class="views"><legend>Show</legend>{choices}</fieldset>')
    parts += [_key(seen, view) for view in views]
    return "".join(parts) + '<div class="shots">' + "".join(_shot(seen, i, views) for i in shown) + "</div>"


def _key(seen: Seen, view: str) -> str:
    """What the colours of a view mean."""
    if view == "groups":
        return f'<p class="key {view}">Patches inside a white line are one token, in the mean colour of its region.</p>'
    if view == "tokens" and seen.skips:
        return f'<p class="key {view}"><i class="veil"></i>Veiled patches sit out this block.</p>'
    words = (
        "Patches that left, by the blocks that computed them" if view == "tokens" else "Planned depth (dark: halted)"
    )
    colours = paint.shades(np.arange(seen.layers + 1), seen.layers, paint.DIM if view == "tokens" else 1.0)
    every = 1 if seen.layers <= 16 else 2 if seen.layers <= 32 else 4
    cells = "".join(
        f'<li><i style="background: rgb({r} {g} {b})"></i>{depth if depth % every == 0 else ""}</li>'
        for depth, (r, g, b) in enumerate(colours.tolist())
    )
    return f'<div class="key {view}"><span>{words}</span><ol aria-hidden="true">{cells}</ol></div>'


def _shot(seen: Seen, index: int, views: Sequence[str]) -> str:
    """One image with its slider."""
    total, layers = seen.attended.shape[-1], seen.layers
    tiles, last = [], ""
    for layer in range(layers):
        count = int(seen.attended[layer, index].sum())
        say = f"Block {layer + 1} of {layers} · {count} of {total} patches"
        last = "".join(_over(paint.overlay(seen, index, layer, view), view) for view in views)
        tiles.append(
            f'<figure data-text="{say}" data-share="{100 * count / total:.1f}">{_pic(seen, index, last, say)}'
            f"<p>block {layer + 1}<br>{count} of {total}</p></figure>"
        )
    name, share = html_text(seen.titles[index]), 100 * seen.macs[index] / seen.static_macs
    photo = f'<img class="base" alt="" src="{_photo(seen, index)}">'
    stats = f"{share:.0f} % of the work · mean depth {seen.mean_depth[index]:.1f}"
    opened = " open" if seen.skips else ""
    return (
        f'<article class="shot" aria-labelledby="shot{index}"><h3 id="shot{index}">{name}</h3>'
        f'<p class="say">{_verdict(seen, index)}<br>{stats}</p>'
        f'<div class="pair">{_pic(seen, index, photo, f"The image {seen.titles[index]}")}'
        f"{_pic(seen, index, last, say, ' now')}</div>"
        f'<div class="scrub" hidden><button type="button" aria-label="Play or stop {name}">Play</button>'
        f'<input type="range" min="1" max="{layers}" value="{layers}" step="1" aria-label="Block of {name}"></div>'
        f"<output>{say}</output>"
        f'<div class="meter" aria-hidden="true"><i style="width: {100 * count / total:.1f}%"></i></div>'
        f'<details{opened}><summary>Block by block</summary><div class="blocks">{"".join(tiles)}</div></details>'
        "</article>"
    )


def _plans(seen: Seen, shown: Sequence[int]) -> str:
    plans = seen.plans
    assert plans is not None
    words = (
        "Planners look at every live patch and say how deep it should go; halting scores carry it out. "
        "Patches that had halted before a plan was made are dark."
    )
    rows = []
    for index in shown[:4]:
        tiles = []
        for s, stage in enumerate(plans.stages):
            live = plans.live[s, index]
            mean = f"{plans.values[s, index][live].mean():.1f}" if live.any() else "none live"
            over = _over(paint.overlay(seen, index, stage - 1, "plan"), "shown")
            say = f"{seen.titles[index]}: plan after block {stage}, mean {mean}"
            tiles.append(
                f"<figure>{_pic(seen, index, over, say)}<p>plan after block {stage}<br>mean {mean}</p></figure>"
            )
        done = paint.executed(seen, index)
        mean = f"{plans.halt[index].mean():.1f}"
        say = f"{seen.titles[index]}: executed depth, mean {mean}"
        tiles.append(f"<figure>{_pic(seen, index, _over(done, 'shown'), say)}<p>executed<br>mean {mean}</p></figure>")
        rows.append(
            f'<div><h3 class="sub">{html_text(seen.titles[index])}</h3><div class="blocks">{"".join(tiles)}</div></div>'
        )
    key = _key(seen, "plan").replace('class="key plan"', 'class="key" style="display: flex"')
    figures = [
        _chart(functools.partial(charts.planned, seen, s), f"plan{stage}") for s, stage in enumerate(plans.stages)
    ]
    charted = f'<div class="charts">{"".join(figures)}</div>'
    return f'<p class="about">{words}</p>{key}<div class="plans">{"".join(rows)}</div>{charted}'


# -- charts ---------------------------------------------------------------------------------------------------------
def _chart(make: Callable[[], Any], name: str, label: str = "") -> str:
    figure = make()
    words = [t.get_text() for axes in figure.axes for t in axes.texts]
    label = label or ". ".join(" ".join(w.split()) for w in words[-2:])
    return f'<figure class="chart" role="img" aria-label="{html_text(label)}">{charts.svg(figure, name)}</figure>'


def _depth(seen: Seen) -> str:
    live = ", ".join(f"{v:.0f}" for v in seen.live.mean(1))
    figures = [
        _chart(lambda: charts.live(seen), "live", f"Mean tokens computed in each block: {live}"),
        _chart(lambda: charts.depths(seen), "depths"),
        _chart(lambda: charts.positions(seen), "positions"),
    ]
    words = "What is above the bars is work that was not done."
    if seen.equal and len(seen) > 1:
        words += f" {seen.method} computes as many patches in every image: none is easier than another for it."
    return f'<p class="about">{html_prose(words)}</p><div class="charts">{"".join(figures)}</div>'


def _scores(found: Found) -> str:
    seen, scores = found.seen, found.seen.scores
    assert scores is not None
    how = "the higher, the sooner a patch stops" if scores.stops else "the higher, the longer a patch stays"
    words = f"What the policy judges patches by: {how}."
    figures = [_chart(lambda: charts.scores(seen), "score")]
    if found.importance is not None:
        important = found.importance
        figures.append(_chart(lambda: charts.importance(important), "importance"))
        whose = "the label" if seen.labels is not None else "the class that the model says"
        words += (
            f" A patch matters when the loss of {whose} rises without it, in the transformer that computes everything. "
            "Above zero, the policy keeps what matters."
        )
        if not np.isfinite(important.pearson).any():
            words += " Here the scores of an image's patches do not differ, so there is no correlation."
    return f'<p class="about">{html_prose(words)}</p><div class="charts">{"".join(figures)}</div>'


def _difficulty(seen: Seen) -> str:
    which = " All of these were classified rightly." if seen.correct is not None else ""
    easy, hard = paint.extremes(seen)
    walls = [
        f'<h3 class="sub">{name}</h3><div class="wall">{"".join(_small(seen, i) for i in chosen)}</div>'
        for name, chosen in (("Easiest: the fewest blocks", easy), ("Hardest: the most blocks", hard))
        if chosen
    ]
    figures = [_chart(lambda: charts.confidence(seen), "confidence")]
    if seen.correct is not None and len(seen) >= 20:
        figures.append(_chart(lambda: charts.accuracy(seen), "accuracy"))
    charted = f'<div class="charts">{"".join(figures)}</div>'
    return f'<p class="about">Images by the mean depth of their patches.{which}</p>{"".join(walls)}{charted}'


def _small(seen: Seen, index: int) -> str:
    picture = _data(paint.painted(seen, index, seen.layers - 1, width=192), "WEBP", quality=84)
    name = seen.titles[index]
    label = html_text(f"{name} with the patches that stopped early, mean depth {seen.mean_depth[index]:.1f}")
    high, wide = seen.pixels(index).shape[:2]
    image = f'<img src="{picture}" width="192" height="{round(192 * high / wide)}" alt="{label}">'
    words = f"<b>depth {seen.mean_depth[index]:.1f}</b>{html_text(name)}<br>{_verdict(seen, index)}"
    return f"<figure>{image}<p>{words}</p></figure>"


def _classes(found: Found) -> str:
    rows, seen = list(found.classes), found.seen
    tables: list[tuple[list[Row], str]] = []
    words = ""
    if found.static is not None:
        gain, lose = gain_and_lose(rows)
        words = "Top-1 of single classes against the static model. "
        keys: tuple[str, ...] = ("class", "images", "static top-1 %", "top-1 %", "change")
        tables = [(_columns(gain, keys), "Classes that gain"), (_columns(lose, keys), "Classes that lose")]
        if not gain and not lose:
            words += "No class changed. "
    if not seen.equal:
        shallow, deep = shallow_and_deep(rows)
        keys = ("class", "images", "top-1 %", "mean depth")
        tables += [(_columns(shallow, keys), "Classes that take the fewest blocks")]
        tables += [(_columns(deep, keys), "Classes that take the most blocks")]
    few = int(np.median([r["images"] for r in rows]))
    if few < 30:
        words += f"With {_count(few, 'image')} a class (the median), single classes are examples and no results."
    made = "".join(html_table([_rounded(r) for r in part], name) for part, name in tables if part)
    return f'<p class="about">{html_prose(words)}</p><div class="tables">{made}</div>'


def _columns(rows: list[Row], keys: Sequence[str]) -> list[Row]:
    return [{key: row[key] for key in keys} for row in rows]


def _rounded(row: Row) -> Row:
    signed = {"change": f"{row['change']:+.0f}".replace("-", "−")} if "change" in row else {}
    return {k: f"{v:.1f}" if isinstance(v, float) else v for k, v in row.items()} | signed
