"""What a table has found: results.csv, results.md, correct.npz, pareto.png, bars.png, curves.png, and its figure."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...evaluation.evaluate import Result
from ...training import log_plots
from ...utils.atomic_io import write_bytes, write_text
from ...utils.console import screen_table, show
from ...utils.csv import csv_text
from ...utils.text import markdown_table
from ...visualize.pareto import pareto
from ..job import Job
from ..store import COLUMNS, Row, add_differences
from ..table import body, caption, failures, mean_table, points, provenance, several
from ..table import screen as table_of
from .figures import Found
from .plots import Bar, Curve, draw_bars, draw_curves
from .tables import Table


@dataclass(frozen=True)
class Pair:
    """One run against another on the same images, over the seeds that both have."""

    first: str
    second: str
    seeds: list[str]
    mean: float  # points, the first minus the second
    error: float  # its standard error over the images


@dataclass(frozen=True)
class Report:
    """The rows of a table that are known, and the jobs of all of them."""

    table: Table
    jobs: Sequence[Job]
    rows: list[Row]
    out: Path
    command: str
    figure: Found | None = None  # what was measured of the models

    def __post_init__(self) -> None:
        reference = self.table.reference
        static = {row["seed"]: row["gmacs_static"] for row in self.rows if row["method"] == reference}
        for row in self.good.values():  # of images of another size, too, the share is that of the reference's MACs
            if static.get(row["seed"]) not in (None, "", row["gmacs_static"]):
                row["gmacs_share"] = f"{float(row['gmacs']) / float(static[row['seed']]):.6g}"
        add_differences(self.rows, reference, lambda row: self.correct(row["method"], row["seed"]))

    @property
    def good(self) -> dict[tuple[str, str], Row]:
        return {(row["method"], row["seed"]): row for row in self.rows if row["status"] == "ok"}

    @property
    def pareto(self) -> bool:
        """True where rows are drawn as accuracy against cost; one row alone, of a figure, says nothing."""
        return bool(self.good) and not self.table.one_cost and not (self.table.figure and len(self.table.runs) == 1)

    def correct(self, name: str, seed: str) -> Result | None:
        """The images that a row got right."""
        job = next(job for job in self.jobs if (job.name, str(job.seed)) == (name, seed))
        return job.rows.correct(job.key)

    def write(self, plots: bool) -> None:
        """All files of OUT; without plots where more is to come."""
        own = {job.name: {"paper": job.paper, "differs": job.differs} for job in self.jobs}
        rows = [row | own[row["method"]] for row in self.rows]
        columns = (*COLUMNS, "paper", "differs") if self.table.paper else (*COLUMNS, "paper")
        if rows:
            write_text(self.out / "results.csv", csv_text(rows, columns))
        curves = list(_curves(self.table, self.jobs)) if self.table.curves else []
        write_text(self.out / "results.md", self.markdown(bool(curves)))
        if rows:
            _write_correct(self.out / "correct.npz", self)
        if not plots:
            return
        if self.figure is not None:
            self.figure.write(self.out)
        if self.pareto:
            write_bytes(self.out / "pareto.png", self.front())
        elif bars := self.bars():
            title, detail = "Accuracy of rows at one cost", self.detail("; top-1 % beside the names")
            write_bytes(self.out / "bars.png", draw_bars(bars, self.table.reference, title, detail))
        if curves:
            rows = [point for curve in curves for point in curve.rows()]
            write_text(self.out / "curves.csv", csv_text(rows, ("method", "seed", "epoch", *self.table.curves)))
            write_bytes(self.out / "curves.png", draw_curves(curves, self.table))

    def detail(self, more: str = "") -> str:
        """The line below a plot's title."""
        return f"{self.table.name}, {int(next(iter(self.good.values()))['images']):,} images{more}"

    def markdown(self, curves: bool) -> str:
        """The table with what it is, its protocol, the command, and where and when it was measured."""
        table, rows = self.table, self.rows
        papers = {job.name: job.paper for job in self.jobs}
        if not any(papers[row["method"]] for row in rows):
            papers = {}
        text = [f"# {table.title}", "", f"`{self.command}`", ""]
        text += [f"{table.source}. `paper` is what it reports, top-1 % / GMACs.", ""] if papers else []
        text += [table.protocol, ""]
        text += [f"- {line}" for line in self.differs()] + [""] if self.differs() else []
        if self.figure is not None:
            text += _figure(self.figure)
        if not rows:
            return "\n".join(text).rstrip() + "\n"
        text += body(rows, papers)
        if missing := len(self.jobs) - len(rows):
            text += [f"{missing} of {len(self.jobs)} rows have not been run.", ""]
        what = f"of {table.name}, backbone {several(rows, 'model')}"
        text += [caption(rows, what, table.reference), "", provenance(rows), *mean_table(rows)]
        if pairs := list(self.pairs()):
            text += [
                "",
                "The first minus the second on the same images, mean of the seeds, with its 95 % interval and "
                "two-sided p over the images (not over seeds, and not corrected for the number of lines):",
                "",
            ]
            names = ["method", "against", "seeds", "points", "p", "share", "its share"]
            text += markdown_table(names, [self.cells(pair) for pair in pairs])
        if self.pareto:
            text += ["", "![Accuracy against cost](pareto.png)"]
        elif self.bars():
            text += ["", "![Rows at one cost](bars.png)"]
        if curves:
            text += ["", f"![{'Training' if table.training else 'Validation'} over the epochs](curves.png)"]
        return "\n".join(text) + "\n"

    def differs(self) -> list[str]:
        """What is not the paper's, with the rows that it holds for."""
        rows: dict[str, list[str]] = {}
        for job in self.jobs:
            if job.differs and job.name not in rows.setdefault(job.differs, []):
                rows[job.differs].append(job.name)
        return [f"{', '.join(names)}: {words}" if len(rows) > 1 else words for words, names in rows.items()]

    def beside(self) -> list[dict[str, str]]:
        """Our figures beside the paper's, a line each."""
        papers = {job.name: job.paper for job in self.jobs}
        own = [
            {"what": name, "ours": f"{float(row['top1']):.2f} / {float(row['gmacs']):.3g}", "paper": papers[name]}
            for (name, _), row in self.good.items()
            if papers[name]
        ]
        return own + [dict(line) for line in (self.figure.compared if self.figure else ())]

    def pairs(self, more: bool = True) -> list[Pair]:
        """Every run against the reference, and with `more` the pairs of the table."""
        good, reference, found = self.good, self.table.reference, []
        static = [(run.name, reference) for run in self.table.runs if reference and run.name != reference]
        for first, second in (*static, *(self.table.pairs if more else ())):
            seeds = [seed for (name, seed) in good if name == first and (second, seed) in good]
            results = [[self.correct(name, seed) for name in (first, second)] for seed in seeds]
            each = differences([(a, b) for a, b in results if a is not None and b is not None])
            if len(each) > 1:
                error = float(each.std(ddof=1)) / math.sqrt(len(each))
                found.append(Pair(first, second, seeds, float(each.mean()), error))
        return found

    def cells(self, pair: Pair) -> list[str]:
        """A line of the table of pairs."""
        names = (pair.first, pair.second)
        shares = [statistics.mean(float(self.good[n, s]["gmacs_share"]) for s in pair.seeds) for n in names]
        points = f"{pair.mean + 0.0:+.2f} ± {1.96 * pair.error:.2f}"
        p = chance(pair.mean, pair.error)
        return [*names, str(len(pair.seeds)), points, p, *(f"{100 * share:.1f} %" for share in shares)]

    def bars(self) -> list[Bar]:
        """The differences from the reference, in the order of the table, without the runs that others start from."""
        starts, found = {run.start for run in self.table.runs}, []
        for pair in self.pairs(more=False):
            if pair.first not in starts:
                top1 = statistics.mean(float(self.good[pair.first, s]["top1"]) for s in pair.seeds)
                found.append(Bar(pair.first, pair.mean, 1.96 * pair.error, top1))
        return found

    def front(self) -> bytes:
        """The Pareto plot: rows that differ in their saving or in the images' size alone, or in all but the policy, are
        joined.

        Those without training are hollow where others have some.
        """
        bare = {job.name for job in self.jobs if not (job.trains or job.needs)}
        some = any(row["method"] not in {*bare, self.table.reference} for row in self.good.values())
        found = []
        for point in points(list(self.good.values())):
            curve = f"{point.policy} {re.sub(r' -[0-9.]+ %| at [0-9]+ px', '', point.label)}"
            curve = point.policy if self.table.by_policy else curve
            found.append(replace(point, curve=curve, hollow=some and point.label in bare))
        mark = "; hollow: no training" if any(p.hollow for p in found) else ""
        return pareto(found, detail=self.detail(mark), reference=self.table.reference)

    def screen(self) -> None:
        """The table and the failures on the screen."""
        if self.rows:
            show(table_of(self.rows, f"{self.table.title}, cheapest first"))
        if lines := self.beside():
            cells = [[line["what"], line["ours"], line["paper"]] for line in lines]
            show(screen_table(f"beside {self.table.source}", cells, ["", "ours", "paper"], left=3))
        for line in (*self.differs(), *(self.figure.notes if self.figure else ()), *failures(self.rows)):
            print(line)


