"""`adaptivit sweep`: trials over a space of settings, judged on the validation images. The test split is not used.

OUT/trials/NNNN/   the run directory of a trial (its checkpoint goes when it has ended well)
OUT/trials.csv     every trial
OUT/best.json      the best one, as a recipe for `train`; OUT/trials/NNNN/recipe.json for every other
OUT/front.png      top-1 against GMACs
The trials themselves are in the journal (sweep_store.py).
"""

from __future__ import annotations

import datetime
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ...data import dataset
from ...data.gpu_pipeline import evaluation_images
from ...errors import UserError, first_line
from ...evaluation.evaluate import Result, evaluate
from ...factory import create
from ...model import AdaptiveViT
from ...policies import spec
from ...training.config import TrainConfig
from ...training.gate_init import calibrate
from ...utils.atomic_io import write_json
from ...utils.environment import versions
from ...utils.settings import flat
from . import report
from .config import NOT_IN_RECIPE, SweepConfig, TrialConfig
from .space import Params, apply, parse
from .store import Claim, Record, Store


def sweep(config: SweepConfig) -> None:
    """adaptivit sweep"""
    search(config)


def search(config: SweepConfig) -> Record | None:
    """Run what is left of a sweep; returns the best trial so far (None while other processes run the first ones)."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("sweep runs in one process; start several with the same --out to share its trials.")
    axes = parse(config.space, config.train)
    _check(config.train, {axis.key for axis in axes})
    store = Store(config, axes)
    console = Console(stderr=True)
    while (claim := store.claim()) is not None:
        _trial(config, store, claim, console)
        with store.alone():
            report.write(config, store.records())
    with store.alone():
        return _end(config, store)


def _check(config: TrialConfig, keys: set[str]) -> None:
    """Data and model, before anything is written: what is wrong with them is wrong with every trial."""
    images, val = dataset.for_training(config.data, config.val_split, config.seed)
    if not keys & {"backbone", "weights", "img_size", "policy"}:
        model = _model(config, len(images.classes))
        if config.epochs == 0 and "epochs" not in keys:
            val.for_model(model)


def _trial(config: SweepConfig, store: Store, claim: Claim, console: Console) -> None:
    """Run one trial and record how it ended. Only what is wrong with its settings is a failure; the rest is raised."""
    said = " ".join(f"{k}={report.setting(v)}" for k, v in claim.params.items())
    head = f"trial {claim.number} of {store.count}: {said} |"
    facts: dict[str, Any] = {"date": datetime.date.today().isoformat(), "versions": versions("optuna")}
    begun = time.perf_counter()
    try:
        trial = trial_config(config, claim.number, claim.params)
        facts["recipe"] = recipe(trial)
        result = run_trial(trial, show=console.is_terminal)
    except (UserError, torch.OutOfMemoryError) as error:
        facts |= {"reason": first_line(error), "seconds": round(time.perf_counter() - begun, 1)}
        store.fail(claim, **facts)
        console.print(f"{head} failed: {facts['reason']}", highlight=False, markup=False, soft_wrap=True)
        return
    except BaseException:
        store.fail(claim)
        console.print(f"{head} interrupted; the same command goes on", highlight=False, markup=False, soft_wrap=True)
        raise
    share, seconds = result.gmacs / result.gmacs_static, time.perf_counter() - begun
    facts |= {"result": result.summary(), "seconds": round(seconds, 1)}
    store.finish(claim, report.values(config, result.score, share), **facts)
    line = (
        f"{head} {result.text} at {result.gmacs:.4f} GMACs ({100 * share:.1f} % of static), "
        f"depth {result.mean_depth:.2f}, {seconds:.0f} s"
    )
    records = store.records()
    if config.objective == "hypervolume":
        line += f", hypervolume {_hypervolume(records):.2f} %"
    elif config.objective == "budget" and share > config.max_share:
        line += ", over the budget"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    mine = next(r for r in records if r.number == claim.number)
    write_json(Path(trial.out) / "recipe.json", report.recipe(config, mine))


def trial_config(config: SweepConfig, number: int, params: Params) -> TrialConfig:
    """The configuration of a trial."""
    place = Path(config.train.out) / "trials" / f"{number:04d}"
    return replace(apply(config.train, params), out=str(place), resume=(place / "config.json").exists())


def recipe(config: TrainConfig) -> dict[str, Any]:
    """The settings of a configuration that `train` takes from a recipe file. 0 epochs are left to its default."""
    settings = {k: v for k, v in flat(config).items() if k not in NOT_IN_RECIPE}
    return {k: v for k, v in settings.items() if not (k == "epochs" and v == 0)}


def run_trial(config: TrialConfig, show: bool = True) -> Result:
    """The validation result of a configuration: trained, or for 0 epochs as it is."""
    if config.epochs == 0:
        return _untrained(config)
    from ...training.run import fit

    result = fit(TrainConfig(**vars(config)), show)
    shutil.rmtree(Path(config.out) / "checkpoint", ignore_errors=True)  # only a continuation needs it
    return result


def _model(config: TrialConfig, classes: int) -> AdaptiveViT:
    """As `train` begins; without training the head must be that of the weights."""
    policy, values = spec.parse(config.policy)
    number = classes if config.epochs else None
    return create(
        config.backbone, policy, weights=config.weights, num_classes=number, img_size=config.img_size, **values
    )


def _untrained(config: TrialConfig) -> Result:
    from ...utils.hardware import device_of

    torch.manual_seed(config.seed)
    _, val = dataset.for_training(config.data, config.val_split, config.seed)
    device = device_of(config.device)
    model = _model(config, len(val.classes)).to(device)
    val = val.for_model(model)
    if config.gate_init:
        calibrate(model, spec.parse(config.policy)[1], config, val, device)
    images = evaluation_images(val, model.preprocessing, device)
    order = dataset.in_order(len(images), config.batch_size)
    return evaluate(model, dataset.batches(images, order, config.workers), device=device)


def _hypervolume(records: list[Record]) -> float:
    return report.hypervolume((r.top1, r.share) for r in report.finished(records))


def _end(config: SweepConfig, store: Store) -> Record | None:
    """Files and the table of the front."""
    records = store.records()
    report.write(config, records)
    running = sum(r.status == "running" for r in records)
    chosen = report.best(config, records)
    if chosen is None:
        if not running:
            raise UserError(f"No trial ended well. The first one: {records[0].facts['reason']}")
        print(f"{running} trials are still running in other processes")
        return None
    report.draw(config, records)
    wide = Console()
    (wide if wide.is_terminal else Console(width=120)).print(report.table(config, records))
    failed = sum(r.status == "failed" for r in records)
    if failed:
        print(f"{failed} trials failed: see the column reason in {Path(config.train.out) / 'trials.csv'}")
    if running:
        print(f"{running} trials are still running in other processes")
    if config.objective == "hypervolume":
        print(f"hypervolume {_hypervolume(records):.2f} % against (0 %, all of static's MACs)")
    if not report.within(config, chosen):
        print(f"no trial is within {config.max_share} of static's MACs; the best one takes {chosen.share:.3f}")
    place = Path(config.train.out) / "best.json"
    print(f"best: trial {chosen.number}. adaptivit train --recipe {place} --data {config.train.data}")
    return chosen
