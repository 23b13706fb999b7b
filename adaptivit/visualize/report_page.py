"""The report: one HTML file with everything in it, for desks and phones, light and dark, eyes and screen readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
class ReportData:
    """All that a report shows."""

    seen: Seen
    shown: Sequence[int]  # images with a picture of their own
    static: Seen | None = None  # the static model on the same images
    classes: Sequence[Row] = ()
    importance: Importance | None = None


def report_page(data: ReportData, command: str = "", environment: Mapping[str, object] | None = None) -> str:
    """The report as HTML."""
    seen = data.seen
    made = [(key, title, make(data)) for key, (title, make) in _SECTIONS.items()]
    sections = [section for section in made if section[2]]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
    body = "\n".join(
        f'<section aria-labelledby="{key}"><h2 id="{key}">{title}</h2>{inner}</section>'
        for key, title, inner in sections
    )
    styles = [(_HERE / "report_page.css").read_text(), "[hidden] { display: none !important; }"]
    for view in pictures.views(seen):
        here = f":root[data-view={view}]"
        styles.append(f"{here} .over.{view} {{ display: block; }} {here} .key.{view} {{ display: flex; }}")
    styles += [f".p{i} {{ background-image: url({_photo(seen, i)}); }}" for i in data.shown]
    return html.page(
        f"What {seen.method} does with {_count(len(seen), 'image')}",
        f'<nav class="contents" aria-label="Contents">{links}</nav>{html.cards(_summary(data))}{body}',
        _lead(seen),
        html.footer(command, environment or {}),
        style="\n".join(styles),
        script=(_HERE / "report_page.js").read_text(),
        attributes=f'data-view="{pictures.views(seen)[0]}"',
        header='<button type="button" class="theme" hidden>Dark</button>',
    )


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


def _summary(data: ReportData) -> list[tuple[object, str]]:
    seen, static = data.seen, data.static
    saved = 1 - float(seen.macs.mean()) / seen.static_macs
    cards: list[tuple[object, str]] = [
        (f"{'−' if saved >= 0 else '+'}{100 * abs(saved):.0f} %", "work (MACs), against the static model"),
        (f"{seen.mean_depth.mean():.1f}", f"of {seen.layers} blocks that a patch goes through, on average"),
    ]
    if seen.correct is not None:
        known = static is not None and static.correct is not None
        words = f"; static has {100 * static.correct.mean():.1f} %" if known else ""  # type: ignore[union-attr]
        cards.append((f"{100 * seen.correct.mean():.1f} %", f"top-1{words}"))
    if static is not None and static.predicted is not None:
        same = float((static.predicted == seen.predicted).mean())
        cards.append((f"{100 * same:.0f} %", "answers that are the static model's"))
    left = f"; {_count(len(seen.left_out), 'file')} left out" if seen.left_out else ""
    return [*cards, (f"{len(seen):,}", f"image{'' if len(seen) == 1 else 's'}{left}")]


# -- pictures -------------------------------------------------------------------------------------------------------
def _image(picture: Image.Image, kind: str, **options: Any) -> str:
    return html.data_uri(image_bytes(picture, kind, **options), kind.lower())


def _photo(seen: Seen, index: int) -> str:
    return _image(Image.fromarray(seen.pixels(index)), "WEBP", quality=86, method=4)


def _over(cells: Any, view: str) -> str:
    """An overlay: one pixel a patch, or more where lines are drawn."""
    small = cells if view == "groups" else cells[:: pictures.CELL, :: pictures.CELL]
    return f'<img class="over {view}" alt="" src="{_image(Image.fromarray(small), "PNG", optimize=True)}">'


def _pic(seen: Seen, index: int, inner: str, label: str, more: str = "") -> str:
    high, wide = seen.pixels(index).shape[:2]
    style = f"aspect-ratio: {wide} / {high}"
    return f'<div class="pic p{index}{more}" role="img" aria-label="{escaped(label)}" style="{style}">{inner}</div>'


def _tile(seen: Seen, index: int, over: str, label: str, words: str, facts: str = "") -> str:
    return f"<figure{facts}>{_pic(seen, index, over, label)}<p>{words}</p></figure>"


def _verdict(seen: Seen, index: int) -> str:
    """The prediction, and whether it is right."""
    if seen.predicted is None or seen.confidence is None:
        return escaped(seen.captions[index])
    words = f"{escaped(seen.class_name(int(seen.predicted[index])))}, {100 * seen.confidence[index]:.0f} %"
    if seen.labels is None or seen.correct is None:
        return words
    if seen.correct[index]:
        return words + ' · <span class="right">right</span>'
    return f'{words} · <span class="wrong">wrong</span>, it is {escaped(seen.class_name(int(seen.labels[index])))}'


def _images(data: ReportData) -> str:
    seen, views = data.seen, pictures.views(data.seen)
    parts = [
        _about("Left the image as the model sees it, right its patches. Move the slider to follow them block by block.")
    ]
    if len(data.shown) < len(seen):
        parts.append(_about(f"{len(data.shown)} of {len(seen):,} images are shown; the figures are of all."))
    if len(views) > 1:
        choices = "".join(
            f'<label><input type="radio" name="view" value="{v}"{" checked" if v == views[0] else ""}>'
            f"<span>{pictures.VIEWS[v]}</span></label>"
            for v in views
        )
        parts.append(f'<fieldset class="views"><legend>Show</legend>{choices}</fieldset>')
    shots = "".join(_shot(seen, i, views) for i in data.shown)
    return "".join([*parts, *(_key(seen, view) for view in views), f'<div class="shots">{shots}</div>'])


def _key(seen: Seen, view: str, style: str = "") -> str:
    """What the colours of a view mean."""
    kind = f'class="key {view}"{style}'
    if view == "groups":
        return f"<p {kind}>Patches inside a white line are one token, in the mean colour of its region.</p>"
    if view == "tokens" and seen.skips:
        return f'<p {kind}><i class="veil"></i>Veiled patches skip this block.</p>'
    planned = view == "plan"
    words = "Planned depth (dark: halted)" if planned else "Patches that left, by the blocks that computed them"
    colours = pictures.shades(np.arange(seen.layers + 1), seen.layers, 1.0 if planned else pictures.DIM)
    every = 1 if seen.layers <= 16 else 2 if seen.layers <= 32 else 4
    cells = "".join(
        f'<li><i style="background: rgb({r} {g} {b})"></i>{depth if depth % every == 0 else ""}</li>'
        for depth, (r, g, b) in enumerate(colours.tolist())
    )
    return f'<div {kind}><span>{words}</span><ol aria-hidden="true">{cells}</ol></div>'


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


def _plans(data: ReportData) -> str:
    seen, plans = data.seen, data.seen.plans
    if plans is None:
        return ""
    rows = []
    for index in data.shown[:4]:
        title, tiles = seen.titles[index], []
        for words, mean, over in pictures.plans_of(seen, index):
            label = f"{title}: {words}, mean {mean}"
            tiles.append(_tile(seen, index, _over(over, "shown"), label, f"{words}<br>mean {mean}"))
        rows.append(f'<div><h3 class="sub">{escaped(title)}</h3><div class="blocks">{"".join(tiles)}</div></div>')
    words = (
        "Planners give every live patch a depth; halting scores carry it out. "
        "Patches that had halted before a plan was made are dark."
    )
    key = _key(seen, "plan", ' style="display: flex"')
    return f'{_about(words)}{key}<div class="plans">{"".join(rows)}</div>{_charts(data, "plans")}'


# -- charts ---------------------------------------------------------------------------------------------------------
def _charts(data: ReportData, section: str) -> str:
    made = []
    for part, name, draw in charts.every(data.seen, data.importance):
        if part == section:
            figure = draw()
            texts = [" ".join(t.get_text().split()) for axes in figure.axes for t in axes.texts]
            label = escaped(figure.get_label() or ". ".join(texts[-2:]))
            made.append(f'<figure class="chart" role="img" aria-label="{label}">{charts.svg(figure, name)}</figure>')
    return f'<div class="charts">{"".join(made)}</div>'


def _depth(data: ReportData) -> str:
    words, seen = "What is above the bars is work that was not done.", data.seen
    if seen.equal and len(seen) > 1:
        words += f" {seen.method} computes as many patches in every image: none is easier than another for it."
    return _about(words) + _charts(data, "depth")


def _scores(data: ReportData) -> str:
    scores = data.seen.scores
    if scores is None:
        return ""
    how = "the higher, the sooner a patch stops" if scores.stops else "the higher, the longer a patch stays"
    words = f"What the policy judges patches by: {how}."
    if data.importance is not None:
        truth = "the label" if data.seen.labels is not None else "the predicted class"
        words += (
            f" A patch matters when the loss of {truth} rises without it, in the transformer that computes everything. "
            "Above zero, the policy keeps what matters."
        )
        if not np.isfinite(data.importance.pearson).any():
            words += " Here the scores of an image's patches do not differ, so there is no correlation."
    return _about(words) + _charts(data, "scores")


def _difficulty(data: ReportData) -> str:
    seen = data.seen
    if seen.equal:
        return ""
    which = " All of these were classified rightly." if seen.correct is not None else ""
    walls = [
        f'<h3 class="sub">{name}</h3><div class="wall">{"".join(_small(seen, i) for i in chosen)}</div>'
        for name, chosen in zip(pictures.EXTREMES, pictures.extremes(seen), strict=True)
        if chosen
    ]
    return _about(f"Images by the mean depth of their patches.{which}") + "".join(walls) + _charts(data, "difficulty")


def _small(seen: Seen, index: int) -> str:
    picture = _image(pictures.painted(seen, index, seen.layers - 1, width=192), "WEBP", quality=84)
    name, depth = seen.titles[index], f"depth {seen.mean_depth[index]:.1f}"
    label = escaped(f"{name} with the patches that stopped early, mean {depth}")
    high, wide = seen.pixels(index).shape[:2]
    image = f'<img src="{picture}" width="192" height="{round(192 * high / wide)}" alt="{label}">'
    return f"<figure>{image}<p><b>{depth}</b>{escaped(name)}<br>{_verdict(seen, index)}</p></figure>"


def _classes(data: ReportData) -> str:
    rows, seen = list(data.classes), data.seen
    if not rows or (data.static is None and seen.equal):
        return ""
    words, tables = "", list[tuple[str, list[Row], str]]()
    if data.static is not None:
        gain, lose = gain_and_lose(rows)
        words = f"Top-1 of single classes against the static model. {'' if gain or lose else 'No class changed. '}"
        tables = [(f"Classes that {which}", part, "change") for which, part in (("gain", gain), ("lose", lose))]
    if not seen.equal:
        names = ("Classes that take the fewest blocks", "Classes that take the most blocks")
        tables += [(name, part, "mean depth") for name, part in zip(names, shallow_and_deep(rows), strict=True)]
    few = int(np.median([r["images"] for r in rows]))
    if few < 30:
        words += f"With {_count(few, 'image')} a class (the median), single classes are examples and no results."
    made = [html.table_of([_cells(row, last) for row in part], name) for name, part, last in tables]
    return f'{_about(words)}<div class="tables">{"".join(made)}</div>'


def _cells(row: Row, last: str) -> Row:
    """A row of a table of classes that ends with the change or with the depth."""
    if last == "change":
        static, change = f"{row['static top-1 %']:.1f}", f"{row['change']:+.0f}".replace("-", "−")
        cells = {"static top-1 %": static, "top-1 %": f"{row['top-1 %']:.1f}", "change": change}
    else:
        cells = {"top-1 %": f"{row['top-1 %']:.1f}", "mean depth": f"{row['mean depth']:.1f}"}
    return {"class": row["class"], "images": row["images"], **cells}


# id of a section -> title, what writes it (nothing where there is nothing to show)
_SECTIONS: dict[str, tuple[str, Callable[[ReportData], str]]] = {
    "images": ("Images", _images),
    "plans": ("Plan and execution", _plans),
    "depth": ("Depth", _depth),
    "scores": ("Scores", _scores),
    "difficulty": ("Easy and hard", _difficulty),
    "classes": ("Classes", _classes),
}
