"""Charts of a benchmark as PNG bytes: bars of images/s, and speed against the share of MACs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from ...errors import UserError
from ...utils.plotting import (
    ACCENT,
    DASHED,
    FAINT,
    INK,
    MUTED,
    SPARE,
    STEPS,
    add_axes,
    grid,
    headline,
    label_axes,
    new_figure,
    png_bytes,
)
from ...visualize.pareto import colour_of
from ..table import shortened
from .contenders import BEST, COMPILED, OWN, TIMM
from .rows import Row, configurations, groups, label, rate

_STATIC = {TIMM: "#c3c9ce", COMPILED: "#9aa3ab", BEST: "#59636c", OWN: "#9fd0cb"}
_SPEED = {BEST: "speed_vs_best_static", TIMM: "speed_vs_timm", OWN: "speed_vs_own_static"}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    """One colour a label: baselines grey, a policy as in every plot or what is left, its further layouts paler."""
    spare, hues, found = itertools.cycle(SPARE), dict[str, str](), dict[str, str]()
    layouts: dict[str, list[str]] = {}
    for row in rows:
        name, policy = row["contender"], row["policy"].partition(":")[0]
        own = _STATIC.get(name) or (ACCENT if policy == "replay" else colour_of(policy))
        if name not in hues:
            hues[name] = own if own and own not in hues.values() else next(spare)
        seen = layouts.setdefault(name, [])
        seen += [row["layout"]] * (row["layout"] not in seen)
        found[label(row)] = _paler(hues[name], 1 - 0.62 ** seen.index(row["layout"]))
    return found


def _paler(colour: str, share: float) -> str:
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _widest(names: Sequence[str], size: float) -> float:
    """Pixels of the longest text."""
    figure = new_figure(100, 100)
    renderer = figure.canvas.get_renderer()
    texts = [figure.text(0, 0, name, fontsize=size, parse_math=False) for name in names]
    return max(text.get_window_extent(renderer).width for text in texts)


def bars(rows: Sequence[Row]) -> bytes:
    """images/s against the best static model: a row of panels a backbone and dtype, in it a panel a batch size."""
    timed_together = configurations(rows)
    against = next((n for n in (BEST, TIMM, OWN) if all(row[_SPEED[n]] for g in timed_together for row in g)), None)
    colours = _colours(rows)
    names = {name: shortened(name, 44) for name in colours}
    panels = [groups(group, "batch") for group in groups(rows, "backbone", "dtype")]
    strips = [group[i : i + 4] for group in panels for i in range(0, len(group), 4)]
    across = max(map(len, strips))
    left, gap, above, below = round(_widest(list(names.values()), 8)) + 44, 36, 112, 64
    panel = max(330, round(1160 / across) - gap) if across > 1 else 760
    heights = [30 * max(len(rows) for rows in strip) + 16 for strip in strips]
    figure = new_figure(left + across * (panel + gap), sum(heights) + len(strips) * (above + below))
    top = float(figure.bbox.height)
    for strip, height in zip(strips, heights, strict=True):
        top -= above + height
        for column, group in enumerate(strip):
            axes = add_axes(figure, left + column * (panel + gap), top, panel, height)
            _bars(axes, group, against, colours, names if not column else {})
        top -= below
    return png_bytes(figure)


def _bars(axes: Any, group: list[Row], against: str | None, colours: dict[str, str], names: dict[str, str]) -> None:
    values = [float(row[_SPEED[against] if against else "images_per_s"]) for row in group]
    places = list(range(len(group)))[::-1]
    axes.barh(places, values, height=0.72, color=[colours[label(row)] for row in group], zorder=2)
    texts = [
        (f"{value:.2f}×  " if against else "") + f"{rate(row)}/s" for value, row in zip(values, group, strict=True)
    ]
    style = {"textcoords": "offset points", "va": "center", "fontsize": 7.5, "zorder": 4, "color": INK}
    for place, value, text in zip(places, values, texts, strict=True):
        halo = [withStroke(linewidth=2.4, foreground="white")]
        axes.annotate(text, (value, place), xytext=(4, 0), path_effects=halo, **style)
    taken = (_widest(texts, 7.5) + 16) / axes.get_window_extent().width  # by the text behind a bar
    axes.set(xlim=(0, max(values) / (1 - min(taken, 0.8))), ylim=(-0.6, len(group) - 0.4))
    axes.set_yticks(places, [names.get(label(row), "") for row in group])
    axes.tick_params(axis="y", labelcolor=INK)
    if against:
        axes.plot([1, 1], [-0.6, len(group) - 0.4], color=INK, linewidth=0.9, linestyle=DASHED, zorder=1)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=STEPS))
    grid(axes, "x")
    label_axes(axes, f"images/s, {against} = 1" if against else "images/s")
    first, mode = group[0], next((row["static_mode"] for row in group if row["contender"] == BEST), "")
    detail = f"{first['backbone']}, {first['dtype']}" + (f"; best static: {mode}" if mode else "")
    headline(axes, f"batch {first['batch']}", detail)


def speed_against_macs(rows: Sequence[Row]) -> bytes:
    """Speed against our own static model over the share of its MACs that ran; dashed: as fast as MACs are few."""
    shown = [row for row in rows if row["speed_vs_own_static"]]
    if not shown:
        raise UserError("Expected timed rows beside our own static model to plot, got none.")
    panels, colours = groups(shown, "backbone", "dtype"), _colours(shown)
    batches = {batch: _MARKERS[i % len(_MARKERS)] for i, batch in enumerate(dict.fromkeys(r["batch"] for r in shown))}
    names = {name: shortened(name, 44) for name in colours}
    left, panel, height, gap = 90, 620, 520, 80
    legend = round(_widest([*names.values(), "perfect scaling"], 8)) + 90
    across, down = min(3, len(panels)), math.ceil(len(panels) / 3)
    figure = new_figure(left + across * (panel + gap) + legend, down * (height + 200))
    for i, group in enumerate(panels):
        bottom = 84 + (down - 1 - i // 3) * (height + 200)
        _cloud(add_axes(figure, left + i % 3 * (panel + gap), bottom, panel, height), group, colours, batches)
    dot: dict[str, Any] = {"linestyle": "", "markeredgecolor": "white", "markersize": 7}
    handles = [Line2D([], [], marker="o", color=c, label=names[name], **dot) for name, c in colours.items()]
    handles += [Line2D([], [], marker=m, color=MUTED, label=f"batch {batch}", **dot) for batch, m in batches.items()]
    handles.append(Line2D([], [], color=INK, linestyle=DASHED, linewidth=1.1, label="perfect scaling"))
    place = ((left + across * (panel + gap) - gap / 2) / figure.bbox.width, 1 - 116 / figure.bbox.height)
    box = figure.legend(handles=handles, loc="upper left", bbox_to_anchor=place, frameon=False, fontsize=8)
    for text in box.get_texts():
        text.set(color=INK, parse_math=False)
    return png_bytes(figure)


def _cloud(axes: Any, group: list[Row], colours: dict[str, str], batches: dict[str, str]) -> None:
    x = [100 * float(row["mac_share"]) for row in group]
    y = [float(row["speed_vs_own_static"]) for row in group]
    low, high = max(1.0, min(x) - 8), max(100.0, max(x)) + 6
    style = {"s": 52, "edgecolor": "white", "linewidth": 0.8, "zorder": 4}
    for row, share, speed in zip(group, x, y, strict=True):
        axes.scatter([share], [speed], color=colours[label(row)], marker=batches[row["batch"]], **style)
    curve = [low + (high - low) * i / 100 for i in range(101)]
    axes.plot(curve, [100 / share for share in curve], color=INK, linestyle=DASHED, linewidth=1.1, zorder=3)
    axes.plot([low, high], [1, 1], color=FAINT, linewidth=1.2, zorder=1)
    bottom = max(0.0, math.floor(10 * min(*y, 1.0)) / 10 - 0.1)
    axes.set(xlim=(low, high), ylim=(bottom, 1.06 * max(*y, 100 / low)))
    for axis, form in ((axes.xaxis, "{:.0f} %"), (axes.yaxis, "{:g}×")):
        axis.set_major_locator(MaxNLocator(6, steps=STEPS))
        axis.set_major_formatter(lambda value, _, form=form: form.format(value))
    grid(axes, "both")
    label_axes(axes, "MACs that ran, share of the static model's")
    detail = f"{group[0]['backbone']}, {group[0]['dtype']}; times as fast as our own static model"
    headline(axes, "Speed against work", detail)
