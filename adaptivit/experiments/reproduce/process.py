"""One job in a process of its own: train or go on training, evaluate, write the row.

    python -m adaptivit.experiments.reproduce.process JOB.json

It ends when its standard input does, so that it does not outlive the process that started it. Asked to end (SIGTERM)
while it trains, it writes a checkpoint first.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ...training.config import TrainConfig, with_settings
from ...utils.atomic_io import write_json
from ...utils.lock import writing
from ...utils.settings import flat
from ..job import Job
from ..measure import measure
from ..store import Row, as_row

STOPPED = 75  # exit code of a job that was asked to stop and can go on


def save(job: Job) -> Path:
    """Write the job where its process reads it."""
    path = job.rows.path(job.key).with_suffix(".job")
    write_json(path, vars(job) | {"training": flat(job.training)})
    return path


def read(path: str | Path) -> Job:
    values = json.loads(Path(path).read_text())
    return Job(**values | {"training": with_settings(TrainConfig(data=""), values["training"])})


def run(job: Job, stop: Callable[[], bool] | None = None) -> Row:
    """Train and evaluate; writes the row and returns it, failed or not. stop: see training's fit."""
    values, result, text = measure(job, stop)
    if text:
        print(text, file=sys.stderr)
    row = as_row(values) | {"recipe": job.key}
    job.rows.put(job.key, row, result)
    return row


def _with_parent() -> None:
    while os.read(0, 1024):  # not through sys.stdin, whose lock Python wants when it ends
        pass
    os._exit(1)


def main(path: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which asks this one to stop
    threading.Thread(target=_with_parent, daemon=True).start()
    job = read(path)
    try:
        with writing(job.training.out, wait=math.inf):  # another table may be at this run, and may have finished it
            row = job.rows.finished(job.key) or run(job, stop.is_set)
    except KeyboardInterrupt:
        raise SystemExit(STOPPED) from None
    raise SystemExit(0 if row["status"] == "ok" else 1)


if __name__ == "__main__":
    main(sys.argv[1])
