"""The rows of a benchmark on disk and for people: benchmark.csv, a table, Markdown, and charts as PNG bytes.

Charts are drawn like pictures.py: on canvases of their own, never through pyplot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table
from rich.text import Text

from ...errors import UserError
from ...utils.csv import read_csv
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
from ...utils.text import markdown_table
from ...visualize.pareto import colour_of
from ..compare.table import shortened
from .contenders import BASELINES, BEST, COMPILED, OWN, TIMM

COLUMNS = (
    *("date", "device", "torch", "triton", "timm", "adaptivit", "commit", "backbone", "img_size", "batch", "dtype"),
    *("contender", "policy", "layout", "static_mode", "plan", "gmacs", "mac_share", "mean_live_share"),
    *("ms_p20", "ms_p50", "ms_p80", "images_per_s", "speed_vs_best_static", "speed_vs_timm", "speed_vs_own_static"),
    *("relative_error", "top1_agreement", "peak_mib", "threads", "repeats", "seed", "status", "reason"),
)
_STATIC = {TIMM: "#c3c9ce", COMPILED: "#9aa3ab", BEST: "#59636c", OWN: "#9fd0cb"}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

Row = dict[str, str]  # every cell is text, empty where nothing is known


# -- the file -------------------------------------------------------------------------------------------------------
def read(path: Path) -> list[Row]:
    """The rows of an earlier run, none where there is no file; refuses one that is no benchmark's."""
    rows = read_csv(path)
    if not all({"contender", "ms_p50", "status"} <= set(row) for row in rows):
        raise UserError(f"{path} is not a benchmark's CSV file: pass another --out.")
    return rows


# -- tables ---------------------------------------------------------------------------------------------------------
def label(row: Row) -> str:
    """The contender with its layout, where it has a choice."""
    return row["contender"] if row["contender"] in BASELINES else f"{row['contender']} ({row['layout']})"


