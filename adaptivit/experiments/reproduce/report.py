"""What a table has found: results.csv, results.md, correct.npz, pareto.png (bars.png where all rows cost the same), and
curves over the epochs where the table has some."""

from __future__ import annotations

import io
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ...evaluation.evaluate import Result
from ...utils.atomic_io import write_bytes, write_text
from ...utils.text import markdown_table
from ...visualize.pareto import pareto
from ..compare.results import COLUMNS, Row, add_differences, read_correct, write_rows
from ..compare.table import failures, headings, lines, means, points
from ..compare.table import screen as table_of
from . import bars
from .curves import Curve, draw
from .plan import Job, ReproduceConfig
from .run import Table

Jobs = Mapping[tuple[str, str], Job]  # by name and seed


def write(config: ReproduceConfig, table: Table, jobs: Sequence[Job], rows: list[Row], plots: bool) -> None:
    """All files of OUT, without plots where more is to come; the rows get their paired differences."""
    out, known = config.directory, {(job.name, str(job.seed)): job for job in jobs}
    _share_of_reference(table, rows)
    add_differences(rows, table.reference, lambda row: read_correct(known[row["method"], row["seed"]].correct))
    papers = [row | {"paper": known[row["method"], row["seed"]].paper} for row in rows]
    write_rows(out / "results.csv", papers, (*COLUMNS, "paper"))
    good = [row for row in rows if row["status"] == "ok"]
    curves = _curves(table, jobs) if table.curves else []
    write_text(out / "results.md", markdown(config, table, known, rows, bool(curves)))
    _write_correct(out / "correct.npz", known, rows)
    if good and plots:
        detail = f"{table.name}, {int(good[0]['images']):,} images"
        if not table.one_cost:
            write_bytes(out / "pareto.png", _front(table, jobs, good, detail))
        elif found := _bars(table, known, good):
            about = f"{detail}; top-1 % beside the names"
            write_bytes(out / "bars.png", bars.draw(found, table.reference, "Accuracy of rows at one cost", about))
    if curves and plots:
        columns = ("method", "seed", "epoch", *table.curves)
        write_rows(out / "curves.csv", [point for curve in curves for point in curve.rows()], columns)
        write_bytes(out / "curves.png", draw(curves, table.curves, table.title))


def _share_of_reference(table: Table, rows: Sequence[Row]) -> None:
    """Of images of another size, too, the share is that of the reference's MACs."""
    static = {row["seed"]: row["gmacs_static"] for row in rows if row["method"] == table.reference}
    for row in rows:
        if row["status"] == "ok" and static.get(row["seed"]) not in (None, "", row["gmacs_static"]):
            row["gmacs_share"] = f"{float(row['gmacs']) / float(static[row['seed']]):.6g}"


def markdown(config: ReproduceConfig, table: Table, known: Jobs, rows: Sequence[Row], curves: bool) -> str:
    """The table with what it is, its protocol, the command, and where and when it was measured."""
    papers = {job.name: job.paper for job in known.values()}
    names, body = headings(rows), lines(rows)
    printed = any(papers[line["method"]] for line in body)
    names = [*names, "paper"] if printed else names
    text = [f"# {table.title}", "", f"`{config.command()}`", ""]
    text += [f"{table.source}. `paper` is what it reports, top-1 % / GMACs.", ""] if printed else []
    text += [table.protocol, ""]
    text += [
        *markdown_table(names, [[*line.values(), papers[line["method"]]][: len(names)] for line in body]),
        "",
    ]
    text += [f"- {line}" for line in failures(rows)] + [""] * bool(failures(rows))
    missing = len(known) - len(rows)
    if missing:
        text += [f"{missing} of {len(known)} rows have not been run.", ""]
    text += _caption(table, rows)
    several = means(rows)
    if several:
        text += ["", "Mean over the seeds, with the largest minus the smallest in brackets:", ""]
        text += markdown_table(["method", "seeds", "top-1 %", "against static", "GMACs", "depth"], several)
    pairs = versus(table, known, rows)
    if pairs:
        text += [
            "",
            "The first minus the second on the same images, mean of the seeds, with its 95 % interval and two-sided p "
            "over the images (not over seeds, and not corrected for the number of lines):",
            "",
        ]
        text += markdown_table(["method", "against", "seeds", "points", "p", "share", "its share"], pairs)
    good = [row for row in rows if row["status"] == "ok"]
    if good and not table.one_cost:
        text += ["", "![Accuracy against cost](pareto.png)"]
    elif good and _bars(table, known, good):
        text += ["", "![Rows at one cost](bars.png)"]
    if curves:
        text += ["", f"![{'Training' if table.training else 'Validation'} over the epochs](curves.png)"]
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


@dataclass(frozen=True)
class Pair:
    """One run against another on the same images."""

    first: str
    second: str
    seeds: list[str]  # that both have
    mean: float  # points, the first minus the second
    error: float  # its standard error over the images


