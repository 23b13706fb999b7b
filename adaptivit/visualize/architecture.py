"""The architecture of one model with what it did: blocks, planners, supervisors, tokens by block (AHT-ViT Fig. 2)."""

from __future__ import annotations

import io
from typing import Any

import matplotlib
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from ..errors import UserError
from ..utils.plotting import ACCENT, DASHED, FAINT, GREY, INK, MUTED, add_axes, new_figure
from .collect import Seen

_BLOCK, _GAP, _HIGH = 46, 16, 210  # pixels: width of a block, between two, tokens of a static one
_SIDE, _ABOVE, _BELOW = 150, 200, 100
_PLANNER, _SUPERVISOR = "#4c6fb1", "#c2571a"
_VERBS = {"Drop": "halts", "Merge": "merges", "Skip": "skips", "Blend": "halts"}


def architecture(seen: Seen) -> Any:
    """A figure: blocks as high as the tokens that they computed, planners above them, decisions below them."""
    if not len(seen):
        raise UserError("Expected at least one image: the picture shows what was measured.")
    live, total = seen.live.mean(1), seen.prefix + seen.attended.shape[-1]
    step = _BLOCK + _GAP
    width = seen.layers * step - _GAP
    figure = new_figure(max(760, width + 2 * _SIDE), _HIGH + _ABOVE + _BELOW)
    left = (figure.bbox.width - width) / 2
    axes = add_axes(figure, 0, 0, figure.bbox.width, figure.bbox.height)
    axes.set(xlim=(0, figure.bbox.width), ylim=(0, figure.bbox.height), xticks=[], yticks=[])
    axes.spines["bottom"].set_visible(False)
    middles = [left + i * step + _BLOCK / 2 for i in range(seen.layers)]
    for middle, tokens in zip(middles, live, strict=True):
        corner = (middle - _BLOCK / 2, _BELOW)
        axes.add_patch(Rectangle(corner, _BLOCK, _HIGH, facecolor="#f0f2f4", edgecolor=FAINT, zorder=1))
        axes.add_patch(Rectangle(corner, _BLOCK, _HIGH * tokens / total, facecolor=ACCENT, zorder=2))
    for i, (middle, tokens) in enumerate(zip(middles, live, strict=True)):
        inside = tokens > 0.85 * total
        high = _BELOW + _HIGH * tokens / total + (-8 if inside else 6)
        _text(axes, middle, high, f"{tokens:.0f}", "white" if inside else INK, va="top" if inside else "bottom")
        _text(axes, middle, _BELOW + 8, str(i + 1), "white", size=7)
    flow = _BELOW + _HIGH / 2
    _box(axes, left - 78, flow, 96, "patches", f"{total} tokens", INK)
    _box(axes, left + width + 78, flow, 96, "norm, head", f"{live[-1]:.0f} tokens", INK)
    _arrow(axes, (left - 28, flow), (left - 4, flow))
    _arrow(axes, (left + width + 4, flow), (left + width + 28, flow))
    _decisions(axes, seen, middles)
    _planners(axes, seen, middles)
    share = 100 * float(seen.macs.mean()) / seen.static_macs
    detail = f"tokens a block, mean of {len(seen):,} images; {share:.0f} % of static's MACs"
    top = figure.bbox.height - 30
    _text(axes, 28, top, f"{seen.method} on {seen.model}", INK, 10, ha="left", weight="bold")
    _text(axes, 28, top - 24, detail, MUTED, 8, ha="left")
    return figure


def svg(figure: Any) -> bytes:
    """A figure as SVG, the same bytes for the same figure."""
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "adaptivit", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _decisions(axes: Any, seen: Seen, middles: list[float]) -> None:
    """A mark below each block after which tokens may leave, and what it is called."""
    at = [layer for layer in sorted(seen.decisions) if layer < seen.layers]
    for layer in at:
        _arrow(axes, (middles[layer], _BELOW - 6), (middles[layer], _BELOW - 24), _SUPERVISOR)
        axes.plot([middles[layer]], [_BELOW - 36], marker="D", markersize=7, color=_SUPERVISOR, zorder=3)
    if not at:
        return
    what = "supervisor" if seen.plans is not None else "decision"
    verbs = sorted({_VERBS.get(seen.decisions[layer], seen.decisions[layer].lower()) for layer in at})
    axes.plot([middles[at[0]], middles[at[-1]]], [_BELOW - 36] * 2, color=_SUPERVISOR, linewidth=1, zorder=2)
    middle = (middles[at[0]] + middles[at[-1]]) / 2
    _text(axes, middle, _BELOW - 62, f"{what} of each block: {', '.join(verbs)} tokens", _SUPERVISOR)


def _planners(axes: Any, seen: Seen, middles: list[float]) -> None:
    """A box above the block whose tokens a planner reads, with the mean depth that it predicts."""
    if seen.plans is None:
        return
    high = _BELOW + _HIGH + 52
    for s, stage in enumerate(seen.plans.stages):
        of_live = seen.plans.values[s][seen.plans.live[s]]
        mean = f"depth {of_live.mean():.1f}" if of_live.size else "none live"
        _box(axes, middles[stage - 1], high, 60, f"P{s + 1}", mean, _PLANNER, 7.0)
        _arrow(axes, (middles[stage - 1], _BELOW + _HIGH + 4), (middles[stage - 1], high - 22), _PLANNER)
    first, last = middles[seen.plans.stages[0] - 1] - 29, middles[seen.plans.stages[-1] - 1] + 29
    axes.plot([first, last], [high + 30] * 2, color=_PLANNER, linewidth=1, linestyle=DASHED)
    words = "planners: in training, the depth that they predict is the supervisors' target"
    _text(axes, (first + last) / 2, high + 42, words, _PLANNER)


def _box(axes: Any, x: float, y: float, width: float, first: str, second: str, colour: str, size: float = 7.5) -> None:
    style: Any = {"boxstyle": "round,pad=0,rounding_size=6", "facecolor": "white", "edgecolor": colour, "zorder": 3}
    axes.add_patch(FancyBboxPatch((x - width / 2, y - 20), width, 40, **style))
    _text(axes, x, y + 8, first, colour, size)
    _text(axes, x, y - 8, second, MUTED, size - 1)


def _text(axes: Any, x: float, y: float, text: str, colour: str, size: float = 7.5, **more: Any) -> None:
    place = {"ha": "center", "va": "center", "zorder": 4, "parse_math": False}
    axes.text(x, y, text, color=colour, fontsize=size, **place | more)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str = GREY) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=8, color=colour, shrinkA=0, shrinkB=0))