def groups(rows: Sequence[Row], *names: str) -> list[list[Row]]:
    """Rows that agree in these columns, in the order in which they came."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(found.values())


def _line(row: Row) -> dict[str, str]:
    if row["status"] != "ok":
        return {"contender": label(row), "ms (p20, p80)": "failed"}

    def number(name: str, form: str) -> str:
        return format(float(row[name]), form) if row[name] else "—"

    low, mid, high = (float(row[f"ms_p{p}"]) for p in (20, 50, 80))
    return {
        "contender": label(row) + (f", {row['static_mode']}" if row["contender"] == BEST else ""),
        "ms (p20, p80)": f"{mid:.4g} ({low:.4g}, {high:.4g})",
        "images/s": _rate(float(row["images_per_s"])),
        "× best static": number("speed_vs_best_static", ".2f"),
        "× timm": number("speed_vs_timm", ".2f"),
        "× own static": number("speed_vs_own_static", ".2f"),
        "GMACs": number("gmacs", ".3g"),
        "MACs": f"{100 * float(row['mac_share']):.1f} %",
        "error": number("relative_error", ".1e"),
        "MiB": number("peak_mib", ".0f"),
    }


_HEADINGS = (
    *("contender", "ms (p20, p80)", "images/s", "× best static", "× timm", "× own static"),
    *("GMACs", "MACs", "error", "MiB"),
)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _title(row: Row) -> str:
    return f"{row['backbone']}, {row['img_size']} px, {row['dtype']}, batch {row['batch']}"


def screen(rows: Sequence[Row]) -> list[Table]:
    """One table a configuration, then the reasons of what failed in it."""
    tables = []
    for group in groups(rows, "backbone", "dtype", "batch"):
        names = [name for name in _HEADINGS if name != "MiB" or any(row["peak_mib"] for row in group)]
        reasons = "\n".join(f"{label(row)}: {row['reason']}" for row in group if row["reason"])
        table = Table(title=_title(group[0]), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.caption, table.caption_justify = Text(reasons) if reasons else None, "left"
        for name in names:
            table.add_column(name, justify="left" if name == "contender" else "right", no_wrap=name != "contender")
        for row in group:
            line = _line(row)
            style = "red" if row["status"] != "ok" else None
            table.add_row(*(Text(line.get(name, "")) for name in names), style=style)
        tables.append(table)
    return tables


def markdown(rows: Sequence[Row], command: str) -> str:
    """The same tables with their caption."""
    text = ["# Benchmark", ""]
    for group in groups(rows, "backbone", "dtype", "batch"):
        body = [[_line(row).get(name, "") for name in _HEADINGS] for row in group]
        text += [f"## {_title(group[0])}", ""]
        text += [*markdown_table(_HEADINGS, body), ""]
        text += [f"- {label(row)}: {row['reason']}" for row in group if row["reason"]]
        text += [""] * any(row["reason"] for row in group)
    first = rows[0]
    versions = ", ".join(f"{name} {first[name]}" for name in ("adaptivit", "torch", "triton", "timm") if first[name])
    commit = f", commit {first['commit']}" if first["commit"] else ""
    return "\n".join(
        [
            *text,
            f"`{command}`",
            "",
            f"{first['date']}; {first['device']}, {first['threads']} CPU threads; {versions}{commit}; seed "
            f"{first['seed']}. All contenders of a table ran in turn, {first['repeats']} turns; ms are those of a "
            "batch, × are medians of the ratios within a turn, MACs the share of the static model's. Raw figures: "
            "[benchmark.csv](benchmark.csv).",
            "",
            *(
                ["![Speed against the best static model](bars.png)", ""]
                if any(r["status"] == "ok" for r in rows)
                else []
            ),
        ]
    )


# -- charts ---------------------------------------------------------------------------------------------------------
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
    against = next((n for n in (BEST, TIMM, OWN) if all(_speeds(g, n) for g in _panels(rows))), None)
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


def _panels(rows: Sequence[Row]) -> list[list[Row]]:
    return groups(rows, "backbone", "dtype", "batch")


def _speeds(group: Sequence[Row], against: str | None) -> list[float]:
    """Speed of every row against a baseline, nothing where that has failed."""
    columns = {BEST: "speed_vs_best_static", TIMM: "speed_vs_timm", OWN: "speed_vs_own_static"}
    column = columns[against] if against else "images_per_s"
    return [float(row[column]) for row in group] if all(row[column] for row in group) else []


def _bars(axes: Any, group: list[Row], against: str | None, colours: dict[str, str], names: dict[str, str]) -> None:
    values = _speeds(group, against)
    places = list(range(len(group)))[::-1]
    axes.barh(places, values, height=0.72, color=[colours[label(row)] for row in group], zorder=2)
    rates = [f"{_rate(float(row['images_per_s']))}/s" for row in group]
    texts = [f"{value:.2f}×  {rate}" if against else rate for value, rate in zip(values, rates, strict=True)]
    for place, value, text in zip(places, values, texts, strict=True):
        spot = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 7.5, "zorder": 4}
        axes.annotate(
            text, (value, place), color=INK, path_effects=[withStroke(linewidth=2.4, foreground="white")], **spot
        )
    taken = (_widest(texts, 7.5) + 16) / axes.get_window_extent().width  # by the text behind a bar
    axes.set_xlim(0, max(values) / (1 - min(taken, 0.8)))
    axes.set_ylim(-0.6, len(group) - 0.4)
    axes.set_yticks(places, [names.get(label(row), "") for row in group])
    axes.tick_params(axis="y", labelcolor=INK)
    if against:
        axes.plot([1, 1], [-0.6, len(group) - 0.4], color=INK, linewidth=0.9, linestyle=DASHED, zorder=1)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=STEPS))
    grid(axes, "x")
    label_axes(axes, f"images/s, {against} = 1" if against else "images/s")
    first = group[0]
    mode = next((row["static_mode"] for row in group if row["contender"] == BEST), "")
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
    box_ = figure.legend(handles=handles, loc="upper left", bbox_to_anchor=place, frameon=False, fontsize=8)
    for text in box_.get_texts():
        text.set(color=INK, parse_math=False)
    return png_bytes(figure)


def _cloud(axes: Any, group: list[Row], colours: dict[str, str], batches: dict[str, str]) -> None:
    x = [100 * float(row["mac_share"]) for row in group]
    y = [float(row["speed_vs_own_static"]) for row in group]
    low, high = max(1.0, min(x) - 8), max(100.0, max(x)) + 6
    for row, share, speed in zip(group, x, y, strict=True):
        style = {"s": 52, "marker": batches[row["batch"]], "edgecolor": "white", "linewidth": 0.8, "zorder": 4}
        axes.scatter([share], [speed], color=colours[label(row)], **style)
    curve = [low + (high - low) * i / 100 for i in range(101)]
    axes.plot(curve, [100 / share for share in curve], color=INK, linestyle=DASHED, linewidth=1.1, zorder=3)
    axes.plot([low, high], [1, 1], color=FAINT, linewidth=1.2, zorder=1)
    axes.set_xlim(low, high)
    axes.set_ylim(max(0.0, math.floor(10 * min(*y, 1.0)) / 10 - 0.1), 1.06 * max(*y, 100 / low))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    grid(axes, "both")
    label_axes(axes, "MACs that ran, share of the static model's")
    first = group[0]
    detail = f"{first['backbone']}, {first['dtype']}; times as fast as our own static model"
    headline(axes, "Speed against work", detail)