def _figure(found: Found) -> list[str]:
    """A figure's pictures, its lines beside the paper's, and what differs, in Markdown."""
    text: list[str] = []
    for name in found.pictures:
        text += [f"![{name.partition('.')[0].replace('_', ' ')}]({name})", ""] if not name.endswith(".svg") else []
    if found.compared:
        cells = [[line["what"], line["ours"], line["paper"]] for line in found.compared]
        text += [*markdown_table(["", "ours", "paper"], cells), ""]
    text += [f"- {note}" for note in found.notes] + [""] if found.notes else []
    versions = ", ".join(f"{name} {found.made[name]}" for name in ("adaptivit", "torch", "timm"))
    made = f"{found.made['date']}; {found.made['device']}; {versions}, commit {found.made['commit'] or 'unknown'}."
    return [*text, f"{made}{' Raw figures: [figure.csv](figure.csv).' * bool(found.rows)}", ""]


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


def _write_correct(path: Path, report: Report) -> None:
    """Which images each row got right, in one small file: what the paired differences are made of."""
    order: list[int] | None = None
    arrays: dict[str, Any] = {}
    for name, seed in report.good:
        result = report.correct(name, seed)
        if result is not None and order in (None, result.indices):  # without a test split each seed has its own images
            order = result.indices
            arrays[f"{name}, seed {seed}"] = np.packbits(np.array(result.scores, bool))
    if order is not None:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, indices=np.array(order), **arrays)
        write_bytes(path, buffer.getvalue())


def _curves(table: Table, jobs: Sequence[Job]) -> Iterator[Curve]:
    """The validations of every run's log; or its training batches, means of a few lines in a row.

    Of training batches the runs that others go on from are left out.
    """
    kind, group = ("train", 5) if table.training else ("validation", 1)
    for job in jobs:
        path = Path(job.training.out) / "log.jsonl"
        if not (job.trains and path.exists() and (job.needs or not table.training)):
            continue
        records = log_plots.read(path)
        known, kept = ([r for r in records if r["kind"] == wanted] for wanted in ("validation", kind))
        parts = [kept[i : i + group] for i in range(0, len(kept), group)]
        if known and parts:
            each = known[-1]["epoch"] / known[-1]["step"]
            epochs = [statistics.mean(each * r["step"] for r in part) for part in parts]
            values = {n: [statistics.mean(float(r[n]) for r in part) for part in parts] for n in table.curves}
            policy = job.training.policy.partition(":")[0] if table.by_policy else ""
            yield Curve(job.name, job.seed, epochs, values, policy)
