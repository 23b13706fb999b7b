"""Charts of what a model did with many images, as matplotlib figures of one size: PNG for talks, SVG for the report.

Shapes: B images, L blocks, P patches, S places where patches were scored.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.ticker import MaxNLocator

from ..errors import UserError
from ..utils.plotting import (
    ACCENT,
    COLOURS,
    DASHED,
    FAINT,
    GREY,
    INK,
    MUTED,
    add_axes,
    depth_bars,
    grid,
    headline,
    label_axes,
    live_bars,
    new_figure,
)
from .collect import Array, Scores, Seen
from .statistics import correlations, mean_and_half, wilson

if TYPE_CHECKING:
    from .importance import Importance

_WIDTH, _HEIGHT = 550, 440  # at plotting.DPI; small, so that words stay readable on a phone
_LEFT, _RIGHT, _BELOW, _ABOVE = 72, 26, 74, 104
SHARP = 220  # dots an inch of saved charts
WRONG = "#c2571a"
# colours of a figure -> variables of the report's light and dark theme
_THEME = {INK: "ink", MUTED: "soft", FAINT: "line", "#f0f2f4": "line", GREY: "soft", ACCENT: "accent", WRONG: "wrong"}


def _panel(x: str = "", y: str = "", lines: int = 1) -> tuple[Any, Any]:
    """A figure with one plot; x and y name its axes, `lines` is how many lines the numbers below it take."""
    left, below = _LEFT + (28 if y else 0), _BELOW + 20 * (lines - 1)
    figure = new_figure(_WIDTH, _HEIGHT)
    axes = add_axes(figure, left, below, _WIDTH - left - _RIGHT, _HEIGHT - below - _ABOVE)
    label_axes(axes, x, y)
    return figure, axes


def _per_cent(axes: Any) -> None:
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    grid(axes)


def _correlation(x: Array, y: Array) -> str:
    r, _ = correlations(x, y)
    return f"correlation {'undefined' if math.isnan(r) else f'{r:.2f}'}"


def every(seen: Seen, found: Importance | None = None) -> Sequence[tuple[str, str, Callable[[], Any]]]:
    """(section of the report, name, what draws it) of the charts that there are data for."""
    made = [("depth", draw.__name__, partial(draw, seen)) for draw in (live, depths, positions)]
    if seen.plans is not None:
        made += [("plans", f"plan_{stage}", partial(planned, seen, s)) for s, stage in enumerate(seen.plans.stages)]
    if seen.scores is not None:
        made.append(("scores", "scores", partial(scores, seen)))
    if found is not None:
        made.append(("scores", "importance", partial(importance, found)))
    if not seen.equal and seen.confidence is not None:
        made.append(("difficulty", "confidence", partial(confidence, seen)))
        if seen.correct is not None and len(seen) >= 20:
            made.append(("difficulty", "accuracy", partial(accuracy, seen)))
    return made


def live(seen: Seen) -> Any:
    """Mean tokens computed in each block, beside static's."""
    figure, axes = _panel()
    figure.set_label("Mean tokens computed in each block: " + ", ".join(f"{v:.0f}" for v in seen.live.mean(1)))
    live_bars(axes, seen.live.mean(1), seen.attended.shape[-1] + seen.prefix, seen.method)
    return figure


def depths(seen: Seen) -> Any:
    """How deep patches go."""
    figure, axes = _panel()
    depth_bars(axes, 100 * np.bincount(seen.depth.ravel(), minlength=seen.layers + 1) / seen.depth.size)
    return figure


def positions(seen: Seen) -> Any:
    """Mean depth at every place of the image (A-ViT Fig. 4a)."""
    figure, axes = _panel()
    mean = seen.depth.mean(0).reshape(seen.grid)
    low, high = float(mean.min()), float(mean.max())
    if high - low < 0.1:
        low, high = low - 0.5, high + 0.5
    side = _HEIGHT - _BELOW - _ABOVE + 40
    axes.set_position((_LEFT / _WIDTH, 34 / _HEIGHT, side * seen.grid[1] / seen.grid[0] / _WIDTH, side / _HEIGHT))
    axes.pcolormesh(mean[::-1], cmap=COLOURS, vmin=low, vmax=high, edgecolors="face", linewidth=0.2)
    axes.set_aspect("equal", anchor="W")
    axes.set_yticks([])
    box = axes.get_window_extent()
    bar = add_axes(figure, box.x0 + min(box.width, 400) + 22, box.y0, 16, box.height)
    bar.pcolormesh(np.linspace(low, high, 65)[:-1, None], cmap=COLOURS, edgecolors="face", linewidth=0.2)
    bar.set_yticks(np.linspace(0, 64, 5), [f"{v:.1f}" for v in np.linspace(low, high, 5)])
    bar.yaxis.tick_right()
    bar.tick_params(length=0, labelsize=8, labelcolor=MUTED, pad=4)
    for part in (axes, bar):
        part.set_xticks([])
        part.spines["bottom"].set_visible(False)
    images = f"{len(seen)} images" if len(seen) > 1 else "one image"
    headline(axes, "Mean depth by position", f"{images}; blocks computed at each place")
    return figure


