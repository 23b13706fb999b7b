"""Fixtures of comparisons and tables: a small data set, and jobs that run in this process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adaptivit.experiments.reproduce import execute
from adaptivit.experiments.reproduce import job as job_module
from adaptivit.experiments.reproduce.plan import Job
from adaptivit.utils.atomic_io import write_json
from tests.support.tables import Done


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 + 8 + 24 pictures of 32 px, the classes told apart by their colour."""
    draw, arrays = np.random.default_rng(0), {}
    for split, count in (("train", 16), ("val", 8), ("test", 24)):
        x, y = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), np.arange(count) % 3
        x[np.arange(count), ..., y] |= 128
        arrays |= {f"{split}_x": x, f"{split}_y": y}
    path = tmp_path_factory.mktemp("small") / "small.npz"
    np.savez(path, **arrays)
    return path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs run in this process, at once; the names of those that were launched."""
    names: list[str] = []

    def launch(job: Job, at_a_time: int) -> Done:
        names.append(job.name)
        again = job_module.read(_spec(job))
        assert again == job  # a job survives its way through a file
        return Done(0 if job_module.run(again)["status"] == "ok" else 1)

    monkeypatch.setattr(execute, "launch", launch)
    return names


def _spec(job: Job) -> str:
    path = job.row.with_suffix(".job")
    write_json(path, job.to_json())
    return str(path)
