"""The rows of a benchmark: their columns, tables for the screen, and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from ...errors import UserError
from ...utils.console import screen_table
from ...utils.csv import read_csv
from ...utils.text import markdown_table
from .contenders import BASELINES, BEST

COLUMNS = (
    *("date", "device", "torch", "triton", "timm", "adaptivit", "commit", "backbone", "img_size", "batch", "dtype"),
    *("contender", "policy", "layout", "static_mode", "plan", "gmacs", "mac_share", "mean_live_share"),
    *("ms_p20", "ms_p50", "ms_p80", "images_per_s", "speed_vs_best_static", "speed_vs_timm", "speed_vs_own_static"),
    *("relative_error", "top1_agreement", "peak_mib", "threads", "repeats", "seed", "status", "reason"),
)
_FIRST = ("contender", "ms (p20, p80)")
# heading -> column, format
_FIGURES = {
    "images/s": ("images_per_s", ""),
    "× best static": ("speed_vs_best_static", ".2f"),
    "× timm": ("speed_vs_timm", ".2f"),
    "× own static": ("speed_vs_own_static", ".2f"),
    "GMACs": ("gmacs", ".3g"),
    "MACs": ("mac_share", ".1%"),
    "error": ("relative_error", ".1e"),
    "MiB": ("peak_mib", ".0f"),
}
_CONFIGURATION = ("backbone", "dtype", "batch")

Row = dict[str, str]  # every cell is text, empty where nothing is known


def read(path: Path) -> list[Row]:
    """The rows of an earlier run, none where there is no file."""
    rows = read_csv(path)
    if not all({"contender", "ms_p50", "status"} <= set(row) for row in rows):
        raise UserError(f"{path} is not a benchmark's CSV file: pass another --out.")
    return rows


def label(row: Row) -> str:
    """The contender with its layout, where it has a choice."""
    return row["contender"] if row["contender"] in BASELINES else f"{row['contender']} ({row['layout']})"


def groups(rows: Sequence[Row], *names: str) -> list[list[Row]]:
    """Rows that agree in these columns, in the order in which they came."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(found.values())


def configurations(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that were timed in turn."""
    return groups(rows, *_CONFIGURATION)


def rate(row: Row) -> str:
    """Images a second."""
    value = float(row["images_per_s"])
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cells(row: Row, figures: Sequence[str]) -> list[str]:
    if row["status"] != "ok":
        return [label(row), "failed", *[""] * len(figures)]
    low, mid, high = (float(row[f"ms_p{p}"]) for p in (20, 50, 80))
    cells = [label(row) + (f", {row['static_mode']}" if row["contender"] == BEST else "")]
    cells.append(f"{mid:.4g} ({low:.4g}, {high:.4g})")
    for name in figures:
        column, form = _FIGURES[name]
        text = rate(row) if not form else format(float(row[column]), form) if row[column] else "—"
        cells.append(text.replace("%", " %"))
    return cells


def _title(row: Row) -> str:
    return f"{row['backbone']}, {row['img_size']} px, {row['dtype']}, batch {row['batch']}"


def _reasons(group: Sequence[Row]) -> list[str]:
    return [f"{label(row)}: {row['reason']}" for row in group if row["reason"]]


def screen(rows: Sequence[Row]) -> list[Table]:
    """One table a configuration, with the reasons of what failed in it."""
    tables = []
    for group in configurations(rows):
        figures = [name for name in _FIGURES if name != "MiB" or any(row["peak_mib"] for row in group)]
        cells = [_cells(row, figures) for row in group]
        table = screen_table(_title(group[0]), cells, (*_FIRST, *figures), failed=lambda row: row[1] == "failed")
        table.caption, table.caption_justify = "\n".join(_reasons(group)) or None, "left"
        tables.append(table)
    return tables


def markdown(rows: Sequence[Row], command: str) -> str:
    """The same tables with their caption."""
    text = ["# Benchmark", ""]
    for group in configurations(rows):
        cells = [_cells(row, list(_FIGURES)) for row in group]
        text += [f"## {_title(group[0])}", "", *markdown_table((*_FIRST, *_FIGURES), cells), ""]
        if reasons := _reasons(group):
            text += [*(f"- {line}" for line in reasons), ""]
    first = rows[0]
    versions = ", ".join(f"{name} {first[name]}" for name in ("adaptivit", "torch", "triton", "timm") if first[name])
    commit = f", commit {first['commit']}" if first["commit"] else ""
    text += [
        f"`{command}`",
        "",
        f"{first['date']}; {first['device']}, {first['threads']} CPU threads; {versions}{commit}; seed "
        f"{first['seed']}. All contenders of a table ran in turn, {first['repeats']} turns; ms are those of a "
        "batch, × are medians of the ratios within a turn, MACs the share of the static model's. Raw figures: "
        "[benchmark.csv](benchmark.csv).",
        "",
    ]
    if any(row["status"] == "ok" for row in rows):
        text += ["![Speed against the best static model](bars.png)", ""]
    return "\n".join(text)
