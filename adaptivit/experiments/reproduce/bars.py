"""Rows of one cost, one below the other: the difference from the reference with its interval. For ablations, where a
plot against cost would put all points onto one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...utils.plotting import ACCENT, DASHED, INK, MUTED, add_axes, grid, headline, label_axes, new_figure, png_bytes

_RIGHT, _BELOW, _ABOVE = 40, 62, 84  # pixels
_ROW, _WIDE, _LETTER = 30, 520, 8.2
_FAR = 6.0  # points below the reference that are off the axis


@dataclass(frozen=True)
class Bar:
    """One row: its mean difference in points, and half of the 95 % interval."""

    name: str
    points: float
    spread: float
    top1: float  # %


def draw(bars: Sequence[Bar], reference: str, title: str, detail: str) -> bytes:
    """A PNG; the first bar is on top."""
    names = [f"{bar.name}   {bar.top1:.2f}" for bar in bars]
    high, left = _ROW * max(len(bars), 1), 24 + round(_LETTER * max(map(len, names), default=0))
    figure = new_figure(left + _WIDE + _RIGHT, high + _BELOW + _ABOVE)
    axes = add_axes(figure, left, _BELOW, _WIDE, high)
    headline(axes, title, detail)
    near = [bar for bar in bars if bar.points > -_FAR]
    low = min((bar.points - bar.spread for bar in near), default=-1.0)
    edge = max((bar.points + bar.spread for bar in near), default=0.0)
    span = max(edge, 0.0) - min(low, 0.0) or 1.0
    axes.set_xlim(min(low, 0.0) - 0.16 * span, max(edge, 0.0) + 0.16 * span)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    grid(axes, "x")
    axes.axvline(0, color=MUTED, linewidth=1.2, linestyle=DASHED, zorder=1)
    for place, bar in enumerate(bars):
        if bar.points > -_FAR:
            axes.plot([bar.points - bar.spread, bar.points + bar.spread], [place] * 2, color=ACCENT, lw=2, alpha=0.45)
            axes.plot([bar.points], [place], "o", color=ACCENT, markersize=6, zorder=3)
        else:
            side = axes.get_xlim()[0]
            axes.plot([side + 0.015 * span], [place], "<", color=ACCENT, markersize=7, clip_on=False, zorder=3)
            written, place_of = f"\N{MINUS SIGN}{-bar.points:.1f}", (side + 0.045 * span, place)
            axes.annotate(written, place_of, va="center", fontsize=8, color=INK, parse_math=False)
    axes.set_yticks(range(len(bars)), names, fontsize=8, color=INK)
    label_axes(axes, f"points against {reference}, with 95 % intervals")
    return png_bytes(figure)
