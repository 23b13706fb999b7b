"""One row in a process of its own: train or go on training, evaluate, write what was measured.

    python -m adaptivit.reproduce.job JOB.json

It ends when its standard input does, so that it does not outlive who started it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import threading
import typing
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import data
from ..bench_config import CompareConfig
from ..commands import device_of
from ..compare import measure
from ..compare_plan import Entry
from ..compare_results import as_row, keep_correct
from ..config import TrainConfig
from ..data import Images
from ..errors import UserError
from ..evaluate import evaluate
from ..files import write_json
from ..model import AdaptiveViT
from ..sweep_store import Lock
from .plan import Job

_MATCHING = 512  # validation images that a knob is set on
_STEPS = 14  # of the bisection
# policy -> (setting, whether more of it costs more)
KNOBS = {
    "aht": ("threshold", True),
    "avit": ("gate_center", True),
    "pondernet": ("gate_center", True),
    "act": ("eps", False),
    "confidence": ("threshold", True),
    "similarity": ("threshold", False),
}


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


def run(job: Job) -> dict[str, Any]:
    """Train and evaluate; writes the row and returns it, failed or not."""
    console = Console(stderr=True)
    entry = Entry(job.name, job.seed, job.training, job.epochs)
    adjust = None if job.share is None else lambda model: match(model, job)
    row, result, text = measure(compare_config(job), entry, console, adjust)
    if result is not None:
        keep_correct(job.correct, result)
    elif text:
        print(text, file=sys.stderr)
    found = as_row(row) | {"recipe": job.key}
    write_json(job.row, found)
    return found


def match(model: AdaptiveViT, job: Job) -> dict[str, Any]:
    """Set the policy's knob so that the model costs the job's share of static's MACs on validation images."""
    assert job.share is not None
    policy, wanted = typing.cast(Any, model.policy), job.share
    if model.policy_name not in KNOBS:
        raise UserError(f"{job.name}: the policy {model.policy_name!r} has no knob to set for a share of {job.share}.")
    knob, rising = KNOBS[model.policy_name]
    labelled = data.for_training(job.training.data, job.training.val_split, job.seed)[1].spread(_MATCHING)
    images = Images(labelled.for_model(model.vit.num_classes, model.class_names), model.preprocessing.evaluation())
    loaded = list(data.batches(images, data.in_order(len(images), 64), job.training.workers))

    def share(value: float) -> float:
        policy.settings = dataclasses.replace(policy.settings, **{knob: value})
        found = evaluate(model, loaded, device=device_of(job.training.device))
        return found.gmacs / found.gmacs_static

    low, high = _range(model.policy_name, knob, float(getattr(policy.settings, knob)))
    logarithmic = model.policy_name == "similarity"
    for _ in range(_STEPS):
        middle = math.sqrt(low * high) if logarithmic else (low + high) / 2
        if (share(middle) > wanted) == rising:
            high = middle
        else:
            low = middle
    best = min((low, high), key=lambda value: abs(share(value) - wanted))
    share(best)
    return {"settings": f"{model.policy_name}:{knob}={best:.6g}, set for {job.share:g} of static's MACs"}


def _range(policy: str, knob: str, now: float) -> tuple[float, float]:
    """Where to look for a knob."""
    if knob == "gate_center":
        return now - 60, now + 60
    return {"aht": (0.05, 8.0), "act": (0.0, 0.99), "confidence": (0.01, 1.0), "similarity": (1e-6, 1e4)}[policy]


def read(path: str) -> Job:
    values = json.loads(Path(path).read_text())
    return Job(**values | {"training": TrainConfig(**values["training"])})


def _with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main(path: str) -> None:
    threading.Thread(target=_with_parent, daemon=True).start()
    job = read(path)
    place = Path(job.training.out)
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(place.with_name(f".{place.name}.lock"))  # another table may be at this run
    lock.acquire()
    row = run(job)
    lock.release()
    raise SystemExit(0 if row["status"] == "ok" else 1)


if __name__ == "__main__":
    main(sys.argv[1])
