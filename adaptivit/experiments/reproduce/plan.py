"""A table on given data and weights: its jobs in order, each with its full configuration. Nothing here imports torch.

A job has a key, a hash of all that its figures follow from. What is finished under that key is never run again, by
whatever table; where the settings of a table change, the rows that they touch get new keys and are run anew.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ...checkpoint.place import checkpoint_at
from ...errors import UserError, unknown
from ...training import recipes
from ...training.config import FREE, TrainConfig, with_settings, wrong_name
from ...training.methods import parse_method
from ...utils.coerce import at_least, convert
from ...utils.settings import command, flat, kinds
from ..job import Job, digest
from . import stand_in
from .tables import TABLES, Run, Table

_OWN = ("data", "weights", "teacher", "out", "resume", "recipe", "policy", "seed", "device", "workers")


@dataclass(frozen=True)
class ReproduceConfig:
    """Run a table or figure of ours or of a paper again: train, evaluate, write CSV, table and plot.

    Without a name: what there is, with --paper that of one paper. A second call with the same settings goes on with
    what is missing.
    Example: adaptivit reproduce cifar100-main --data cifar100.npz --weights deit_tiny.safetensors --jobs 4
    """

    table: Annotated[str | None, tyro.conf.Positional] = None
    """Name of the table or figure; none to list them."""
    paper: Literal["aht", "avit", "amod"] | None = None
    """List the experiments of this paper: run by us on its own data, on a stand-in for it, or not."""
    data: str | None = None
    """The data that the table is about, as for train."""
    weights: str | None = None
    """Starting weights: a file, a checkpoint directory, or a folder with BACKBONE.safetensors for every backbone of the
    table; `none` for random ones."""
    stand_in: bool = False
    """Run all of it in seconds on a CPU, with tiny data and a tiny model: the code is tried, no method is judged."""
    models: tuple[str, ...] = ()
    """Trained models to take for rows, instead of training these: a checkpoint directory for the last row, or
    ROW=DIR."""
    out: str | None = None
    """Where results.csv, results.md and the plots go; default: runs/reproduce/TABLE."""
    work: str | None = None
    """Where runs, logs and finished rows are kept; tables that share it share what they have in common. Default:
    runs/reproduce/work."""
    seeds: tuple[int, ...] = ()
    """Every row once with each seed; default: the table's."""
    only: tuple[str, ...] = ()
    """Only these rows, by name or pattern (`AHT*`), and those that they start from."""
    set: tuple[str, ...] = ()
    """key=value for every row, a setting of train, e.g. epochs=1 optim.lr=3e-4."""
    jobs: int = 1
    """Rows at a time, each in a process of its own; several small models fill a large GPU."""
    minutes: float | None = None
    """Stop after so many: rows that run write a checkpoint, and the same command goes on with them. 0: run nothing,
    write the results of what is finished."""
    split: Literal["auto", "val", "test"] = "auto"
    """Images of the report; auto: test, else val, else what training held out. Use val for choosing."""
    limit: int | None = None
    """Only so many of them, evenly spread."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train and evaluate."""
    workers: int = 0
    """Data-loading processes of each job."""
    dry_run: bool = False
    """Show what would be run, and run nothing."""

    def __post_init__(self) -> None:
        at_least("jobs", self.jobs, 1)
        at_least("workers", self.workers, 0)
        if self.limit is not None:
            at_least("limit", self.limit, 1)
        if self.minutes is not None:
            at_least("minutes", self.minutes, 0)
        for seed in self.seeds:
            at_least("seeds", seed, 0)
        given = {f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        if not self.table and given - {"paper"}:
            raise UserError(
                f"Expected the name of a table, e.g. adaptivit reproduce digits. Valid: {', '.join(TABLES)}."
            )
        if self.table and self.table not in TABLES:
            raise unknown("table", self.table, TABLES)
        if self.table and self.paper:
            raise UserError(
                f"Expected the name of a table, or --paper {self.paper} to list those of a paper; got both."
            )
        for name in ("data", "weights", "models"):
            if self.stand_in and name in given:
                raise UserError(f"--stand-in brings its own data and weights; leave --{name} out.")
        self.changes()
        if self.table:
            self.taken()

    @property
    def what(self) -> Table:
        assert self.table is not None
        return TABLES[self.table]

    @property
    def directory(self) -> Path:
        return Path(self.out or f"runs/reproduce/{self.table}{'-stand-in' * self.stand_in}")

    @property
    def place(self) -> str:
        """Where work is kept."""
        return self.work or (stand_in.WORK if self.stand_in else "runs/reproduce/work")

    def taken(self) -> dict[str, str]:
        """--models: checkpoint directories by row."""
        names, found = [run.name for run in self.what.runs], {}
        for item in self.models:
            row, _, place = item.rpartition("=")
            if not names or (row and row not in names):
                raise unknown(f"row of {self.table}:", row or item, names)
            found[row or names[-1]] = str(checkpoint_at(place))
        return found

    def changes(self) -> dict[str, Any]:
        """--set, with its values converted."""
        hints, found = kinds(TrainConfig), {}
        valid = [name for name in hints if name not in _OWN]
        for item in self.set:
            key, sign, value = (part.strip() for part in item.partition("="))
            if not sign:
                raise UserError(f"set: expected key=value, e.g. epochs=1, got {item!r}.")
            if key not in valid:
                raise wrong_name("setting", key, valid)
            found[key] = convert(key, value, hints[key])
        return found

    def command(self) -> str:
        """The command line that makes the whole table."""
        return command(f"reproduce {self.what.name}", self, leave_out=("table", "only", "dry_run", "minutes"))


def plan(config: ReproduceConfig) -> list[Job]:
    """Every row in the order in which it is run."""
    table = config.what
    chosen = _chosen(table, config.only)
    jobs: list[Job] = []
    for seed in dict.fromkeys(config.seeds or table.seeds):
        made: dict[str, Job] = {}
        for run in table.runs:
            if run.name in chosen:
                own = seed if run.seed is None else run.seed
                made[run.name] = _job(config, table, run, own, made.get(run.start))
        jobs += [job for job in made.values() if all((job.name, job.seed) != (j.name, j.seed) for j in jobs)]
    return jobs


def _chosen(table: Table, only: Sequence[str]) -> set[str]:
    """Names of the runs that were asked for, with those that they start from."""
    names = [run.name for run in table.runs]
    found = set() if only else set(names)
    for pattern in only:
        hits = [name for name in names if pattern == name] or fnmatch.filter(names, pattern)
        if not hits:
            raise unknown(f"row of {table.name}:", pattern, names)
        found |= set(hits)
    for run in reversed(table.runs):
        if run.name in found and run.start:
            found.add(run.start)
    return found


def _job(config: ReproduceConfig, table: Table, run: Run, seed: int, start: Job | None) -> Job:
    data = config.data or ("digits" if table.data == "digits" else None)
    if config.stand_in:
        data = str(stand_in.data(config.place))
    if data is None:
        if not config.dry_run:
            raise UserError(f"{table.name} needs --data: {table.data}.")
        data = "DATA"
    given: dict[str, Any] = {"data": data, "seed": seed, "device": config.device, "workers": config.workers}
    if run.recipe:
        training = with_settings(recipes.get(run.recipe), {"recipe": run.recipe, **given, **run.change})
    else:
        shared = with_settings(TrainConfig(data, policy="static"), {**table.shared, **run.change, **given})
        training = parse_method(run.method, shared)
    published = training
    if config.stand_in:
        tiny = {"backbone": stand_in.backbone(training.backbone), "seed": seed, **stand_in.SETTINGS}
        training = with_settings(training, tiny | ({"epochs": 2} if table.curves else {}))
    training = with_settings(training, config.changes())
    taken = config.taken().get(run.name, "")
    weights = start.model if start else taken or _weights(config, table, run, training.backbone)
    facts = {k: v for k, v in flat(training).items() if k not in FREE}
    facts |= {"weights": start.key if start else weights}
    trains, share = run.train and not taken, None if taken else run.share  # a trained model has its own budget
    if not trains:
        facts |= {"epochs": 0}
    # without the row's name: what other rows and tables train, too, is trained once
    out = Path(config.place) / "runs" / f"{_words(training.policy.partition(':')[0])}-seed{seed}-{digest(facts)}"
    key = digest(facts | {"share": share, "split": config.split, "limit": config.limit})
    own = training.epochs if trains else 0
    return Job(
        name=run.name,
        seed=seed,
        training=replace(training, weights=weights, out=str(out)),
        trains=trains,
        checkpoint=taken,
        differs=_differs(config, table, published, training, taken) if table.paper else "",
        epochs=own + (start.epochs if start else 0),
        share=share,
        split=config.split,
        limit=config.limit,
        paper=run.paper,
        key=key,
        work=config.place,
        needs=start.key if start else "",
    )


def _differs(config: ReproduceConfig, table: Table, published: TrainConfig, training: TrainConfig, taken: str) -> str:
    """What of a row is not the paper's, as far as the settings tell."""
    if config.stand_in:
        return stand_in.WORDS
    names = ("backbone", "epochs", "batch_size", "optim.lr")
    mine, its = flat(training), flat(published)
    parts = [f"{name} {mine[name]} (paper {its[name]})" for name in names if mine[name] != its[name]]
    parts += ["a model given by --models, not trained here"] if taken else []
    parts += [f"data {Path(config.data).name} (paper: {table.data})"] if config.data else []
    return "; ".join(parts)


def _weights(config: ReproduceConfig, table: Table, run: Run, backbone: str) -> str | None:
    """The weights that a run starts from."""
    if run.weights == "none" or config.weights == "none" or (config.weights is None and table.data == "digits"):
        return None
    name = run.weights or backbone
    if config.stand_in:
        return str(stand_in.weights(config.place, backbone))
    if config.weights is None:
        if not config.dry_run:
            raise UserError(
                f"{table.name} needs --weights: a file, or a folder with {name}.safetensors (of timm's keys) and so on "
                "for every backbone; or none for random ones."
            )
        return f"WEIGHTS/{name}"
    path = Path(config.weights)
    if not run.weights and (path.is_file() or (path / "config.json").exists()):
        return str(path)
    tried = [path / f"{name}{suffix}" for suffix in (".safetensors", ".pth", ".pt", "")]
    found = next((place for place in tried if place.exists()), None)
    if found is None and not config.dry_run:
        raise UserError(f"weights: expected {tried[0]} or {tried[-1]}/ for the row {run.name!r}; it is not there.")
    return str(found or tried[0])


def log_of(job: Job) -> Path:
    return Path(job.work) / "logs" / f"{_words(job.name)}-seed{job.seed}-{job.key}.log"


def _words(name: str) -> str:
    """A name as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")
