"""The jobs of a table in processes of their own, several at a time.

WORK/runs/      the run directory of every training
WORK/rows/      what finished rows measured, by key: KEY.json and KEY.npz (which images were right)
WORK/logs/      what each job said
OUT/            results.csv, results.md, correct.npz, pareto.png or bars.png, curves.csv and curves.png
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ...utils.atomic_io import write_json, write_text
from ..compare.results import Row, as_row
from .job import compare_config, finished
from .plan import Job, ReproduceConfig, plan
from .report import screen, write

_POLL = 0.2  # seconds
_LEAVE = 20.0  # seconds that jobs have for their last checkpoint


def execute(config: ReproduceConfig, begun: float | None = None) -> list[Row]:
    """Run what is missing and write the results; returns all rows, failed ones too, but for those that --minutes left
    no time for. begun: when these minutes began, as time.monotonic() has it; default: now."""
    from ..compare.plan import report_images

    jobs, console, end = plan(config), Console(stderr=True), _end(config, begun)
    report_images(compare_config(jobs[0]), jobs[0].seed)  # what is wrong with the data is said before anything runs
    _keep_out_of_git(Path(config.work))
    batch = _Batch(config, jobs, console, end, lambda found: _report(config, found, plots=False))
    try:
        batch.run()
    finally:
        rows = _report(config, batch.rows)
    if rows:
        screen(config.what, rows)
    return [batch.rows[job.key] | {"method": job.name} for job in jobs if job.key in batch.rows]


def _end(config: ReproduceConfig, begun: float | None) -> float:
    """When jobs are asked to stop, so that all is done after --minutes."""
    if config.minutes is None:
        return math.inf
    seconds = 60 * config.minutes
    return (time.monotonic() if begun is None else begun) + max(0.9 * seconds, seconds - 1.5 * _LEAVE)


def _report(config: ReproduceConfig, found: dict[str, Row], plots: bool = True) -> list[Row]:
    """Write the results: what this call found, and rows of the table that other calls have finished."""
    table = config.what
    everything = replace(config, only=(), seeds=tuple({*table.seeds, *config.seeds}), dry_run=True)
    jobs = plan(everything)
    known = {job.key: found.get(job.key) or finished(job) for job in jobs}
    rows = [row | {"method": job.name} for job in jobs if (row := known[job.key]) is not None]
    if rows:
        write(config, table, jobs, rows, plots)
    return rows


def _keep_out_of_git(work: Path) -> None:
    if not (work / ".gitignore").exists():
        write_text(work / ".gitignore", "*\n")


def launch(job: Job, at_a_time: int) -> subprocess.Popen[bytes]:
    """Start the process of a job; it ends when its standard input is closed, so also when this process dies."""
    spec = job.row.with_suffix(".job")
    write_json(spec, job.to_json())
    root = str(Path(__file__).parents[3])  # a checkout that was not installed
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(max(1, (os.cpu_count() or 1) // at_a_time))
    environment = {"OMP_NUM_THREADS": threads} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        words = [sys.executable, "-m", "adaptivit.experiments.reproduce.job", str(spec)]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)


@dataclass
class _Batch:
    """Which jobs wait, run and have ended."""

    config: ReproduceConfig
    jobs: list[Job]
    console: Console
    end: float  # of time.monotonic()
    report: Callable[[dict[str, Row]], Any]  # called whenever a row has come
    rows: dict[str, Row] = field(default_factory=dict)  # by key; failed ones too
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = field(default_factory=dict)

    def run(self) -> None:
        waiting: list[Job] = []
        for job in self.jobs:
            row = finished(job)
            if row is not None:
                self.rows[job.key] = row
                self._say(job, "finished before, not run again")
            elif all(job.key != other.key for other in waiting):  # two names for one thing
                waiting.append(job)
        try:
            while (waiting or self.running) and time.monotonic() < self.end:
                waiting = [job for job in waiting if not self._begin(job)]
                self._collect()
        finally:
            self._stop()

    def _begin(self, job: Job) -> bool:
        """Start a job that can start; one whose start failed has failed too. Says whether it waits no longer."""
        start = self.rows.get(job.needs)
        if job.needs and start is None:
            return False
        if start is not None and start["status"] != "ok":
            self._failed(job, f"{start['method']}, which it starts from, failed")
            return True
        row = finished(job)
        if row is not None:  # by another call, meanwhile
            self.rows[job.key] = row
            self._say(job, "finished by another call")
            return True
        busy = {other.training.out for other, _ in self.running.values()}
        if len(self.running) >= self.config.jobs or job.training.out in busy:
            return False
        job.row.unlink(missing_ok=True)
        self.running[job.key] = job, launch(job, self.config.jobs)
        self._say(job, f"started, log {job.log}")
        return True

    def _collect(self) -> None:
        """Wait a little; take the results of jobs that have ended."""
        ended = [(job, process) for job, process in self.running.values() if process.poll() is not None]
        if not ended:
            time.sleep(_POLL)
        for job, process in ended:
            self._take(job, process)
        if ended:
            self.report(self.rows)

    def _take(self, job: Job, process: subprocess.Popen[bytes]) -> None:
        """The result of a job that has ended."""
        del self.running[job.key]
        _close(process)
        row = finished(job)
        if row is not None:
            self.rows[job.key] = row
            self._say(job, f"top-1 {float(row['top1']):.2f} %, {float(row['gmacs']):.4g} GMACs")
        else:
            self._failed(job, _reason(job, process.returncode))

    def _failed(self, job: Job, reason: str) -> None:
        known = {"model": job.training.backbone, "method": job.name, "seed": job.seed, "recipe": job.key}
        self.rows[job.key] = as_row(known | {"status": "failed", "reason": reason})
        self._say(job, f"failed: {reason}", "red")

    def _stop(self) -> None:
        """Ask those that run to write a checkpoint and end; take the results of those that were done."""
        for _, process in self.running.values():
            process.terminate()
        last = time.monotonic() + _LEAVE
        for job, process in list(self.running.values()):
            try:
                process.wait(max(0.0, last - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if finished(job) is not None or job.row.exists():
                self._take(job, process)
            else:
                _close(process)
                self._say(job, "stopped; the same command goes on with it")
        self.running.clear()

    def _say(self, job: Job, what: str, style: str | None = None) -> None:
        number = next(i for i, other in enumerate(self.jobs, start=1) if other is job)
        head = f"[{number}/{len(self.jobs)}] {job.name}, seed {job.seed}"
        self.console.print(f"{head}: {what}", markup=False, highlight=False, soft_wrap=True, style=style)


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _reason(job: Job, code: int) -> str:
    """Why a job has no figures: what it wrote, or how it ended."""
    try:
        said: dict[str, Any] = json.loads(job.row.read_text())
        return str(said["reason"])
    except (OSError, ValueError, KeyError):
        return f"its process ended with code {code}; see {job.log}"
