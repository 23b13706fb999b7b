"""One row in a process of its own: train or go on training, evaluate, write what was measured.

    python -m adaptivit.experiments.reproduce.job JOB.json

It ends when its standard input does, so that it does not outlive who started it. Asked to end (SIGTERM) while it
trains, it writes a checkpoint first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from ...budget import curve as budgets
from ...data import dataset
from ...data.gpu_pipeline import evaluation_images
from ...model import AdaptiveViT
from ...training.config import TrainConfig, with_settings
from ...training.methods import full_spec
from ...utils.atomic_io import write_json
from ...utils.hardware import device_of
from ..compare.config import CompareConfig
from ..compare.plan import Entry
from ..compare.results import Row, as_row, keep_correct, read_correct
from ..compare.run import measure
from ..sweep.store import Lock
from .plan import Job

_IMAGES = 512  # of validation, that a budget is calibrated on
STOPPED = 75  # exit code of a job that was asked to stop and can go on


def compare_config(job: Job) -> CompareConfig:
    """What `adaptivit compare` needs to know of a job beside its training: the images and the device."""
    training = job.training
    return CompareConfig(
        data=training.data,
        methods=("static",),
        backbone=training.backbone,
        weights=training.weights,
        img_size=training.img_size,
        epochs=training.epochs if job.trains else 0,
        batch_size=min(training.batch_size, 256),
        val_split=training.val_split,
        split=job.split,
        limit=job.limit,
        device=training.device,
        workers=training.workers,
    )


def run(job: Job, stop: Callable[[], bool] | None = None) -> dict[str, Any]:
    """Train and evaluate; writes the row and returns it, failed or not. stop: see train.fit."""
    console = Console(stderr=True)
    entry = Entry(job.name, job.seed, job.training, job.epochs)
    adjust = None if job.share is None else lambda model: hold(model, job)
    row, result, text = measure(compare_config(job), entry, console, adjust, stop)
    if result is not None:
        keep_correct(job.correct, result)
    elif text:
        print(text, file=sys.stderr)
    found = as_row(row) | {"recipe": job.key}
    write_json(job.row, found)
    return found


def hold(model: AdaptiveViT, job: Job) -> dict[str, Any]:
    """Set the budget of the job's share of static's MACs, calibrated on validation images."""
    assert job.share is not None
    device, training = device_of(job.training.device), job.training
    labelled = dataset.for_training(training.data, training.val_split, job.seed)[1].spread(_IMAGES)
    images = evaluation_images(labelled, model.preprocessing, device)
    batches = dataset.batches(images, dataset.in_order(len(images), 64), training.workers)
    budget = f"{100 * (job.share - 1):.4g}%"
    made = model.calibrate([batch.images for batch in batches if len(batch.labels)], budget, batch_size=64)
    position = made.position_for(budgets.parse(budget), "")
    return {"settings": f"{full_spec(training)}; {made.dial}={position:.6g} for a budget of {budget}"}


def read(path: str) -> Job:
    values = json.loads(Path(path).read_text())
    return Job(**values | {"training": with_settings(TrainConfig(data=""), values["training"])})


def finished(job: Job) -> Row | None:
    """The row of a job that has ended well, or nothing."""
    try:
        row: Row = json.loads(job.row.read_text())
    except (OSError, ValueError):
        return None
    return row if row.get("status") == "ok" and read_correct(job.correct) is not None else None


def _with_parent() -> None:
    while os.read(0, 1024):  # not through sys.stdin, whose lock Python wants when it ends
        pass
    os._exit(1)


def main(path: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches who started it too, and that one asks
    threading.Thread(target=_with_parent, daemon=True).start()
    job = read(path)
    place = Path(job.training.out)
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(place.with_name(f".{place.name}.lock"))  # another table may be at this run
    lock.acquire()
    try:
        row = finished(job) or run(job, stop.is_set)  # another call may have had it while this one waited
    except KeyboardInterrupt:
        raise SystemExit(STOPPED) from None
    finally:
        lock.release()
    raise SystemExit(0 if row["status"] == "ok" else 1)


if __name__ == "__main__":
    main(sys.argv[1])
