"""What there is to reproduce, and what a call would run, as text. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from . import TABLES
from .plan import Job, ReproduceConfig, plan
from .run import Table


def listing() -> None:
    """Every table with what it corresponds to and how much it is."""
    console = Console(width=None if Console().is_terminal else 150)
    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title="adaptivit reproduce TABLE", title_justify="left")
    for name in ("table", "what", "corresponds to", "runs", "epochs", "time"):
        grid.add_column(name, overflow="fold", no_wrap=name == "table", justify="right" if name == "epochs" else "left")
    for table in TABLES.values():
        jobs = plan(ReproduceConfig(table=table.name, dry_run=True))
        runs = f"{len(jobs)}" + (f", {len(table.seeds)} seeds" if len(table.seeds) > 1 else "")
        cells = (table.name, table.title, table.source, runs, str(_epochs(jobs)), table.time or "not run by us yet")
        grid.add_row(*map(Text, cells))
    console.print(grid)
    print("epochs: of all runs together. --dry-run shows the runs of a table; docs/reproduce.md tells more.")


def _epochs(jobs: Sequence[Job]) -> int:
    return sum({job.key: job.training.epochs if job.trains else 0 for job in jobs}.values())


def dry_run(config: ReproduceConfig, done: Sequence[bool]) -> None:
    """The rows that a call would run; `done` says which are finished."""
    table, jobs = config.what, plan(config)
    print(f"{table.name}: {table.title} ({table.source})")
    print(f"data: {config.data or table.data}")
    print(f"protocol: {table.protocol}\n")
    for job, ready in zip(jobs, done, strict=True):
        print(f"{'finished' if ready else 'to run':<9} {job.name}, seed {job.seed}: {_facts(table, job)}")
    rest = [job for job, ready in zip(jobs, done, strict=True) if not ready]
    print(f"\n{len(rest)} of {len(jobs)} rows to run, {_epochs(rest)} epochs; results in {config.directory}")


def _facts(table: Table, job: Job) -> str:
    run = next(run for run in table.runs if run.name == job.name)
    training = job.training
    words = [f"recipe {run.recipe}" if run.recipe else run.method, training.backbone]
    words.append(
        f"{training.epochs} epochs, lr {training.optim.lr:g}, batch {training.batch_size}" if job.trains else "as it is"
    )
    words.append(f"from {run.start}" if run.start else f"from {training.weights or 'random weights'}")
    if training.loss.distill and job.trains:
        words.append(f"distilled {training.loss.distill:g}")
    if job.share is not None:
        words.append(f"set for {100 * job.share:g} % of static's MACs")
    if job.paper:
        words.append(f"paper {job.paper}")
    return "; ".join(words)
