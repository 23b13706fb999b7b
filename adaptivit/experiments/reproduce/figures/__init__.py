"""What is measured and drawn of a table's models once they are trained: a file a figure.

A file has `measure(given: Given) -> Found`; a table names it in its field `figure`.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ....data import dataset
from ....data.dataset import Labelled
from ....model import AdaptiveViT
from ....utils.atomic_io import new_directory, write_bytes, write_text
from ....utils.csv import csv_text
from ....utils.environment import commit, versions
from ....utils.hardware import device_name, device_of
from ....visualize.collect import Seen, look
from ...job import Job, digest
from ...measure import hold, model_of, report_images
from ...store import Row
from ..tables import Table


@dataclass(frozen=True)
class Given:
    """The finished rows of a table, of one seed."""

    table: Table
    jobs: Mapping[str, Job]  # by row, in the table's order
    rows: Mapping[str, Row]
    device: torch.device
    stand_in: bool

    @property
    def names(self) -> list[str]:
        """The rows that are looked at: those that no other row starts from."""
        starts = {run.start for run in self.table.runs}
        return [name for name in self.jobs if name not in starts]

    @property
    def seed(self) -> int:
        return next(iter(self.jobs.values())).seed if self.jobs else 0

    def option(self, name: str, default: Any) -> Any:
        """A setting of the figure, by the table's record."""
        return self.table.options.get(name, default)

    def model(self, name: str) -> AdaptiveViT:
        """The model of a row, in evaluation mode, at its budget."""
        job = self.jobs[name]
        model = model_of(job).to(self.device).eval()
        if job.share is not None:
            hold(model, job, job.share)
        return model

    @functools.cached_property
    def images(self) -> Labelled:
        """The images of the report."""
        return report_images(next(iter(self.jobs.values())))

    @functools.cached_property
    def choosing(self) -> Labelled:
        """Validation images: what a setting may be chosen on."""
        job = next(iter(self.jobs.values()))
        return dataset.for_training(job.training.data, job.training.val_split, job.seed)[1]

    def look(self, model: AdaptiveViT, limit: int | None = None) -> Seen:
        """What a model does with every patch of the report's images, or of so many, evenly spread."""
        images = self.images if limit is None else self.images.spread(limit)
        return look(model, images.for_model(model), batch_size=64)


@dataclass(frozen=True)
class Found:
    """What a figure measured."""

    rows: Sequence[Mapping[str, Any]] = ()  # figure.csv
    pictures: Mapping[str, bytes] = field(default_factory=dict)  # by file name
    compared: Sequence[Mapping[str, str]] = ()  # lines for people: what, ours, paper
    notes: Sequence[str] = ()  # what differs from the paper's, one sentence each
    made: Mapping[str, str] = field(default_factory=dict)  # date, device, versions, commit: filled in by `measured`

    def write(self, out: Path) -> None:
        if self.rows:
            write_text(out / "figure.csv", csv_text([{**row, **self.made} for row in self.rows]))
        for name, picture in self.pictures.items():
            write_bytes(out / name, picture)


def measured(given: Given, folder: Path) -> Found:
    """The figure of a table, or what an earlier call has kept of it in the folder."""
    keys = [job.key for job in given.jobs.values()]
    facts = {"figure": given.table.figure, "options": dict(given.table.options), "jobs": keys}
    kept = folder / digest(facts | {"device": given.device.type})
    if not (kept / "figure.json").exists():
        measure = importlib.import_module(f"{__name__}.{given.table.figure}").measure
        found: Found = measure(given)
        made = {"date": datetime.date.today().isoformat(), "device": device_name(given.device), "commit": commit()}
        texts = {k: v for k, v in asdict(found).items() if k != "pictures"} | {"made": made | versions()}
        with new_directory(kept) as new:
            write_text(new / "figure.json", json.dumps(texts, default=float))
            for name, picture in found.pictures.items():
                write_bytes(new / name, picture)
    texts = json.loads((kept / "figure.json").read_text())
    pictures = {path.name: path.read_bytes() for path in sorted(kept.iterdir()) if path.name != "figure.json"}
    return Found(pictures=pictures, **texts)


def given_of(table: Table, jobs: Sequence[Job], rows: Mapping[str, Row], stand_in: bool) -> Given | None:
    """The rows of the first seed; None while one of them is missing."""
    own = {job.name: job for job in jobs if job.seed == jobs[0].seed}
    done = {name: rows[job.key] for name, job in own.items() if rows.get(job.key, {}).get("status") == "ok"}
    if len(done) < len(own):
        return None
    device = device_of(next(iter(own.values())).training.device if own else "auto")
    return Given(table, own, done, device, stand_in)
