"""Plots of tables: bars for rows of one cost, and curves over the epochs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ...utils.plotting import (
    ACCENT,
    DASHED,
    INK,
    MUTED,
    add_axes,
    grid,
    headline,
    label_axes,
    new_figure,
    png_bytes,
)
from ...visualize.pareto import colour_of
from .tables import Table

_ROW, _WIDE, _LETTER = 30, 520, 8.2  # pixels
_FAR = 6.0  # points below the reference that are off the axis
LABELS = {"top1": "top-1 % on validation", "mean_depth": "mean depth, blocks a patch", "gmacs": "GMACs an image"}
LABELS |= {"accuracy": "accuracy % of training batches, augmented"}
_COLOURS = ("#0f8b80", "#d9622b", "#4c6fb1", "#b0487e", "#8a8f1f", "#7d5fb2", "#2f9e44", "#c2410c")
_DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))


@dataclass(frozen=True)
class Bar:
    """One row: its mean difference in points, and half of the 95 % interval."""

    name: str
    points: float
    spread: float
    top1: float  # %


def draw_bars(bars: Sequence[Bar], reference: str, title: str, detail: str) -> bytes:
    """A PNG of differences from the reference with their intervals, the first bar on top."""
    names = [f"{bar.name}   {bar.top1:.2f}" for bar in bars]
    high, left = _ROW * max(len(bars), 1), 24 + round(_LETTER * max(map(len, names), default=0))
    figure = new_figure(left + _WIDE + 40, high + 62 + 84)
    axes = add_axes(figure, left, 62, _WIDE, high)
    headline(axes, title, detail)
    near = [bar for bar in bars if bar.points > -_FAR]
    low = min(0.0, min((bar.points - bar.spread for bar in near), default=-1.0))
    edge = max(0.0, max((bar.points + bar.spread for bar in near), default=0.0))
    span = edge - low or 1.0
    axes.set(xlim=(low - 0.16 * span, edge + 0.16 * span), ylim=(len(bars) - 0.5, -0.5))
    grid(axes, "x")
    axes.axvline(0, color=MUTED, linewidth=1.2, linestyle=DASHED, zorder=1)
    for place, bar in enumerate(bars):
        if bar.points > -_FAR:
            axes.plot([bar.points - bar.spread, bar.points + bar.spread], [place] * 2, color=ACCENT, lw=2, alpha=0.45)
            axes.plot([bar.points], [place], "o", color=ACCENT, markersize=6, zorder=3)
        else:
            side = axes.get_xlim()[0]
            axes.plot([side + 0.015 * span], [place], "<", color=ACCENT, markersize=7, clip_on=False, zorder=3)
            text, beside = f"\N{MINUS SIGN}{-bar.points:.1f}", (side + 0.045 * span, place)
            axes.annotate(text, beside, va="center", fontsize=8, color=INK, parse_math=False)
    axes.set_yticks(range(len(bars)), names, fontsize=8, color=INK)
    label_axes(axes, f"points against {reference}, with 95 % intervals")
    return png_bytes(figure)


@dataclass(frozen=True)
class Curve:
    """One run."""

    name: str
    seed: int
    epochs: list[float]
    values: dict[str, list[float]]  # by figure, as many as epochs
    policy: str = ""  # whose colour it has

    def rows(self) -> list[dict[str, str]]:
        """As rows of a CSV file."""
        columns = zip(*self.values.values(), strict=True)
        return [
            {"method": self.name, "seed": str(self.seed), "epoch": f"{epoch:.4g}"}
            | {name: f"{value:.6g}" for name, value in zip(self.values, values, strict=True)}
            for epoch, values in zip(self.epochs, columns, strict=True)
        ]


def draw_curves(curves: Sequence[Curve], table: Table) -> bytes:
    """A PNG with a panel for each of `curves` and `panels`, and a line a run; runs of one name look alike."""
    panels = table.panels or ("",)
    labels = {curve.name: _without(curve.name, panels) for curve in curves}
    styles = _styles(dict.fromkeys((labels[curve.name], curve.policy) for curve in curves))
    parts = list(itertools.product(panels, table.curves))
    across = 2 if len(parts) == 4 else len(parts)
    wide, high, left, gap, between = (640, 420, 90, 120, 0) if len(panels) == 1 else (520, 330, 90, 100, 110)
    columns = max(1, min(len(styles), 2 * across))
    below = 84 + 26 * -(-len(styles) // columns)
    rows = -(-len(parts) // across)
    figure = new_figure(left + across * (wide + gap) - gap + 40, below + rows * (high + between) - between + 96)
    for number, (panel, name) in enumerate(parts):
        row, column = divmod(number, across)
        axes = add_axes(figure, left + column * (wide + gap), below + (rows - 1 - row) * (high + between), wide, high)
        for curve in curves:
            if panel and panel not in curve.name.split("-"):
                continue
            style, colour = styles[labels[curve.name]]
            more = {"marker": "o" if len(curve.epochs) < 20 else None, "markersize": 3, "linewidth": 1.4}
            axes.plot(curve.epochs, curve.values[name], color=colour, linestyle=style, **more)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        grid(axes, "both")
        label_axes(axes, "epoch", LABELS[name])
        headline(axes, "" if number else table.title, panel)
    handles = [Line2D([], [], color=c, linestyle=s, linewidth=1.4, label=label) for label, (s, c) in styles.items()]
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 8 / figure.bbox.height), "ncols": columns}
    figure.legend(handles=handles, **place, fontsize=8, frameon=False, labelcolor=INK, handlelength=3)
    return png_bytes(figure)


def _without(name: str, panels: Sequence[str]) -> str:
    """amod-tiny-50 -> amod-50 where tiny is a panel."""
    return "-".join(word for word in name.split("-") if word not in panels)


def _styles(lines: Iterable[tuple[str, str]]) -> dict[str, tuple[Any, str]]:
    """(label, policy) -> (dashes, colour) by label: the colour is the policy's, or where that is empty the next."""
    spare, dashes = itertools.cycle(itertools.product(("-", "--", ":"), _COLOURS)), dict[str, Any]()
    found = {}
    for label, policy in lines:
        kinds = dashes.setdefault(policy, itertools.cycle(_DASHES))
        found[label] = (next(kinds), colour_of(policy) or INK) if policy else next(spare)
    return found
