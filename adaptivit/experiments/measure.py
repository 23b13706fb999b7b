"""Train or adapt the model of a job, and evaluate it on the images of the report."""

from __future__ import annotations

import datetime
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..budget import curve as budgets
from ..data import dataset
from ..data.dataset import Labelled
from ..data.gpu_pipeline import evaluation_images
from ..errors import UserError, reason_of
from ..evaluation import report
from ..evaluation.evaluate import Result
from ..factory import create, load
from ..model import AdaptiveViT
from ..policies import spec
from ..training.gate_init import init_gate
from ..training.methods import full_spec
from ..training.run import fit
from ..utils.environment import commit, versions
from ..utils.hardware import device_name, device_of
from .job import Job

_CALIBRATION = 512  # images of validation that a budget is calibrated on


def report_images(job: Job) -> Labelled:
    """The images that all rows of one seed are judged by; none of them was trained on."""
    data, found = job.training.data, dataset.splits(job.training.data)
    wanted = ("test", "val") if job.split == "auto" else (job.split,)
    labelled = next((found[name] for name in wanted if name in found), None)
    if labelled is None and job.split != "test":
        if job.trains:
            labelled = dataset.for_training(data, job.training.val_split, job.seed)[1]
        else:
            labelled = dataset.for_evaluation(data, "auto")
    if labelled is None:
        labelled = dataset.for_evaluation(data, "test")  # raises: there is none
    return labelled if job.limit is None else labelled.spread(job.limit)


def model_of(job: Job) -> AdaptiveViT:
    """The model as training saved it, or the weights adapted without training."""
    training = job.training
    if job.trains or job.checkpoint:
        return load(job.checkpoint or Path(training.out) / "model").float()
    policy, values = spec.parse(training.policy)
    found = dataset.splits(training.data)
    some = found.get("val") or found.get("train") or next(iter(found.values()))
    torch.manual_seed(job.seed)
    classes = len(some.classes) if training.weights is None else None
    given: dict[str, Any] = {"weights": training.weights, "num_classes": classes, "img_size": training.img_size}
    model = create(training.backbone, policy, **given, **values)
    if training.weights is None:
        model.class_names = list(some.classes)
    init_gate(model, values, training, some, "cpu")  # as training does before its first step
    return model


def measure(job: Job, stop: Callable[[], bool] | None = None) -> tuple[dict[str, Any], Result | None, str]:
    """Train and evaluate: (columns of the row, result or None, traceback of an unexpected error).

    stop: called between steps; True ends the training after a checkpoint.
    """
    training, device = job.training, device_of(job.training.device)
    row = {
        "model": training.backbone,
        "method": job.name,
        "policy": spec.parse(training.policy)[0],
        "settings": full_spec(training),
        "seed": job.seed,
        "epochs": job.epochs,
        "commit": commit(),
        "device": device_name(device),
        "date": datetime.date.today().isoformat(),
    } | versions()
    try:
        begun, resumed = time.perf_counter(), (Path(training.out) / "config.json").exists()
        if job.trains:
            fit(replace(training, resume=resumed), stop=stop)
            if not resumed:  # a part of the time was spent in another call
                row["seconds_training"] = round(time.perf_counter() - begun, 1)
        model = model_of(job).to(device)
        if job.share is not None:
            row |= hold(model, job, job.share)
        size = min(training.batch_size, 256)
        row |= {"model": model.backbone_name or "ViT", "policy": model.policy_name} if job.checkpoint else {}
        result = report.measure(model, report_images(job), device, batch_size=size, workers=training.workers)
    except Exception as error:
        text = "" if isinstance(error, UserError) else traceback.format_exc()
        return row | {"status": "failed", "reason": reason_of(error)}, None, text
    found = {"status": "ok", "gmacs_share": result.gmacs / result.gmacs_static, **report.figures(model, result)}
    return row | found, result, ""


def hold(model: AdaptiveViT, job: Job, share: float) -> dict[str, Any]:
    """Set a budget of a share of static's MACs, calibrated on validation images; returns the column `settings`."""
    training = job.training
    labelled = dataset.for_training(training.data, training.val_split, job.seed)[1].spread(_CALIBRATION)
    images = evaluation_images(labelled, model.preprocessing, device_of(training.device))
    batches = dataset.batches(images, dataset.in_order(len(images), 64), training.workers)
    budget = f"{100 * (share - 1):.4g}%"
    made = model.calibrate([batch.images for batch in batches if len(batch.labels)], budget, batch_size=64)
    position = made.position_for(budgets.parse(budget), "")
    return {"settings": f"{full_spec(training)}; {made.dial}={position:.6g} for a budget of {budget}"}
