"""`adaptivit sweep`: trials over a space of settings, judged on the validation images. The test split is not used.

OUT/trials/NNNN/   the run directory of a trial (its checkpoint goes when it has ended well)
OUT/trials.csv     every trial
OUT/best.json      the best one, as a recipe for `train`; OUT/trials/NNNN/recipe.json for every other
OUT/front.png      top-1 against GMACs
The trials themselves: trials.py.
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
from ...errors import UserError, first_line
from ...evaluation.evaluate import Result
from ...evaluation.report import measure
from ...factory import create
from ...model import AdaptiveViT
from ...policies import spec
from ...training.config import TrainConfig
from ...training.gate_init import init_gate
from ...training.run import fit
from ...utils.atomic_io import write_json
from ...utils.console import show
from ...utils.hardware import device_of
from ...utils.settings import flat
from . import report
from .config import NOT_IN_RECIPE, SweepConfig, TrialConfig
from .space import Params, apply, parse
from .trials import Claim, Record, Trials


def sweep(config: SweepConfig) -> None:
    """adaptivit sweep"""
    search(config)


def search(config: SweepConfig) -> Record | None:
    """Run what is left of a sweep; returns the best trial so far (None while other processes run the first ones)."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("sweep runs in one process; start several with the same --out to share its trials.")
    axes = parse(config.space, config.train)
    _check(config.train, {axis.key for axis in axes})
    trials, console = Trials(config, axes), Console(stderr=True)
    while (claim := trials.claim()) is not None:
        line = _trial(config, trials, claim, console)
        with trials.alone():
            records = trials.records()
            report.write(config, records)
        if config.objective == "hypervolume" and "failed" not in line:
            line += f", hypervolume {report.covered(records):.2f} %"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    with trials.alone():
        return _end(config, trials.records())


def _check(config: TrialConfig, keys: set[str]) -> None:
    """Data and model, before anything is written: what is wrong with them is wrong with every trial."""
    images, val = dataset.for_training(config.data, config.val_split, config.seed)
    if not keys & {"backbone", "weights", "img_size", "policy"}:
        model = _model(config, len(images.classes))
        if config.epochs == 0 and "epochs" not in keys:
            val.for_model(model)


def _trial(config: SweepConfig, trials: Trials, claim: Claim, console: Console) -> str:
    """Run one trial and record how it ended, in words. Only wrong settings are a failure; other errors are raised."""
    point = " ".join(f"{k}={report.setting(v)}" for k, v in claim.params.items())
    head = f"trial {claim.number} of {trials.count}: {point} |"
    facts: dict[str, Any] = {"date": datetime.date.today().isoformat()}
    begun = time.perf_counter()
    try:
        trial = trial_config(config, claim.number, claim.params)
        facts["recipe"] = recipe(trial)
        result = run_trial(trial, show=console.is_terminal)
    except (UserError, torch.OutOfMemoryError) as error:
        facts |= {"reason": first_line(error), "seconds": round(time.perf_counter() - begun, 1)}
        trials.end(claim, "failed", facts)
        return f"{head} failed: {facts['reason']}"
    except BaseException:
        trials.end(claim, "begun", facts)
        console.print(f"{head} interrupted; the same command goes on", highlight=False, markup=False, soft_wrap=True)
        raise
    share, seconds = result.gmacs / result.gmacs_static, time.perf_counter() - begun
    facts |= {"result": result.summary(), "seconds": round(seconds, 1)}
    facts["objectives"] = report.objectives(config, result.score, share)
    record = trials.end(claim, "finished", facts)
    write_json(Path(trial.out) / "recipe.json", report.recipe(config, record))
    over = ", over the budget" if config.objective == "budget" and share > config.max_share else ""
    return (
        f"{head} {result.text} at {result.gmacs:.4f} GMACs ({100 * share:.1f} % of static), "
        f"depth {result.mean_depth:.2f}, {seconds:.0f} s{over}"
    )


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
    torch.manual_seed(config.seed)
    _, val = dataset.for_training(config.data, config.val_split, config.seed)
    device = device_of(config.device)
    model = _model(config, len(val.classes)).to(device)
    if config.gate_init:
        init_gate(model, spec.parse(config.policy)[1], config, val.for_model(model), device)
    return measure(model, val, device, batch_size=config.batch_size, workers=config.workers)


def _end(config: SweepConfig, records: list[Record]) -> Record | None:
    """Write the files, print the table of the front and the best trial."""
    report.write(config, records)
    running, failed = (sum(r.status == status for r in records) for status in ("running", "failed"))
    chosen, out = report.best(config, records), Path(config.train.out)
    if chosen is None and not running:
        raise UserError(f"No trial ended well. The first one: {records[0].facts['reason']}")
    if chosen is not None:
        report.draw(config, records)
        show(report.table(config, records))
    if failed:
        print(f"{failed} trials failed: see the column reason in {out / 'trials.csv'}")
    if running:
        print(f"{running} trials are still running in other processes")
    if chosen is None:
        return None
    if config.objective == "hypervolume":
        print(f"hypervolume {report.covered(records):.2f} % against (0 %, all of static's MACs)")
    if not report.within(config, chosen):
        print(f"no trial is within {config.max_share} of static's MACs; the best one takes {chosen.share:.3f}")
    place = out / "best.json"
    print(f"best: trial {chosen.number}. adaptivit train --recipe {place} --data {config.train.data}")
    return chosen