def versus(table: Table, known: Jobs, rows: Sequence[Row]) -> list[list[str]]:
    """Every run against the reference, and each pair of the table, over the seeds that both have: cells of a table."""
    good, found = _good(rows), []
    for pair in _pairs(table, known, rows):
        names = (pair.first, pair.second)
        shares = [statistics.mean(float(good[n, s]["gmacs_share"]) for s in pair.seeds) for n in names]
        cells = [f"{pair.mean + 0.0:+.2f} ± {1.96 * pair.error:.2f}", chance(pair.mean, pair.error)]
        found.append([*names, str(len(pair.seeds)), *cells, *(f"{100 * share:.1f} %" for share in shares)])
    return found


def _good(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    return {(row["method"], row["seed"]): row for row in rows if row["status"] == "ok"}


def _pairs(table: Table, known: Jobs, rows: Sequence[Row]) -> Iterator[Pair]:
    good = _good(rows)
    static = [(run.name, table.reference) for run in table.runs if table.reference and run.name != table.reference]
    for first, second in (*static, *table.pairs):
        seeds = [s for (name, s) in good if name == first and (second, s) in good]
        results = [[read_correct(known[name, s].correct) for name in (first, second)] for s in seeds]
        each = differences([(a, b) for a, b in results if a is not None and b is not None])
        if len(each) > 1:
            yield Pair(first, second, seeds, float(each.mean()), float(each.std(ddof=1)) / math.sqrt(len(each)))


def _bars(table: Table, known: Jobs, rows: Sequence[Row]) -> list[bars.Bar]:
    """The differences from the reference, in the order of the table, without the runs that others start from."""
    good, starts, found = _good(rows), {run.start for run in table.runs}, []
    for pair in _pairs(replace(table, pairs=()), known, rows):
        if pair.first not in starts:
            top1 = statistics.mean(float(good[pair.first, s]["top1"]) for s in pair.seeds)
            found.append(bars.Bar(pair.first, pair.mean, 1.96 * pair.error, top1))
    return found


def differences(pairs: Sequence[tuple[Result, Result]]) -> np.ndarray[Any, Any]:
    """[images] points of the first minus the second, mean over the pairs (one a seed), of images that all have."""
    known = [dict(zip(r.indices, r.scores, strict=True)) for pair in pairs for r in pair]
    common = [i for i in known[0] if all(i in other for other in known)] if known else []
    scores = np.array([[one[i] for i in common] for one in known], float)  # [2 pairs, images]
    return (scores[::2] - scores[1::2]).mean(0) if common else np.empty(0)


def chance(mean: float, error: float) -> str:
    """Two-sided p of a difference as far from 0 as this one, were there none: of a normal distribution."""
    p = math.erfc(abs(mean) / error / math.sqrt(2)) if error else 1.0
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"


def _write_correct(path: Path, known: Jobs, rows: Sequence[Row]) -> None:
    """Which images each row got right, in one small file: what the paired differences are made of."""
    order: list[int] | None = None
    arrays: dict[str, Any] = {}
    for row in rows:
        result = read_correct(known[row["method"], row["seed"]].correct) if row["status"] == "ok" else None
        if result is not None and order in (None, result.indices):  # without a test split each seed has its own images
            order = result.indices
            arrays[f"{row['method']}, seed {row['seed']}"] = np.packbits(np.array(result.scores, bool))
    if order is not None:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, indices=np.array(order), **arrays)
        write_bytes(path, buffer.getvalue())


def _front(table: Table, jobs: Sequence[Job], rows: Sequence[Row], detail: str) -> bytes:
    """Rows that differ in their saving or in the images' size alone are joined; those without training are hollow where
    others have some."""
    bare = {job.name for job in jobs if not (job.trains or job.needs)}
    some = any(row["method"] not in {*bare, table.reference} for row in rows)
    found = [
        replace(
            p, curve=f"{p.policy} {re.sub(r' -[0-9.]+ %| at [0-9]+ px', '', p.label)}", hollow=some and p.label in bare
        )
        for p in points(rows)
    ]
    mark = "; hollow: no training" if any(p.hollow for p in found) else ""
    return pareto(found, detail=detail + mark, reference=table.reference)


def _curves(table: Table, jobs: Sequence[Job]) -> list[Curve]:
    """What every run's log says of its validations; or of its training batches, means of a few lines in a row, without
    the runs that others go on from."""
    found, group = [], 5 if table.training else 1
    for job in jobs:
        path = Path(job.training.out) / "log.jsonl"
        if job.trains and path.exists() and (job.needs or not table.training):
            records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            known = [r for r in records if r["kind"] == "validation"]
            kept = [r for r in records if r["kind"] == ("train" if table.training else "validation")]
            parts = [kept[i : i + group] for i in range(0, len(kept), group)] if known else []
            if parts:
                each = known[-1]["epoch"] / known[-1]["step"]
                epochs = [statistics.mean(each * r["step"] for r in part) for part in parts]
                values = {n: [statistics.mean(float(r[n]) for r in part) for part in parts] for n in table.curves}
                found.append(Curve(job.name, job.seed, epochs, values))
    return found


def screen(table: Table, rows: Sequence[Row]) -> None:
    """The table and the failures on the screen."""
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table_of(rows, f"{table.title}, cheapest first"))
    for line in failures(rows):
        console.print(line, markup=False, highlight=False)
