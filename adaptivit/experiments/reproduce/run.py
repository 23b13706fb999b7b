"""The jobs of a table in processes of their own, several at a time.

WORK/runs/      the run directory of every training
WORK/rows/      finished rows by key: KEY.json and KEY.npz (which images were right)
WORK/logs/      the output of each job
WORK/figures/   what figures measured of the models
OUT/            results.csv, results.md, correct.npz, pareto.png or bars.png, curves.csv and curves.png; figure.csv
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ...utils.atomic_io import write_text
from ..job import Job
from ..measure import report_images
from ..store import Row, as_row
from . import figures, process, stand_in
from .figures import Found
from .plan import ReproduceConfig, log_of, plan
from .report import Report

_POLL = 0.2  # seconds
_LEAVE = 20.0  # seconds that jobs have for their last checkpoint


def execute(config: ReproduceConfig, begun: float | None = None) -> list[Row]:
    """Run what is missing and write the results; returns all rows that there are, failed ones too.

    begun: the start of --minutes by time.monotonic(); default: now.
    """
    work = Path(config.place)
    if config.stand_in:
        stand_in.prepare(config.place)
    jobs = plan(config)
    if jobs:
        report_images(jobs[0])  # raises what is wrong with the data before anything runs
    if not (work / ".gitignore").exists():
        write_text(work / ".gitignore", "*\n")
    batch = _Batch(config, jobs, _end(config, begun), lambda rows: _report(config, rows).write(plots=False))
    try:
        batch.run()
        found = _figure(config, jobs, batch) if config.what.figure else None
    except BaseException:
        _write(_report(config, batch.rows))
        raise
    report = _report(config, batch.rows, found)
    if _write(report):
        report.screen()
    return [batch.rows[job.key] | {"method": job.name} for job in jobs if job.key in batch.rows]


def _end(config: ReproduceConfig, begun: float | None) -> float:
    """When jobs are asked to stop, so that all is done after --minutes."""
    if config.minutes is None:
        return math.inf
    seconds = 60 * config.minutes
    return (time.monotonic() if begun is None else begun) + max(0.9 * seconds, seconds - 1.5 * _LEAVE)


def _write(report: Report) -> bool:
    """Write what there is; False where there is nothing yet."""
    if report.rows or report.figure is not None:
        report.write(plots=True)
    return bool(report.rows) or report.figure is not None


def _figure(config: ReproduceConfig, jobs: list[Job], batch: _Batch) -> Found | None:
    """What the table's figure measures of its models, once all are there and if there is time."""
    given = figures.given_of(config.what, jobs, batch.rows, config.stand_in)
    if given is None or time.monotonic() >= batch.end:
        return None
    batch.console.print(f"{config.what.figure}: measuring", markup=False, highlight=False)
    return figures.measured(given, Path(config.place) / "figures")


def _report(config: ReproduceConfig, found: dict[str, Row], figure: Found | None = None) -> Report:
    """All rows of the table: what this call found, and what other calls have finished."""
    table = config.what
    jobs = plan(replace(config, only=(), seeds=tuple({*table.seeds, *config.seeds}), dry_run=True))
    known = ((job, found.get(job.key) or job.rows.finished(job.key)) for job in jobs)
    rows = [row | {"method": job.name} for job, row in known if row is not None]
    return Report(table, jobs, rows, config.directory, config.command(), figure)