def by_image(found: Scores) -> Array:
    """[S, B] mean score of an image's patches at every scored place; a patch that is not scored any more counts 0."""
    return np.nan_to_num(found.values).mean(-1)


def scores(seen: Seen, each_image: bool = False) -> Any:
    """What patches are judged by, block by block; each_image: of every image the mean (A-ViT Fig. 4b)."""
    if seen.scores is None:
        raise UserError(f"{seen.policy} gives patches no scores.")
    figure, axes = _panel("block" if seen.scores.stops else "block whose tokens it chooses", seen.scores.name)
    boxes = []
    for block, values in zip(
        seen.scores.blocks, by_image(seen.scores) if each_image else seen.scores.values, strict=True
    ):
        known = values[np.isfinite(values)]
        if known.size:
            q = np.quantile(known, (0.05, 0.25, 0.5, 0.75, 0.95))
            name = str(block if seen.scores.stops else block + 1)
            boxes.append({"med": q[2], "q1": q[1], "q3": q[3], "whislo": q[0], "whishi": q[4], "label": name})
    if each_image:  # a point an image, beside one another by their order
        means = by_image(seen.scores)
        x = np.arange(1, len(means) + 1)[:, None] + np.linspace(-0.26, 0.26, means.shape[1])
        look = {"s": 4, "color": ACCENT, "alpha": min(0.4, 100 / len(seen)), "linewidths": 0}
        axes.scatter(x, means, rasterized=means.size > 2000, **look)
    edge, face = (INK, "none") if each_image else (ACCENT, FAINT)
    line = {"color": edge, "linewidth": 1.1}
    axes.bxp(
        boxes,
        showfliers=False,
        patch_artist=True,
        widths=0.6,
        boxprops={"facecolor": face, "edgecolor": edge, "linewidth": 1.1},
        medianprops={"color": INK, "linewidth": 1.6},
        zorder=3,
        whiskerprops=line,
        capprops=line,
    )
    axes.yaxis.set_major_locator(MaxNLocator(5))
    grid(axes)
    what = f"means of {len(seen)} images, halted patches as 0" if each_image else "live patches"
    headline(axes, f"{seen.scores.name.capitalize()} by block", f"{what}: median, quartiles, 5 to 95 %")
    return figure


def planned(seen: Seen, stage: int) -> Any:
    """Planned against executed depth at a planner's stage (0 for the first)."""
    if seen.plans is None:
        raise UserError(f"{seen.policy} plans no depths; AHT-ViT (aht) with planners does.")
    plans, layers = seen.plans, seen.layers
    alive = plans.live[stage]
    plan, done = plans.values[stage][alive], plans.halt[alive]
    figure, axes = _panel("planned depth", "executed depth")
    edges = np.arange(layers + 2) - 0.5
    counts, _, _ = np.histogram2d(done, plan, bins=(edges, edges))
    shade = np.ma.masked_equal(np.sqrt(counts), 0)
    axes.pcolormesh(edges, edges, shade, cmap=COLOURS, edgecolors="face", linewidth=0.2, zorder=2)
    axes.plot([0.5, layers + 0.5], [0.5, layers + 0.5], color=MUTED, linewidth=1.2, linestyle=DASHED, zorder=3)
    axes.set(xlim=(0.4, layers + 0.6), ylim=(0.4, layers + 0.6))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(7, integer=True))
    detail = "no live patches"
    if len(plan):
        detail = f"executed − planned {np.mean(done - plan):+.1f}, {_correlation(plan, done)}"
    headline(axes, f"Plan made after block {plans.stages[stage]}", detail)
    return figure


def confidence(seen: Seen) -> Any:
    """Mean depth of every image against the model's confidence, right and wrong answers apart."""
    figure, axes = _panel("mean depth", "confidence")
    assert seen.confidence is not None
    x, y = seen.mean_depth, seen.confidence
    right = np.ones(len(seen), bool) if seen.correct is None else seen.correct
    common = {"s": 26 if len(seen) <= 150 else 10, "alpha": 0.75, "zorder": 3, "rasterized": len(seen) > 600}
    axes.scatter(x[right], y[right], color=ACCENT, marker="o", linewidths=0, **common)
    axes.scatter(x[~right], y[~right], color=WRONG, marker="x", linewidths=1.2, **common)
    _per_cent(axes)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    detail = f"{len(seen)} images, {_correlation(x, y)}"
    if seen.correct is not None:
        detail += f"; ● right, × wrong ({int((~right).sum())})"
    headline(axes, "Depth and confidence", detail)
    return figure


