"""The Pareto plot of a comparison as PNG bytes: accuracy against work, and against measured speed.

Drawn like pictures.py: on a canvas of its own, never through pyplot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from .errors import UserError
from .pictures import ACCENT, FAINT, INK, MUTED, _axes, _figure, _headline, _png

# One colour a policy, the same in every plot; policies of one's own take those that are left.
COLOURS = {
    "static": MUTED,
    "aht": ACCENT,
    "avit": "#d1495b",
    "amod": "#3d5a98",
    "mod": "#8ab0e0",
    "dynamicvit": "#e08e1b",
    "evit": "#8e5aa8",
    "tome": "#4c9a2a",
    "fold": "#a3a51c",
    "act": "#8c6239",
    "confidence": "#c86fb0",
    "similarity": "#2aa6c9",
    "pondernet": "#5b5f97",
}
_SPARE = ("#b3541e", "#7a9e9f", "#e36588", "#39375b", "#9a031e", "#606c38")
_PLOT, _HEIGHT = 760, 560  # pixels of one plot
_LEFT, _RIGHT, _BELOW, _ABOVE = 104, 48, 92, 112
_GAP = 3  # pixels between a label and what it must not touch

Box = tuple[float, float, float, float]  # left, bottom, right, top in pixels


@dataclass(frozen=True)
class Point:
    """One method."""

    label: str
    policy: str
    top1: float  # %
    low: float  # its 95 % interval
    high: float
    gmacs: float
    speed: float | None = None  # images/s, where it was measured
    seeds: tuple[tuple[float, float], ...] = ()  # (GMACs, top-1) of every seed, where there are several


def pareto(points: Sequence[Point], *, detail: str = "", reference: str = "static") -> bytes:
    """Accuracy against GMACs; beside it against images/s if every point has a speed.

    detail: what goes under the title. reference: the label of the point whose level is drawn as a line.
    """
    if not points:
        raise UserError("Expected at least one method to plot, got none.")
    timed = all(p.speed is not None for p in points)
    width = _LEFT + _PLOT + _RIGHT
    figure = _figure(2 * width if timed else width, _BELOW + _HEIGHT + _ABOVE)
    colours = _colours(points)
    axes = _axes(figure, _LEFT, _BELOW, _PLOT, _HEIGHT)
    level = next((p.top1 for p in points if p.label == reference), None)
    unit = 1e3 if max(p.gmacs for p in points) < 0.1 else 1.0
    _draw(axes, points, [unit * p.gmacs for p in points], colours, level, cheap=True)
    for p in points:
        for gmacs, top1 in p.seeds:
            axes.scatter([unit * gmacs], [top1], s=9, color=colours[p.policy], alpha=0.45, linewidth=0, zorder=3)
    axes.set_xlabel(
        f"{'GMACs' if unit == 1 else 'MMACs'} an image (less is cheaper)", fontsize=8, color=MUTED, labelpad=8
    )
    _headline(axes, "Accuracy against work", detail or "top-1 % with its 95 % interval")
    if timed:
        axes = _axes(figure, width + _LEFT, _BELOW, _PLOT, _HEIGHT)
        _draw(axes, points, [p.speed or 0.0 for p in points], colours, level, cheap=False)
        axes.set_xlabel("images/s, measured (more is faster)", fontsize=8, color=MUTED, labelpad=8)
        _headline(axes, "Accuracy against measured speed", "compact layout, all models in turn, median")
    return _png(figure)


def front(points: Sequence[Point], x: Sequence[float], cheap: bool) -> list[int]:
    """Indices of the points that no other beats in both directions, from left to right."""
    order = sorted(range(len(points)), key=lambda i: (x[i] if cheap else -x[i], -points[i].top1))
    best, kept = -math.inf, []
    for i in order:
        if points[i].top1 > best:
            best = points[i].top1
            kept.append(i)
    return kept if cheap else kept[::-1]


def _colours(points: Sequence[Point]) -> dict[str, str]:
    others = [p for p in dict.fromkeys(p.policy for p in points) if p not in COLOURS]
    return COLOURS | {policy: _SPARE[i % len(_SPARE)] for i, policy in enumerate(others)}


def _draw(
    axes: Any,
    points: Sequence[Point],
    x: Sequence[float],
    colours: dict[str, str],
    level: float | None,
    cheap: bool,
) -> None:
    _limits(axes, points, x)
    axes.grid(True, color=FAINT, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    for locate in (axes.xaxis, axes.yaxis):
        locate.set_major_locator(MaxNLocator(6))
    axes.set_ylabel("top-1 %", fontsize=8, color=MUTED, labelpad=8)
    kept = front(points, x, cheap)
    lines = _level(axes, level) + _front_line(axes, [(x[i], points[i].top1) for i in kept], cheap)
    faint = 0.5 if len(points) <= 14 else 0.35
    for i, p in enumerate(points):
        colour = colours[p.policy]
        axes.plot([x[i], x[i]], [p.low, p.high], color=colour, linewidth=1.3, alpha=faint, zorder=3)
        lines.append(_thin(axes, (x[i], p.low), (x[i], p.high)))
        edge = INK if i in kept else "white"
        axes.scatter([x[i]], [p.top1], s=46, color=colour, edgecolor=edge, linewidth=1.1, zorder=5)
    _labels(axes, points, x, colours, lines)


def _level(axes: Any, level: float | None) -> list[Box]:
    """Static's accuracy as a dashed line; returns where it runs, for the labels to keep away."""
    if level is None:
        return []
    axes.axhline(level, color=MUTED, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1)
    left, right = axes.get_xlim()
    return [_thin(axes, (left, level), (right, level))]


