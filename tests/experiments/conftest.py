"""Fixtures of comparisons and tables: a small data set, and jobs that run in this process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adaptivit.experiments.job import Job
from adaptivit.experiments.reproduce import process
from adaptivit.experiments.reproduce import run as execute
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
        again = process.read(process.save(job))
        assert again == job  # a job survives its way through a file
        return Done(0 if process.run(again)["status"] == "ok" else 1)

    monkeypatch.setattr(execute, "launch", launch)
    return names