def accuracy(seen: Seen, bins: int = 4) -> Any:
    """Top-1 of images by how deep they went, with 95 % intervals (Wilson)."""
    if seen.correct is None:
        raise UserError("Accuracy needs labels.")
    figure, axes = _panel("mean depth", lines=2)
    order = np.argsort(seen.mean_depth, kind="stable")
    parts = [p for p in np.array_split(order, min(bins, len(order))) if len(p)]
    share, place = [float(seen.correct[p].mean()) for p in parts], np.arange(len(parts))
    low, high = np.array([wilson(s, len(p)) for s, p in zip(share, parts, strict=True)]).T
    axes.bar(place, share, width=0.62, color=ACCENT, zorder=2)
    axes.vlines(place, low, high, color=INK, linewidth=1.3, zorder=3)
    names = [f"{seen.mean_depth[p].min():.1f}–{seen.mean_depth[p].max():.1f}\n{len(p)} images" for p in parts]
    axes.set_xticks(place, names)
    _per_cent(axes)
    headline(axes, "Accuracy by depth", f"top-1 of all {len(seen)} images: {100 * seen.correct.mean():.1f} %")
    return figure


def importance(found: Importance) -> Any:
    """Correlation of scores with leave-one-out importance at every scored block (A-MoD Fig. 4)."""
    figure, axes = _panel(_LEFT_OUT, "correlation")
    for n, (values, name) in enumerate(((found.pearson, "Pearson"), (found.spearman, "Spearman"))):
        _correlated(axes, found, values, name, (ACCENT, WRONG)[n], n)
    p = found.p_values(found.pearson)
    below = f"p < 0.05 in {int((p < 0.05).sum())} of {int(np.isfinite(p).sum())}"
    headline(axes, "Scores against importance", f"{_taken(found)}; mean, 95 % interval; {below}")
    return figure


def importances(found: Mapping[str, Importance], colours: Sequence[str] = (ACCENT, WRONG)) -> Any:
    """Pearson's correlation with leave-one-out importance, and its p-values, methods side by side (A-MoD Fig. 4)."""
    wide, high, left = 560, 360, 100
    figure = new_figure(2 * (left + wide) + 40, _BELOW + high + _ABOVE)
    upper, lower = (add_axes(figure, left + n * (left + wide), _BELOW, wide, high) for n in (0, 1))
    label_axes(upper, _LEFT_OUT, "correlation")
    label_axes(lower, _LEFT_OUT, "p-value, log scale")
    for n, (name, one) in enumerate(found.items()):
        _correlated(upper, one, one.pearson, name, colours[n], n)
        p = np.maximum(one.p_values(one.pearson), _LEAST)
        x = np.array(one.blocks) + 1 + 0.3 * (n - (len(found) - 1) / 2)
        lower.scatter(np.repeat(x, p.shape[1]), p.ravel(), s=10, color=colours[n], alpha=0.45, linewidths=0, zorder=2)
        known = np.isfinite(p).any(1)
        lower.scatter(x[known], np.nanmedian(p[known], 1), s=260, marker="_", color=colours[n], linewidths=2, zorder=3)
    lower.set(yscale="log", xlim=upper.get_xlim())
    lower.axhline(0.05, color=MUTED, linewidth=1, linestyle=DASHED, zorder=1)
    place = {"xycoords": lower.get_yaxis_transform(), "textcoords": "offset points"}
    lower.annotate("0.05", (0, 0.05), xytext=(2, 3), fontsize=8, color=MUTED, **place)
    lower.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    lower.minorticks_off()
    grid(lower)
    headline(upper, "Scores against importance", f"{_taken(one)}; Pearson's, mean and 95 % interval")
    headline(lower, "p-values", "a point an image, a line their median")
    return figure


_LEFT_OUT = "block from which the patch is left out"
_LEAST = 1e-60  # p-values that are drawn


def _taken(found: Importance) -> str:
    return f"{found.pearson.shape[1]} images, {found.tokens} patches"


def _correlated(axes: Any, found: Importance, values: Array, name: str, colour: str, number: int) -> None:
    """A line of mean correlations by block with their intervals, the first or second of two."""
    blocks, (mean, half) = np.array(found.blocks) + 1, mean_and_half(values)
    good, (marker, sign) = np.isfinite(mean), (("o", "●"), ("s", "■"))[number]
    x, low, high = blocks[good] + (-0.08, 0.08)[number], (mean - half)[good], (mean + half)[good]
    axes.plot(x, mean[good], color=colour, marker=marker, markersize=4.5, linewidth=1.6, zorder=3)
    axes.vlines(x, low, high, color=colour, linewidth=1, zorder=2)
    place = (0.02 + 0.25 * number, 0.04)
    axes.annotate(f"{sign} {name}", place, xycoords="axes fraction", fontsize=8, color=colour)
    axes.axhline(0, color=MUTED, linewidth=1, zorder=1)
    axes.set(xlim=(blocks.min() - 0.6, blocks.max() + 0.6), ylim=(-1.02, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    grid(axes)


def svg(figure: Any, name: str) -> str:
    """The figure as inline SVG in the report's own colours and letters; `name` keeps the ids of several apart."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(xlink:href="#|url\(#)([^")]+)', rf"\1{name}-\2", text)
    for colour, variable in _THEME.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r"(<text [^>]*?)fill: #ffffff", r"\1fill: var(--card)", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    text = re.sub(r"font: ([^;\"]*?)(\d[\d.]*px)[^;\"]*", r"font-size: \2; font-weight: 650", text)
    return re.sub(r'width="[^"]*pt" height="[^"]*pt"', 'aria-hidden="true" focusable="false"', text, count=1)