def _front_line(axes: Any, steps: list[tuple[float, float]], cheap: bool) -> list[Box]:
    """The front as a step line from its points: what is to be had at each cost; returns where it runs."""
    left, right = axes.get_xlim()
    ends = [*steps, (right, steps[-1][1])] if cheap else [(left, steps[0][1]), *steps]
    corners = [ends[0]]
    for (x0, y0), (x1, y1) in itertools.pairwise(ends):
        corners += [(x1, y0) if cheap else (x0, y1), (x1, y1)]
    axes.plot(*zip(*corners, strict=True), color=INK, linewidth=1.6, alpha=0.28, zorder=2, solid_joinstyle="miter")
    return [_thin(axes, a, b) for a, b in itertools.pairwise(corners)]


def _limits(axes: Any, points: Sequence[Point], x: Sequence[float]) -> None:
    low, high = min(p.low for p in points), max(p.high for p in points)
    room = max(0.12 * (high - low), 0.5)
    axes.set_ylim(max(low - room, -room / 2), min(high + room, 100 + room / 2))
    span = max(x) - min(x)
    room = 0.14 * span if span > 0.02 * max(x) else 0.2 * max(x)
    axes.set_xlim(max(0.0, min(x) - room), max(x) + room)


def _box(axes: Any, x: float, y: float, radius: float) -> Box:
    """A square of pixels around a place of the data."""
    px, py = (float(v) for v in axes.transData.transform((x, y)))
    return (px - radius, py - radius, px + radius, py + radius)


def _labels(axes: Any, points: Sequence[Point], x: Sequence[float], colours: dict[str, str], lines: list[Box]) -> None:
    """Put every label at the nearest free place around its point; one that had to go far gets a thin line."""
    renderer, frame = axes.figure.canvas.get_renderer(), axes.get_window_extent()
    size = 7.5 if len(points) <= 14 else 6.5
    taken = [_box(axes, x[i], p.top1, 9) for i, p in enumerate(points)]
    crowded = sorted(range(len(points)), key=lambda i: -_neighbours(taken[: len(points)], i))
    for i in crowded:
        p = points[i]
        place = {"textcoords": "offset pixels", "annotation_clip": False, "parse_math": False, "zorder": 6}
        place |= {"fontsize": size, "color": _dark(colours[p.policy])}
        text = axes.annotate(_short(p.label), (x[i], p.top1), xytext=(0, 0), **place)
        text.set_path_effects([withStroke(linewidth=2.2, foreground="white")])
        extent = text.get_window_extent(renderer)
        width, height = extent.width, extent.height
        px, py = (float(v) for v in axes.transData.transform((x[i], p.top1)))
        best, least = (12.0, 0.0, 12.0), math.inf
        for dx, dy, distance in _places(width, height):
            left, bottom = px + dx, py + dy
            box = (left - _GAP, bottom - _GAP, left + width + _GAP, bottom + height + _GAP)
            if box[0] < frame.x0 or box[2] > frame.x1 or box[1] < frame.y0 or box[3] > frame.y1:
                continue
            hidden = sum(_overlap(box, other) for other in taken) + 0.1 * sum(_overlap(box, line) for line in lines)
            if hidden + distance < least:
                best, least = (dx, dy, distance), hidden + distance
        dx, dy, distance = best
        text.set_position((dx, dy))
        taken.append((px + dx, py + dy, px + dx + width, py + dy + height))
        if distance > 26:
            _leader(axes, (px, py), taken[-1], colours[p.policy])


def _short(label: str) -> str:
    return label if len(label) <= 44 else label[:43] + "…"


def _places(width: float, height: float) -> Iterator[tuple[float, float, float]]:
    """(dx, dy, distance) of a label's lower left corner: right, left, above, below, then all around and further."""
    for distance in (11, 17, 24, 34, 46, 60, 76, 94, 114, 138):
        for step in range(16):
            angle = math.pi * (0, 16, 2, 14, 30, 18, 8, 24, 4, 12, 28, 20, 6, 10, 26, 22)[step] / 16
            cx, cy = math.cos(angle), math.sin(angle)
            dx = distance * cx - width * (1 - cx) / 2
            yield dx, distance * cy - height * (1 - cy) / 2, distance + step / 16


def _thin(axes: Any, a: tuple[float, float], b: tuple[float, float]) -> Box:
    """The pixels of a level or upright line."""
    (x0, y0), (x1, y1) = axes.transData.transform((a, b)).tolist()
    return (min(x0, x1) - 2, min(y0, y1) - 2, max(x0, x1) + 2, max(y0, y1) + 2)


def _overlap(a: Box, b: Box) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return 8 + width * height if width > 0 and height > 0 else 0.0


def _neighbours(boxes: Sequence[Box], i: int) -> int:
    return sum(abs(b[0] - boxes[i][0]) < 120 and abs(b[1] - boxes[i][1]) < 40 for b in boxes)


def _leader(axes: Any, point: tuple[float, float], label: Box, colour: str) -> None:
    left, bottom, right, top = label
    nearest = (min(max(point[0], left), right), min(max(point[1], bottom), top))
    ends = axes.transData.inverted().transform((point, nearest))
    axes.plot(ends[:, 0], ends[:, 1], color=colour, linewidth=0.6, alpha=0.7, zorder=4, scalex=False, scaley=False)


def _dark(colour: str) -> str:
    """The colour, dark enough to read as text."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    shade = min(1.0, 110 / max(1.0, 0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2]))
    return "#" + "".join(f"{round(part * shade):02x}" for part in parts)
