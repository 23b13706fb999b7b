"""Plots of tables: bars for rows of one cost, and curves over the epochs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

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

_ROW, _WIDE, _LETTER = 30, 520, 8.2  # pixels
_FAR = 6.0  # points below the reference that are off the axis
LABELS = {"top1": "top-1 % on validation", "mean_depth": "mean depth, blocks a patch", "gmacs": "GMACs an image"}
LABELS |= {"accuracy": "accuracy % of training batches, augmented"}
_COLOURS = ("#0f8b80", "#d9622b", "#4c6fb1", "#b0487e", "#8a8f1f", "#7d5fb2", "#2f9e44", "#c2410c")


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

    def rows(self) -> list[dict[str, str]]:
        """As rows of a CSV file."""
        columns = zip(*self.values.values(), strict=True)
        return [
            {"method": self.name, "seed": str(self.seed), "epoch": f"{epoch:.4g}"}
            | {name: f"{value:.6g}" for name, value in zip(self.values, values, strict=True)}
            for epoch, values in zip(self.epochs, columns, strict=True)
        ]


def draw_curves(curves: Sequence[Curve], figures: Sequence[str], title: str) -> bytes:
    """A PNG with a panel a figure and a line a run; runs of one name have one colour."""
    names = list(dict.fromkeys(curve.name for curve in curves))
    styles = dict(zip(names, itertools.cycle(itertools.product(("-", "--", ":"), _COLOURS)), strict=False))
    wide, high, left, gap = 640, 420, 90, 120
    columns = max(1, min(len(names), 2 * len(figures)))
    lines = -(-len(names) // columns)
    below = 84 + 26 * lines
    figure = new_figure(left + len(figures) * (wide + gap) - gap + 40, below + high + 70)
    for number, name in enumerate(figures):
        axes = add_axes(figure, left + number * (wide + gap), below, wide, high)
        for curve in curves:
            style, colour = styles[curve.name]
            first = next(other for other in curves if other.name == curve.name) is curve
            more = {"marker": "o" if len(curve.epochs) < 20 else None, "markersize": 3, "linewidth": 1.4}
            label = curve.name if first else None
            axes.plot(curve.epochs, curve.values[name], color=colour, linestyle=style, label=label, **more)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        grid(axes, "both")
        label_axes(axes, "epoch", LABELS[name])
        headline(axes, "" if number else title, "")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 8 / figure.bbox.height), "ncols": columns}
    figure.legend(handles, labels, **place, fontsize=8, frameon=False, labelcolor=INK)
    return png_bytes(figure)
