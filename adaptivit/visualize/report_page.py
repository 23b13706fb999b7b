"""The report: one HTML file with everything in it, for desks and phones, light and dark, eyes and screen readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..utils.plotting import image_bytes
from . import charts, html, pictures
from .collect import Seen
from .html import escaped, prose
from .importance import Importance
from .statistics import Row, gain_and_lose, shallow_and_deep

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Found:
    """All that a report shows."""

    seen: Seen
    shown: Sequence[int]  # images with a picture of their own
    static: Seen | None = None  # the static model on the same images
    classes: Sequence[Row] = ()
    importance: Importance | None = None


def report_page(found: Found, command: str = "", environment: Mapping[str, object] | None = None) -> str:
    """The report as HTML."""
    seen = found.seen
    sections = [("images", "Images", _images(seen, found.shown))]
    if seen.plans is not None:
        sections.append(("plans", "Plan and execution", _plans(seen, found.shown)))
    sections.append(("depth", "Depth", _depth(seen)))
    if seen.scores is not None:
        sections.append(("scores", "Scores", _scores(found)))
    if len(seen) > 1 and not seen.equal:
        sections.append(("difficulty", "Easy and hard", _difficulty(seen)))
    if found.classes and (found.static is not None or not seen.equal):
        sections.append(("classes", "Classes", _classes(found)))
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name, _ in sections)
    body = "\n".join(
        f'<section aria-labelledby="{key}"><h2 id="{key}">{name}</h2>{inner}</section>' for key, name, inner in sections
    )
    styles = [(_HERE / "report_page.css").read_text(), "[hidden] { display: none !important; }"]
    for view in pictures.views(seen):
        here = f":root[data-view={view}]"
        styles.append(f"{here} .over.{view} {{ display: block; }} {here} .key.{view} {{ display: flex; }}")
    styles += [f".p{i} {{ background-image: url({_photo(seen, i)}); }}" for i in found.shown]
    return html.page(
        f"What {seen.method} does with {_count(len(seen), 'image')}",
        f'<nav class="contents" aria-label="Contents">{links}</nav>{html.cards(_summary(found))}{body}',
        _lead(seen),
        html.footer(command, environment or {}),
        style="\n".join(styles),
        script=(_HERE / "report_page.js").read_text(),
        attributes=f'data-view="{_first_view(seen)}"',
        header='<button type="button" class="theme" hidden>Dark</button>',
    )


def _first_view(seen: Seen) -> str:
    return "groups" if seen.groups is not None else "tokens"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _about(words: str) -> str:
    return f'<p class="about">{prose(words)}</p>'


def _lead(seen: Seen) -> str:
    if seen.skips:
        how = "In routed blocks only the chosen patches are computed; the others skip the block and come back."
    elif seen.groups is not None:
        how = "Patches that are alike, or that little attention goes to, merge on the way: fewer tokens reach the end."
    else:
        how = "Every patch stops being computed when the model has seen enough of it."
    at = "" if seen.budget is None else f" at a budget of {seen.budget}"
    return f"{seen.model}, policy {seen.policy}{at}. {how}"


def _summary(found: Found) -> list[tuple[object, str]]:
    seen, static = found.seen, found.static
    saved = 1 - float(seen.macs.mean()) / seen.static_macs
    cards: list[tuple[object, str]] = [
        (f"{'−' if saved >= 0 else '+'}{100 * abs(saved):.0f} %", "work (MACs), against the static model"),
        (f"{seen.mean_depth.mean():.1f}", f"of {seen.layers} blocks that a patch goes through, on average"),
    ]
    if seen.correct is not None:
        known = static is not None and static.correct is not None
        words = f"; static has {100 * static.correct.mean():.1f} %" if known else ""  # type: ignore[union-attr]
        cards.append((f"{100 * seen.correct.mean():.1f} %", f"top-1{words}"))
    if static is not None:
        same = float((static.predicted == seen.predicted).mean())
        cards.append((f"{100 * same:.0f} %", "answers that are the static model's"))
    left = f"; {_count(seen.unreadable, 'file')} could not be read" if seen.unreadable else ""
    return [*cards, (f"{len(seen):,}", f"image{'' if len(seen) == 1 else 's'}{left}")]


# -- pictures -------------------------------------------------------------------------------------------------------
def _data(picture: Image.Image, kind: str, **options: Any) -> str:
    return html.data_uri(image_bytes(picture, kind, **options), kind.lower())


def _photo(seen: Seen, index: int) -> str:
    return _data(Image.fromarray(seen.pixels(index)), "WEBP", quality=86, method=4)


def _over(cells: Any, view: str) -> str:
    """An overlay: one pixel a patch, or more where lines are drawn."""
    small = cells if view == "groups" else cells[:: pictures.CELL, :: pictures.CELL]
    return f'<img class="over {view}" alt="" src="{_data(Image.fromarray(small), "PNG", optimize=True)}">'


def _pic(seen: Seen, index: int, inner: str, label: str, more: str = "") -> str:
    high, wide = seen.pixels(index).shape[:2]
    style = f"aspect-ratio: {wide} / {high}"
    return f'<div class="pic p{index}{more}" role="img" aria-label="{escaped(label)}" style="{style}">{inner}</div>'


def _tile(seen: Seen, index: int, over: str, label: str, words: str, facts: str = "") -> str:
    return f"<figure{facts}>{_pic(seen, index, over, label)}<p>{words}</p></figure>"


def _verdict(seen: Seen, index: int) -> str:
    """The predicted class, and whether it is right."""
    words = f"{escaped(seen.class_name(int(seen.predicted[index])))}, {100 * seen.confidence[index]:.0f} %"
    if seen.labels is None or seen.correct is None:
        return words
    if seen.correct[index]:
        return words + ' · <span class="right">right</span>'
    return f'{words} · <span class="wrong">wrong</span>, it is {escaped(seen.class_name(int(seen.labels[index])))}'


def _images(seen: Seen, shown: Sequence[int]) -> str:
    views = pictures.views(seen)
    parts = [
        _about("Left the image as the model sees it, right its patches. Move the slider to follow them block by block.")
    ]
    if len(shown) < len(seen):
        parts.append(_about(f"{len(shown)} of {len(seen):,} images are shown; the figures are of all."))
    if len(views) > 1:
        choices = "".join(
            f'<label><input type="radio" name="view" value="{v}"{" checked" if v == _first_view(seen) else ""}>'
            f"<span>{pictures.VIEWS[v]}</span></label>"
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
        return f'<p class="key {view}"><i class="veil"></i>Veiled patches skip this block.</p>'
    words = (
        "Patches that left, by the blocks that computed them" if view == "tokens" else "Planned depth (dark: halted)"
    )
    colours = pictures.shades(np.arange(seen.layers + 1), seen.layers, pictures.DIM if view == "tokens" else 1.0)
    every = 1 if seen.layers <= 16 else 2 if seen.layers <= 32 else 4
    cells = "".join(
        f'<li><i style="background: rgb({r} {g} {b})"></i>{depth if depth % every == 0 else ""}</li>'
        for depth, (r, g, b) in enumerate(colours.tolist())
    )
    return f'<div class="key {view}"><span>{words}</span><ol aria-hidden="true">{cells}</ol></div>'


def _shot(seen: Seen, index: int, views: Sequence[str]) -> str:
    """One image with its slider."""
    total, layers = seen.attended.shape[-1], seen.layers
    tiles = []
    for layer in range(layers):
        count = int(seen.attended[layer, index].sum())
        text, share = f"Block {layer + 1} of {layers} · {count} of {total} patches", 100 * count / total
        over = "".join(_over(pictures.overlay(seen, index, layer, view), view) for view in views)
        facts = f' data-text="{text}" data-share="{share:.1f}"'
        tiles.append(_tile(seen, index, over, text, f"block {layer + 1}<br>{count} of {total}", facts))
    name = escaped(seen.titles[index])
    photo = f'<img class="base" alt="" src="{_photo(seen, index)}">'
    cost = f"{100 * seen.macs[index] / seen.static_macs:.0f} % of the work"
    return (
        f'<article class="shot" aria-labelledby="shot{index}"><h3 id="shot{index}">{name}</h3>'
        f'<p class="say">{_verdict(seen, index)}<br>{cost} · mean depth {seen.mean_depth[index]:.1f}</p>'
        f'<div class="pair">{_pic(seen, index, photo, f"The image {seen.titles[index]}")}'
        f"{_pic(seen, index, over, text, ' now')}</div>"
        f'<div class="scrub" hidden><button type="button" aria-label="Play or stop {name}">Play</button>'
        f'<input type="range" min="1" max="{layers}" value="{layers}" step="1" aria-label="Block of {name}"></div>'
        f"<output>{text}</output>"
        f'<div class="meter" aria-hidden="true"><i style="width: {share:.1f}%"></i></div>'
        f"<details{' open' if seen.skips else ''}><summary>Block by block</summary>"
        f'<div class="blocks">{"".join(tiles)}</div></details></article>'
    )


def _plans(seen: Seen, shown: Sequence[int]) -> str:
    plans, rows = seen.plans, []
    assert plans is not None
    for index in shown[:4]:
        title, tiles = seen.titles[index], []
        for s, stage in enumerate(plans.stages):
            live = plans.live[s, index]
            mean = f"{plans.values[s, index][live].mean():.1f}" if live.any() else "none live"
            over, words = _over(pictures.overlay(seen, index, stage - 1, "plan"), "shown"), f"plan after block {stage}"
            tiles.append(_tile(seen, index, over, f"{title}: {words}, mean {mean}", f"{words}<br>mean {mean}"))
        mean, over = f"{plans.halt[index].mean():.1f}", _over(pictures.executed(seen, index), "shown")
        tiles.append(_tile(seen, index, over, f"{title}: executed depth, mean {mean}", f"executed<br>mean {mean}"))
        rows.append(f'<div><h3 class="sub">{escaped(title)}</h3><div class="blocks">{"".join(tiles)}</div></div>')
    words = (
        "Planners give every live patch a depth; halting scores carry it out. "
        "Patches that had halted before a plan was made are dark."
    )
    key = _key(seen, "plan").replace('class="key plan"', 'class="key" style="display: flex"')
    figures = [_chart(partial(charts.planned, seen, s), f"plan{stage}") for s, stage in enumerate(plans.stages)]
    return f'{_about(words)}{key}<div class="plans">{"".join(rows)}</div>{_charts(figures)}'


# -- charts ---------------------------------------------------------------------------------------------------------
def _chart(make: Callable[[], Any], name: str, label: str = "") -> str:
    figure = make()
    words = [t.get_text() for axes in figure.axes for t in axes.texts]
    label = label or ". ".join(" ".join(w.split()) for w in words[-2:])
    return f'<figure class="chart" role="img" aria-label="{escaped(label)}">{charts.svg(figure, name)}</figure>'


def _charts(figures: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def _depth(seen: Seen) -> str:
    live = ", ".join(f"{v:.0f}" for v in seen.live.mean(1))
    figures = [
        _chart(partial(charts.live, seen), "live", f"Mean tokens computed in each block: {live}"),
        _chart(partial(charts.depths, seen), "depths"),
        _chart(partial(charts.positions, seen), "positions"),
    ]
    words = "What is above the bars is work that was not done."
    if seen.equal and len(seen) > 1:
        words += f" {seen.method} computes as many patches in every image: none is easier than another for it."
    return _about(words) + _charts(figures)


def _scores(found: Found) -> str:
    seen, scores = found.seen, found.seen.scores
    assert scores is not None
    how = "the higher, the sooner a patch stops" if scores.stops else "the higher, the longer a patch stays"
    words = f"What the policy judges patches by: {how}."
    figures = [_chart(partial(charts.scores, seen), "score")]
    if found.importance is not None:
        figures.append(_chart(partial(charts.importance, found.importance), "importance"))
        truth = "the label" if seen.labels is not None else "the predicted class"
        words += (
            f" A patch matters when the loss of {truth} rises without it, in the transformer that computes everything. "
            "Above zero, the policy keeps what matters."
        )
        if not np.isfinite(found.importance.pearson).any():
            words += " Here the scores of an image's patches do not differ, so there is no correlation."
    return _about(words) + _charts(figures)


def _difficulty(seen: Seen) -> str:
    which = " All of these were classified rightly." if seen.correct is not None else ""
    easy, hard = pictures.extremes(seen)
    walls = [
        f'<h3 class="sub">{name}</h3><div class="wall">{"".join(_small(seen, i) for i in chosen)}</div>'
        for name, chosen in (("Easiest: the fewest blocks", easy), ("Hardest: the most blocks", hard))
        if chosen
    ]
    figures = [_chart(partial(charts.confidence, seen), "confidence")]
    if seen.correct is not None and len(seen) >= 20:
        figures.append(_chart(partial(charts.accuracy, seen), "accuracy"))
    return _about(f"Images by the mean depth of their patches.{which}") + "".join(walls) + _charts(figures)


def _small(seen: Seen, index: int) -> str:
    picture = _data(pictures.painted(seen, index, seen.layers - 1, width=192), "WEBP", quality=84)
    name, depth = seen.titles[index], f"depth {seen.mean_depth[index]:.1f}"
    label = escaped(f"{name} with the patches that stopped early, mean {depth}")
    high, wide = seen.pixels(index).shape[:2]
    image = f'<img src="{picture}" width="192" height="{round(192 * high / wide)}" alt="{label}">'
    return f"<figure>{image}<p><b>{depth}</b>{escaped(name)}<br>{_verdict(seen, index)}</p></figure>"


def _classes(found: Found) -> str:
    rows, seen = list(found.classes), found.seen
    tables: list[tuple[list[Row], str, tuple[str, ...]]] = []
    words = ""
    if found.static is not None:
        words = "Top-1 of single classes against the static model. "
        keys = ("class", "images", "static top-1 %", "top-1 %", "change")
        names = ("Classes that gain", "Classes that lose")
        tables += [(part, name, keys) for part, name in zip(gain_and_lose(rows), names, strict=True) if part]
        words += "" if tables else "No class changed. "
    if not seen.equal:
        shown = ("class", "images", "top-1 %", "mean depth")
        names = ("Classes that take the fewest blocks", "Classes that take the most blocks")
        tables += [(part, name, shown) for part, name in zip(shallow_and_deep(rows), names, strict=True) if part]
    few = int(np.median([r["images"] for r in rows]))
    if few < 30:
        words += f"With {_count(few, 'image')} a class (the median), single classes are examples and no results."
    made = "".join(html.table_of([_cells(row, keys) for row in part], name) for part, name, keys in tables)
    return f'{_about(words)}<div class="tables">{made}</div>'


def _cells(row: Row, keys: Sequence[str]) -> Row:
    cells = {key: f"{row[key]:.1f}" if isinstance(row[key], float) else row[key] for key in keys}
    return cells | ({"change": f"{row['change']:+.0f}".replace("-", "−")} if "change" in keys else {})
