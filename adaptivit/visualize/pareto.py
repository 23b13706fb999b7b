"""The Pareto plot of a comparison as PNG bytes: accuracy against work, and against measured speed.

Drawn like pictures.py: on a canvas of its own, never through pyplot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from ..errors import UserError
from ..policies import get, known
from ..utils.plotting import (
    DASHED,
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

_PLOT, _HEIGHT = 660, 540  # pixels of one plot
_LEFT, _RIGHT, _BELOW, _ABOVE = 100, 40, 84, 112
_GAP = 3  # pixels between a label and what it must not touch
_ROW = 24  # pixels of a line of the legend, and of points below the axis
FEW = 10  # so many points have their full names
_FAR = 12.0  # points of top-1 below static that are off the axis
_PIXELS: dict[str, Any] = {"xytext": (0, 0), "textcoords": "offset pixels", "parse_math": False}

Box = tuple[float, float, float, float]  # left, bottom, right, top in pixels


@dataclass(frozen=True)
class Point:
    """One method."""

    label: str
    policy: str
    top1: float  # %
    low: float  # its 95 % interval; the same as top1 where it has none
    high: float
    gmacs: float
    speed: float | None = None  # images/s, where it was measured
    seeds: tuple[tuple[float, float], ...] = ()  # (GMACs, top-1) of every seed, where there are several
    paired: bool = False  # the interval is that of the difference from static on the same images
    short: str = ""  # what is written at it; its label where empty
    curve: str = ""  # points with the same are joined; the policy where empty
    hollow: bool = False  # drawn without filling, and joined by a dashed line


def pareto(points: Sequence[Point], *, detail: str = "", reference: str = "static") -> bytes:
    """Accuracy against GMACs; beside it against images/s if every point has a speed.

    detail: what goes under the title. reference: the label of the point whose level is drawn as a line.
    """
    return png_bytes(drawn(points, detail, reference))


def drawn(points: Sequence[Point], detail: str = "", reference: str = "static") -> Any:
    """The figure of pareto()."""
    if not points:
        raise UserError("Expected at least one method to plot, got none.")
    speeds = [p.speed for p in points if p.speed is not None]
    timed = len(speeds) == len(points)
    width = _LEFT + _PLOT + _RIGHT
    spare = itertools.cycle(SPARE)
    colours = {policy: colour_of(policy) or next(spare) for policy in dict.fromkeys(p.policy for p in points)}
    rows = math.ceil((len(colours) + 1) / ((width * (1 + timed) - 60) // 150)) if len(colours) > 1 else 0
    below = _BELOW + _ROW * rows + 10 * bool(rows)
    figure = new_figure(width * (1 + timed), below + _HEIGHT + _ABOVE)
    if rows:
        _legend(figure, colours, math.ceil((len(colours) + 1) / rows))
    level = next((p.top1 for p in points if p.label == reference), None)
    unit, name = (1e3, "MMACs") if max(p.gmacs for p in points) < 0.1 else (1.0, "GMACs")
    axes = add_axes(figure, _LEFT, below, _PLOT, _HEIGHT)
    _Panel(axes, points, [unit * p.gmacs for p in points], colours, level, cheap=True).draw()
    label_axes(axes, f"{name} an image{_scale(axes)} (less is cheaper)")
    headline(axes, "Accuracy against work", detail)
    note = axes.annotate(_bars(points, reference), (0, 1), xycoords="axes fraction", color=MUTED, **_PIXELS)
    note.set(position=(0, 10), fontsize=8)
    if timed:
        axes = add_axes(figure, width + _LEFT, below, _PLOT, _HEIGHT)
        _Panel(axes, points, speeds, colours, level, cheap=False).draw()
        label_axes(axes, f"images/s, measured{_scale(axes)} (more is faster)")
        headline(axes, "Accuracy against measured speed", "compact layout, all models in turn, median")
    return figure


def front(points: Sequence[Point], x: Sequence[float], cheap: bool) -> list[int]:
    """Indices of the points that no other beats in both directions, from left to right."""
    order = sorted(range(len(points)), key=lambda i: (x[i] if cheap else -x[i], -points[i].top1))
    best, kept = -math.inf, []
    for i in order:
        if points[i].top1 > best:
            best = points[i].top1
            kept.append(i)
    return kept if cheap else kept[::-1]


def below_axis(points: Sequence[Point], level: float | None) -> set[int]:
    """Indices of the points so far below static that they would press all others into a line; none without it."""
    found = {i for i, p in enumerate(points) if level is not None and p.top1 < level - _FAR}
    return found if len(points) - len(found) >= 3 else set()


def colour_of(policy: str) -> str:
    """The colour of a policy, the same in every plot; empty where it has none."""
    return get(policy).colour if known(policy) else ""


def _scale(axes: Any) -> str:
    return ", log scale" if axes.get_xscale() == "log" else ""


# -- drawing --------------------------------------------------------------------------------------------------------
def _bars(points: Sequence[Point], reference: str) -> str:
    kinds = {p.paired for p in points if p.high > p.low}
    what = f"the paired difference from {reference}" if True in kinds else "top-1"
    return f"bars: 95 % interval of {what}" if kinds else ""


def _legend(figure: Any, colours: dict[str, str], columns: int) -> None:
    dot: dict[str, Any] = {"marker": "o", "markersize": 5.5, "markeredgecolor": "white", "linewidth": 1.2}
    handles = [
        Line2D([], [], color=colour, label=name, linestyle=DASHED if name == "static" else "-", **dot)
        for name, colour in colours.items()
    ]
    handles.append(Line2D([], [], color=INK, alpha=0.35, linewidth=1.2, label="front"))
    style = {"fontsize": 8, "labelcolor": INK, "handlelength": 2.6, "columnspacing": 1.8, "borderpad": 0}
    place = (0.5, 8 / figure.bbox.height)
    figure.legend(handles=handles, ncols=columns, loc="lower center", bbox_to_anchor=place, frameon=False, **style)


@dataclass
class _Panel:
    axes: Any
    points: Sequence[Point]
    x: Sequence[float]
    colours: dict[str, str]
    level: float | None
    cheap: bool
    lines: list[Box] = field(default_factory=list)  # where lines run, for the labels to keep away from

    def draw(self) -> None:
        axes, x = self.axes, self.x
        far = below_axis(self.points, self.level)
        shown = [i for i in range(len(x)) if i not in far]
        self._across()
        label_axes(axes, y="top-1 %")
        grid(axes, "both")
        floor = self._limits(shown, self._strip(sorted(far, key=x.__getitem__)))
        best = [i for i in front(self.points, x, self.cheap) if i in shown]
        self._front_line([(x[i], self.points[i].top1) for i in best])
        if self.level is not None:
            self._line([(end, self.level) for end in axes.get_xlim()], MUTED, linestyle=DASHED, zorder=1)
        for curve in dict.fromkeys(p.curve or p.policy for p in self.points):
            chosen = [i for i in shown if (self.points[i].curve or self.points[i].policy) == curve]
            if len(chosen) > 1:
                first = self.points[chosen[0]]
                style = DASHED if first.hollow else "-"
                path = sorted((x[i], self.points[i].top1) for i in chosen)
                self._line(path, self.colours[first.policy], linestyle=style, zorder=2.5)
        for i in shown:
            self._dot(i, INK if i in best else "white")
        self._labels(self._worth(shown, best), shown, floor)

    def _across(self) -> None:
        low, high = min(self.x), max(self.x)
        if high > (10 if self.cheap else 4) * low > 0:
            self.axes.set_xscale("log")
            self.axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if high < 20 * low else (1, 3)))
            self.axes.xaxis.set_minor_locator(NullLocator())
            self.axes.set_xlim(low * (low / high) ** 0.12, high * (high / low) ** 0.12)
            self.axes.xaxis.set_major_formatter("{x:g}")
        else:
            room = 0.12 * (high - low) if high - low > 0.02 * high else 0.2 * high
            self.axes.set_xlim(max(0.0, low - room), high + room)
            self.axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
        if high >= 1000:
            self.axes.xaxis.set_major_formatter("{x:,.0f}")

    def _strip(self, far: list[int]) -> int:
        """Points below the axis as triangles with their values, in rows at its bottom edge; returns their height."""
        across, renderer = self.axes.get_xaxis_transform(), self.axes.figure.canvas.get_renderer()
        ends: list[float] = []  # of the rows
        for i in far:
            p, colour = self.points[i], self.colours[self.points[i].policy]
            text = f"{p.top1:.1f} %" if len(self.points) > FEW else f"{p.short or p.label}: {p.top1:.1f} %"
            label = self.axes.annotate(text, (self.x[i], 0), xycoords=across, color=_dark(colour), gid="far", **_PIXELS)
            label.set(fontsize=7, va="center_baseline")
            px, width = float(across.transform((self.x[i], 0))[0]), label.get_window_extent(renderer).width
            flip = px + 14 + width > self.axes.bbox.x1
            free = next((r for r, end in enumerate(ends) if end < px - 14 - flip * width), len(ends))
            row = min(free, 7)  # eight rows at most, then triangles without a value
            ends[row : row + 1] = [px + 14 + (not flip) * width]
            up = (row + 0.5) * _ROW
            label.set(position=(-11 if flip else 11, up), ha="right" if flip else "left", visible=row == free)
            self.axes.scatter([self.x[i]], [up / _HEIGHT], s=32, marker="v", color=colour, transform=across, zorder=5)
        return len(ends) * _ROW

    def _limits(self, shown: list[int], strip: int) -> float:
        """The y axis of the points that are shown, above the strip of those that are not; returns where it begins."""
        ends = [v for i in shown for p in [self.points[i]] for v in (p.low, p.high, *(top1 for _, top1 in p.seeds))]
        room = max(0.07 * (max(ends) - min(ends)), 0.5)
        low, high = max(min(ends) - room, -room / 2), min(max(ends) + room, 100 + room / 2)
        bottom = low - (high - low) * strip / (_HEIGHT - strip)
        self.axes.set_ylim(bottom, high)
        self.axes.set_yticks([t for t in MaxNLocator(7, steps=STEPS).tick_values(low, high) if low <= t <= high])
        if strip:
            self.axes.axhspan(bottom, low, color="#f3f5f6", linewidth=0, zorder=0)
        return low

    def _line(self, path: list[tuple[float, float]], colour: str, **style: Any) -> None:
        self.axes.plot(*zip(*path, strict=True), color=colour, **{"linewidth": 1.1} | style)
        for (x0, y0), (x1, y1) in itertools.pairwise(self.axes.transData.transform(path).tolist()):
            steps = max(1, round(math.hypot(x1 - x0, y1 - y0) / 6))
            places = [(x0 + (x1 - x0) * k / steps, y0 + (y1 - y0) * k / steps) for k in range(steps + 1)]
            self.lines += [(px - 3, py - 3, px + 3, py + 3) for px, py in places]

    def _front_line(self, steps: list[tuple[float, float]]) -> None:
        """The front as a step line from its points: what is to be had at each cost."""
        left, right = self.axes.get_xlim()
        ends = [*steps, (right, steps[-1][1])] if self.cheap else [(left, steps[0][1]), *steps]
        corners = [ends[0]]
        for (x0, y0), (x1, y1) in itertools.pairwise(ends):
            corners += [(x1, y0) if self.cheap else (x0, y1), (x1, y1)]
        self._line(corners, INK, linewidth=1.2, alpha=0.3, zorder=1.5)

    def _dot(self, i: int, edge: str) -> None:
        p, x, many = self.points[i], self.x[i], len(self.points) > FEW
        colour = self.colours[p.policy]
        if p.high > p.low:
            self._line([(x, p.low), (x, p.high)], colour, alpha=0.25 if many else 0.45, zorder=2)
        size, inside, border = 30 if many else 44, "white" if p.hollow else colour, colour if p.hollow else edge
        width = 1.4 if p.hollow else 0.9
        self.axes.scatter([x], [p.top1], s=size, color=inside, edgecolor=border, linewidth=width, zorder=5)
        for gmacs, top1 in p.seeds if self.cheap else ():
            self._line([(gmacs * x / p.gmacs, top1)] * 2, colour, marker=".", alpha=0.35, markeredgewidth=0, zorder=3)

    def _worth(self, shown: list[int], best: list[int]) -> list[int]:
        """Which points to label, most important first: static, the front, and of many only what lies near it."""

        def gap(i: int) -> float:
            cheaper = [j for j in best if (self.x[j] <= self.x[i]) == self.cheap or self.x[j] == self.x[i]]
            return max(self.points[j].top1 for j in [i, *cheaper]) - self.points[i].top1

        low, high = self.axes.get_ylim()
        near = [i for i in shown if len(self.points) <= FEW or gap(i) < 0.15 * (high - low)]
        return sorted(near, key=lambda i: (self.points[i].top1 != self.level, i not in best, gap(i)))

    def _labels(self, chosen: list[int], shown: list[int], floor: float) -> None:
        """Labels at the nearest free place around their points, none where nothing is free."""
        axes, many = self.axes, len(self.points) > FEW
        renderer, frame = axes.figure.canvas.get_renderer(), axes.get_window_extent()
        dots = {i: axes.transData.transform((self.x[i], self.points[i].top1)).tolist() for i in shown}
        bottom = float(axes.transData.transform((0, floor))[1])
        taken: list[Box] = [(px - 8, py - 8, px + 8, py + 8) for px, py in dots.values()]
        for i in chosen:
            p, (px, py), colour = self.points[i], dots[i], _dark(self.colours[self.points[i].policy])
            at = (self.x[i], p.top1)
            text = axes.annotate(p.short or p.label, at, color=colour, gid="label", zorder=6, **_PIXELS)
            text.set(fontsize=7 if many else 7.5, path_effects=[withStroke(linewidth=2.2, foreground="white")])
            extent, found = text.get_window_extent(renderer), list[tuple[float, float, Box]]()
            for dx, dy, distance in _places(extent.width, extent.height, 46 if many else 138):
                box = (px + dx - _GAP, py + dy - _GAP, px + dx + extent.width + _GAP, py + dy + extent.height + _GAP)
                inside = frame.x0 <= box[0] and box[2] <= frame.x1 and bottom <= box[1] and box[3] <= frame.y1
                if inside and not any(_overlap(box, other) for other in taken):
                    found.append((distance + 4 * sum(_overlap(box, line) for line in self.lines), distance, box))
            cost, distance, box = min(found, default=(math.inf, 0.0, (0.0, 0.0, 0.0, 0.0)))
            if cost > (70 if many else 1e3):
                text.remove()
                continue
            taken.append(box)
            text.set_position((box[0] + _GAP - px, box[1] + _GAP - py))
            if distance > (20 if many else 30):
                nearest = (min(max(px, box[0] + _GAP), box[2] - _GAP), min(max(py, box[1] + _GAP), box[3] - _GAP))
                ends = axes.transData.inverted().transform(((px, py), nearest))
                axes.plot(*ends.T, color=colour, linewidth=0.6, alpha=0.7, zorder=4)


def _places(width: float, height: float, furthest: float) -> Iterator[tuple[float, float, float]]:
    """(dx, dy, distance) of a label's lower left corner: right, left, above, below, then all around and further."""
    for distance in (d for d in (11, 17, 24, 34, 46, 60, 76, 94, 114, 138) if d <= furthest):
        for step in range(16):
            angle = math.pi * (0, 16, 2, 14, 30, 18, 8, 24, 4, 12, 28, 20, 6, 10, 26, 22)[step] / 16
            cx, cy = math.cos(angle), math.sin(angle)
            dx = distance * cx - width * (1 - cx) / 2
            yield dx, distance * cy - height * (1 - cy) / 2, distance + step / 16


def _overlap(a: Box, b: Box) -> bool:
    return min(a[2], b[2]) > max(a[0], b[0]) and min(a[3], b[3]) > max(a[1], b[1])


def _dark(colour: str) -> str:
    """The colour, dark enough to read as text."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    shade = min(1.0, 110 / max(1.0, 0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2]))
    return "#" + "".join(f"{round(part * shade):02x}" for part in parts)
