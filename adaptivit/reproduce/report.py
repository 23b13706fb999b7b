"""What a table has found: results.csv, results.md, pareto.png, and curves over the epochs where the table has some."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from ..compare_results import COLUMNS, Row, add_differences, read_correct, write_rows
from ..compare_table import failures, grid, headings, lines, means, points
from ..compare_table import screen as table_of
from ..files import write_bytes, write_text
from ..pareto import pareto
from .curves import Curve, draw
from .plan import Job, ReproduceConfig
from .run import Table

Jobs = Mapping[tuple[str, str], Job]  # by name and seed


def write(config: ReproduceConfig, table: Table, jobs: Sequence[Job], rows: list[Row], plots: bool) -> None:
    """All files of OUT, without plots where more is to come; the rows get their paired differences."""
    out, known = config.directory, {(job.name, str(job.seed)): job for job in jobs}
    add_differences(rows, table.reference, lambda row: read_correct(known[row["method"], row["seed"]].correct))
    papers = [row | {"paper": known[row["method"], row["seed"]].paper} for row in rows]
    write_rows(out / "results.csv", papers, (*COLUMNS, "paper"))
    good = [row for row in rows if row["status"] == "ok"]
    curves = _curves(table, jobs) if table.curves else []
    write_text(out / "results.md", markdown(config, table, known, rows, bool(curves)))
    if good and plots:
        detail = f"{table.name}, {int(good[0]['images']):,} images"
        write_bytes(out / "pareto.png", pareto(points(good), detail=detail, reference=table.reference))
    if curves and plots:
        columns = ("method", "seed", "epoch", *table.curves)
        write_rows(out / "curves.csv", [point for curve in curves for point in curve.rows()], columns)
        write_bytes(out / "curves.png", draw(curves, table.curves, table.title))


def markdown(config: ReproduceConfig, table: Table, known: Jobs, rows: Sequence[Row], curves: bool) -> str:
    """The table with what it is, its protocol, the command, and where and when it was measured."""
    papers = {job.name: job.paper for job in known.values()}
    names, body = headings(rows), lines(rows)
    printed = any(papers[line["method"]] for line in body)
    names = [*names, "paper"] if printed else names
    text = [f"# {table.title}", "", f"`{config.command()}`", ""]
    text += [f"{table.source}. `paper` is what it reports, top-1 % / GMACs.", ""] if printed else []
    text += [table.protocol, ""]
    text += [*grid(names, [[*line.values(), papers[line["method"]]][: len(names)] for line in body]), ""]
    text += [f"- {line}" for line in failures(rows)] + [""] * bool(failures(rows))
    missing = len(known) - len(rows)
    if missing:
        text += [f"{missing} of {len(known)} rows have not been run.", ""]
    text += _caption(table, rows)
    several = means(rows)
    if several:
        text += ["", "Mean over the seeds, with the largest minus the smallest in brackets:", ""]
        text += grid(["method", "seeds", "top-1 %", "against static", "GMACs", "depth"], several)
    pairs = versus(table, known, rows)
    if pairs:
        text += [
            "",
            "The first minus the second on the same images, mean of the seeds, with its 95 % interval over the",
        ]
        text += ["images (seeds are not in it):", ""]
        text += grid(["method", "against", "seeds", "points", "share", "its share"], pairs)
    if any(row["status"] == "ok" for row in rows):
        text += ["", "![Accuracy against cost](pareto.png)"]
    if curves:
        text += ["", "![Validation over the epochs](curves.png)"]
    return "\n".join(text) + "\n"


def _caption(table: Table, rows: Sequence[Row]) -> list[str]:
    def several(name: str) -> str:
        return ", ".join(dict.fromkeys(row[name] for row in rows if row[name]))

    against = f" and of the paired difference from `{table.reference}` of the same seed" if table.reference else ""
    versions = ", ".join(f"{name} {several(name)}" for name in ("adaptivit", "torch", "timm"))
    commit = f", commit {several('commit')}" if several("commit") else ""
    return [
        f"{several('images')} images, backbone {several('model')}. Share is that of the static model's MACs, depth the "
        f"mean number of blocks a patch sees. ± are 95 % intervals of top-1 alone{against}. Epochs since the first "
        f"weights: {several('epochs')}.",
        "",
        f"Seeds {several('seed')}; {several('date')}; {several('device')}; {versions}, Python {several('python')}"
        f"{commit}. Raw figures: [results.csv](results.csv).",
    ]


def versus(table: Table, known: Jobs, rows: Sequence[Row]) -> list[list[str]]:
    """Each pair of the table over the seeds that both have: differences averaged over the seeds image by image."""
    good = {(row["method"], row["seed"]): row for row in rows if row["status"] == "ok"}
    found = []
    for first, second in table.pairs:
        seeds = [s for (name, s) in good if name == first and (second, s) in good]
        differences: dict[int, list[float]] = {}
        for seed in seeds:
            a, b = (read_correct(known[name, seed].correct) for name in (first, second))
            assert a is not None
            assert b is not None
            other = dict(zip(b.indices, b.correct, strict=True))
            for i, hit in zip(a.indices, a.correct, strict=True):
                differences.setdefault(i, []).append(100.0 * (hit - other[i]))
        if len(differences) > 1:
            each = [statistics.mean(d) for d in differences.values()]
            half = 1.96 * statistics.stdev(each) / math.sqrt(len(each))
            shares = [statistics.mean(float(good[n, s]["gmacs_share"]) for s in seeds) for n in (first, second)]
            cells = [f"{statistics.mean(each) + 0.0:+.2f} ± {half:.2f}", *(f"{100 * share:.1f} %" for share in shares)]
            found.append([first, second, str(len(seeds)), *cells])
    return found


def _curves(table: Table, jobs: Sequence[Job]) -> list[Curve]:
    """The validation lines of every run's log."""
    found = []
    for job in jobs:
        path = Path(job.training.out) / "log.jsonl"
        if job.trains and path.exists():
            records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            kept = [r for r in records if r["kind"] == "validation"]
            if kept:
                values = {name: [float(r[name]) for r in kept] for name in table.curves}
                found.append(Curve(job.name, job.seed, [int(r["epoch"]) for r in kept], values))
    return found


def screen(table: Table, rows: Sequence[Row]) -> None:
    """The table and the failures on the screen."""
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table_of(rows, f"{table.title}, cheapest first"))
    for line in failures(rows):
        console.print(line, markup=False, highlight=False)