def launch(job: Job, at_a_time: int) -> subprocess.Popen[bytes]:
    """Start the process of a job; it ends when its standard input is closed, so also when this process dies."""
    root = str(Path(__file__).parents[3])  # a checkout that was not installed
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(max(1, (os.cpu_count() or 1) // at_a_time))
    environment = {"OMP_NUM_THREADS": threads} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    log = log_of(job)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        words = [sys.executable, "-m", process.__name__, str(process.save(job))]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment)


@dataclass
class _Batch:
    """Which jobs wait, run and have ended."""

    config: ReproduceConfig
    jobs: list[Job]
    end: float  # of time.monotonic()
    report: Callable[[dict[str, Row]], Any]  # called after each row
    rows: dict[str, Row] = field(default_factory=dict)  # by key; failed ones too
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = field(default_factory=dict)
    console: Console = field(default_factory=lambda: Console(stderr=True))

    def run(self) -> None:
        waiting = [job for job in {job.key: job for job in reversed(self.jobs)}.values() if not self._known(job)][::-1]
        try:
            while (waiting or self.running) and time.monotonic() < self.end:
                waiting = [job for job in waiting if not self._begin(job)]
                self._collect()
        finally:
            self._stop()

    def _known(self, job: Job, when: str = "finished before, not run again") -> bool:
        row = job.rows.finished(job.key)
        if row is not None:
            self.rows[job.key] = row
            self._print(job, when)
        return row is not None

    def _begin(self, job: Job) -> bool:
        """Start a job that can start; True if it waits no longer: it runs, is known, or its start has failed."""
        start = self.rows.get(job.needs)
        if job.needs and start is None:
            return False
        if start is not None and start["status"] != "ok":
            self._failed(job, f"{start['method']}, which it starts from, failed")
            return True
        if self._known(job, "finished by another call"):
            return True
        busy = {other.training.out for other, _ in self.running.values()}
        if len(self.running) >= self.config.jobs or job.training.out in busy:
            return False
        job.rows.path(job.key).unlink(missing_ok=True)
        if self.config.stand_in:
            self._here(job)
            return True
        self.running[job.key] = job, launch(job, self.config.jobs)
        self._print(job, f"started, log {log_of(job)}")
        return True

    def _here(self, job: Job) -> None:
        """Run a job in this process: a stand-in's takes less than the start of another."""
        log = log_of(job)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
            process.run(job)
        self._result(job, 0)

    def _collect(self) -> None:
        """Take the results of jobs that have ended, or wait a little."""
        ended = [(job, running) for job, running in self.running.values() if running.poll() is not None]
        if not ended and self.running:
            time.sleep(_POLL)
        for job, running in ended:
            self._take(job, running)
        if ended:
            self.report(self.rows)

    def _take(self, job: Job, ended: subprocess.Popen[bytes]) -> None:
        """The result of a job that has ended."""
        del self.running[job.key]
        _close(ended)
        self._result(job, ended.returncode)

    def _result(self, job: Job, code: int | None) -> None:
        row = job.rows.finished(job.key)
        if row is not None:
            self.rows[job.key] = row
            self._print(job, f"top-1 {float(row['top1']):.2f} %, {float(row['gmacs']):.4g} GMACs")
        else:
            reason = (job.rows.get(job.key) or {}).get("reason")
            self._failed(job, reason or f"its process ended with code {code}; see {log_of(job)}")

    def _failed(self, job: Job, reason: str) -> None:
        known = {"model": job.training.backbone, "method": job.name, "seed": job.seed, "recipe": job.key}
        self.rows[job.key] = as_row(known | {"status": "failed", "reason": reason})
        self._print(job, f"failed: {reason}", "red")

    def _stop(self) -> None:
        """Ask running jobs to write a checkpoint and end; take the results of those that were done."""
        for _, running in self.running.values():
            running.terminate()
        last = time.monotonic() + _LEAVE
        for job, running in list(self.running.values()):
            try:
                running.wait(max(0.0, last - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
            if job.rows.get(job.key) is not None:
                self._take(job, running)
            else:
                _close(running)
                self._print(job, "stopped; the same command goes on with it")
        self.running.clear()

    def _print(self, job: Job, what: str, style: str | None = None) -> None:
        head = f"[{self.jobs.index(job) + 1}/{len(self.jobs)}] {job.name}, seed {job.seed}"
        self.console.print(f"{head}: {what}", markup=False, highlight=False, soft_wrap=True, style=style)


def _close(ended: subprocess.Popen[bytes]) -> None:
    if ended.stdin is not None:
        ended.stdin.close()
