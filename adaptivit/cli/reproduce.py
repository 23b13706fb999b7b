"""Run a table or figure of ours or of a paper again."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence

from ..experiments.job import Job
from ..experiments.reproduce.plan import ReproduceConfig, plan
from ..experiments.reproduce.tables import PAPER_TITLES, TABLES, Table
from ..utils.text import headed
from .command import Command

START = {
    "digits": "six minutes on a CPU, without a file: see it work.",
    "cifar100-main": "AHT-ViT beside static and the best peer, three seeds: our main result. For a GPU.",
    "imagenet-adapt": "methods on ImageNet weights as they are. For a GPU.",
}
UNFINISHED = 75  # exit code where --minutes were not enough: try again


def run(config: ReproduceConfig) -> None:
    if not config.table:
        listing() if config.paper is None else of_paper(config.paper)
        return
    if config.dry_run:
        dry_run(config)
        return
    begun = time.monotonic()  # importing torch is a part of --minutes
    jobs = plan(config)  # what is missing is an error before that
    from ..experiments.reproduce.run import execute

    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        rows = execute(config, begun)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on with what is missing in {config.place}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    failed, left = sum(row["status"] != "ok" for row in rows), len(jobs) - len(rows)
    if rows or not jobs:
        files = sorted(path.name for path in config.directory.glob("*"))
        print(f"wrote {', '.join(files)} to {config.directory}")
    if failed:
        print(f"{failed} of {len(rows)} rows failed; the same command runs them again", file=sys.stderr)
        raise SystemExit(1)
    if left:
        print(f"{left} of {left + len(rows)} rows are not finished; the same command goes on", file=sys.stderr)
        raise SystemExit(UNFINISHED)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def listing() -> None:
    """Print three tables to start from, then all by paper, each with its source, its time and its runs."""
    groups: dict[str, dict[str, str]] = {"to start from": dict(START)}
    for table in TABLES.values():
        jobs = plan(ReproduceConfig(table=table.name, dry_run=True))
        runs = f"{len(jobs)} runs" + (f" with {len(table.seeds)} seeds" if len(table.seeds) > 1 else "")
        facts = ("" if table.source == "ours" else table.source, table.time, runs, f"{_epochs(jobs)} epochs in all")
        groups.setdefault(_heading(table), {})[table.name] = f"{table.title} ({'; '.join(filter(None, facts))})"
    print(headed(groups))
    print("\n--dry-run shows a table's runs; docs/guide/reproduce.md")


def _heading(table: Table) -> str:
    if table.paper:
        return f"{PAPER_TITLES[table.paper]}'s paper (--paper {table.paper}: which were run)"
    return "ours: AHT-ViT, one change at a time" if table.name.startswith("ablation") else "ours"


RAN = {"own": "run on the paper's data", "other": "run on a stand-in for its data or model", "": "not run"}


def of_paper(paper: str) -> None:
    """Print the experiments of a paper: those that we ran on its data, on others, and not at all."""
    own = [table for table in TABLES.values() if table.paper == paper]
    groups: dict[str, dict[str, str]] = {}
    for kind, heading in RAN.items():
        for table in own:
            if table.ran_on == kind:
                where = f"; {table.ran}" if table.ran else ""
                groups.setdefault(heading, {})[table.name] = f"{table.title} ({table.source}{where})"
    print(headed(groups))
    print(f"\nadaptivit reproduce {own[0].name} --stand-in tries one in seconds; figures: docs/results/papers.md")


def _epochs(jobs: Sequence[Job]) -> int:
    return sum({job.key: job.training.epochs if job.trains else 0 for job in jobs}.values())


def dry_run(config: ReproduceConfig) -> None:
    """Print the rows that a call would run, and which are finished."""
    table, jobs = config.what, plan(config)
    print(f"{table.name}: {table.title} ({table.source})")
    print(f"data: {config.data or table.data}")
    print(f"protocol: {table.protocol}\n")
    rest = []
    for job in jobs:
        ready = job.rows.finished(job.key) is not None
        rest += [] if ready else [job]
        print(f"{'finished' if ready else 'to run':<9} {job.name}, seed {job.seed}: {_facts(table, job)}")
    print(f"\n{len(rest)} of {len(jobs)} rows to run, {_epochs(rest)} epochs; results in {config.directory}")


def _facts(table: Table, job: Job) -> str:
    run = next(run for run in table.runs if run.name == job.name)
    training = job.training
    size = f"{training.epochs} epochs, lr {training.optim.lr:g}, batch {training.batch_size}"
    words = [
        f"recipe {run.recipe}" if run.recipe else run.method,
        training.backbone,
        size if job.trains else "as it is",
    ]
    words.append(f"from {run.start}" if run.start else f"from {training.weights or 'random weights'}")
    if training.loss.distill and job.trains:
        words.append(f"distilled {training.loss.distill:g}")
    if job.share is not None:
        words.append(f"set for {100 * job.share:g} % of static's MACs")
    if job.paper:
        words.append(f"paper {job.paper}")
    return "; ".join(words)


COMMAND = Command(ReproduceConfig, run)
