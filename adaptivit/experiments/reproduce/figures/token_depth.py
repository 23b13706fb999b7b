"""How deep tokens go: A-ViT's Fig. 3 to 6 and 8, and Table 1.

options: draw = maps | places | extremes | beside | classes; images, of all rows; shown, in a picture; first, the first
of the shown ones. The last row is the one that is drawn; `beside` takes all rows, `classes` the first as static.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from timm.data.imagenet_info import ImageNetInfo

from ....utils.plotting import image_bytes, png_bytes
from ....visualize import charts, pictures
from ....visualize.collect import Seen
from ....visualize.statistics import by_class, correlations, gain_and_lose
from . import Found, Given

_SAMPLES, _CLASSES = 2, 3  # pictures of a class, and classes with pictures


def measure(given: Given) -> Found:
    models = {name: given.model(name) for name in given.names}
    limit = given.option("images", None)
    seen = {name: _named(given.look(model, limit), model.shape.outputs) for name, model in models.items()}
    found: Found = _DRAW[given.option("draw", "maps")](given, seen)
    return replace(found, notes=[*found.notes, *_notes(given)])


def _maps(given: Given, seen: dict[str, Seen]) -> Found:
    """Images beside their depths (Fig. 3 and 8)."""
    one = _last(seen)
    shown = _spread(given, len(one))
    found = [_image(one, i) | {"least_depth": int(one.depth[i].min())} for i in shown]
    return Found(found, {"maps.png": image_bytes(pictures.maps(one, shown, min(4, len(shown))))})


def _places(given: Given, seen: dict[str, Seen]) -> Found:
    """Mean depth by place, and scores by block (Fig. 4)."""
    one = _last(seen)
    assert one.scores is not None
    mean = one.depth.mean(0).reshape(one.grid)
    away = np.hypot(*(np.indices(one.grid) - (np.array(one.grid)[:, None, None] - 1) / 2))  # from the centre
    scores = charts.by_image(one.scores)  # [S, B]
    rows: list[dict[str, Any]] = [
        {"what": "depth", "row": r, "column": c, "mean": float(mean[r, c])} for r, c in np.ndindex(*one.grid)
    ]
    for block, values in zip(one.scores.blocks, scores, strict=True):
        quartiles = dict(zip(("q1", "median", "q3"), np.quantile(values, (0.25, 0.5, 0.75)).tolist(), strict=True))
        rows.append({"what": "score", "block": block, "mean": float(values.mean()), **quartiles})
    ours = f"{correlations(away.ravel(), mean.ravel())[0]:.2f}"
    peak = one.scores.blocks[int(scores.mean(1).argmax())]
    compared = [
        {"what": "correlation of depth with the way from the centre", "ours": ours, "paper": "deep at the centre"},
        {"what": "block of the highest mean score", "ours": str(peak), "paper": "rises, peaks, falls"},
    ]
    drawn = {"positions.png": charts.positions(one), "scores.png": charts.scores(one, each_image=True)}
    notes = [f"{len(one)} images (paper: 5,000). A halted patch has the score 0; the last block's is 1 by definition."]
    return Found(rows, {name: png_bytes(figure, charts.SHARP) for name, figure in drawn.items()}, compared, notes)


def _extremes(given: Given, seen: dict[str, Seen]) -> Found:
    """The hardest and the easiest images that are classified correctly (Fig. 5)."""
    one = _last(seen)
    easy, hard = pictures.extremes(one, given.option("shown", 6))
    rows = [{"group": group} | _image(one, i) for group, part in (("easy", easy), ("hard", hard)) for i in part]
    gap = f"{one.mean_depth[hard].mean() - one.mean_depth[easy].mean():.2f}"
    compared = [{"what": "blocks more for the hard ones", "ours": gap, "paper": "about 5"}]
    return Found(rows, {"extremes.png": image_bytes(pictures.easy_and_hard(one, len(easy)))}, compared)


def _beside(given: Given, seen: dict[str, Seen]) -> Found:
    """Which tokens go through all blocks, method beside method (Fig. 6)."""
    shown, columns = _spread(given, len(_last(seen))), list(seen.values())
    tiles = []
    for i in shown:
        own = [(pictures.through(one, i), f"{name} · {_whole(one, i):.0f} % whole") for name, one in seen.items()]
        tiles.append([(pictures.plain(columns[0], i), columns[0].titles[i]), *own])
    rows = [
        {"row": name, "through_all_percent": _whole(one, i)} | _image(one, i)
        for name, one in seen.items()
        for i in shown
    ]
    compared = [
        {"what": f"{name}, patches in all blocks", "ours": f"{_whole(one):.1f} %", "paper": ""}
        for name, one in seen.items()
    ]
    return Found(rows, {"beside.png": image_bytes(pictures.sheet(tiles))}, compared)


def _classes(given: Given, seen: dict[str, Seen]) -> Found:
    """Classes that gain and lose most against the static model, with images of them (Table 1)."""
    static, one = next(iter(seen.values())), _last(seen)
    assert one.labels is not None
    rows = by_class(one, static)
    drawn: dict[str, list[tuple[Any, str]]] = {}
    compared = []
    for word, part in zip(("gain", "lose"), gain_and_lose(rows, 10), strict=True):
        names = ", ".join(f"{row['class']} {row['change']:+.0f}" for row in part) or "none"
        compared.append({"what": f"classes that {word} most, points", "ours": names, "paper": "see its Table 1"})
        for row in part[:_CLASSES]:
            words = f"{row['class']}, {row['static top-1 %']:.0f} to {row['top-1 %']:.0f} %"
            own = [i for i in range(len(one)) if one.class_name(int(one.labels[i])) == row["class"]][:_SAMPLES]
            drawn.setdefault(f"Classes that {word} most", []).extend((pictures.plain(one, i), words) for i in own)
    sheet = {"classes.png": image_bytes(pictures.sheet(list(drawn.values()), headings=list(drawn)))} if drawn else {}
    notes = [f"{len(one)} images of {len(rows)} classes: {len(one) / len(rows):.1f} images a class (paper: 50)."]
    return Found(rows, sheet, compared, notes)


_DRAW = {"maps": _maps, "places": _places, "extremes": _extremes, "beside": _beside, "classes": _classes}


def _last(seen: dict[str, Seen]) -> Seen:
    return list(seen.values())[-1]


def _spread(given: Given, count: int) -> list[int]:
    """Images to show, evenly spread, whatever is seen on them."""
    shown = min(given.option("shown", 12), count)
    return sorted({(given.option("first", 0) + i * count // shown) % count for i in range(shown)})


def _image(one: Seen, index: int) -> dict[str, Any]:
    """Columns of an image."""
    assert one.labels is not None
    assert one.correct is not None
    share = float(one.macs[index] / one.static_macs)
    known = {"image": one.titles[index], "class": one.class_name(int(one.labels[index]))}
    return known | {"correct": bool(one.correct[index]), "mean_depth": float(one.mean_depth[index]), "of_static": share}


def _whole(one: Seen, index: int | None = None) -> float:
    """Per cent of patches that every block computed."""
    depth = one.depth if index is None else one.depth[index]
    return 100 * float((depth == one.layers).mean())


def _named(one: Seen, classes: int) -> Seen:
    """With ImageNet's class names where a model of its 1,000 classes has none."""
    if one.class_names is not None or classes != 1000:
        return one
    info = ImageNetInfo()
    return replace(one, class_names=[info.index_to_description(i).partition(",")[0] for i in range(classes)])


def _notes(given: Given) -> Sequence[str]:
    shares = {job.share for job in given.jobs.values() if job.share is not None}
    return [
        f"A-ViT is set to {100 * share:.0f} % of static's MACs on validation images, the paper's 0.8 of 1.25 G."
        for share in shares
    ]
