"""Many methods under one recipe: train each, evaluate all on the same images, time them in turn, draw the front.

OUT/compare.json   what all methods have in common; another comparison is refused
OUT/rows/          a row a method and seed, written as soon as it is known; an interrupted comparison goes on
OUT/results.csv    all of them; results.md and pareto.png for people

One method's failure is a row of its own and not the end.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ...data import dataset
from ...data.gpu_pipeline import evaluation_images
from ...errors import UserError, reason_of
from ...execution.timing import interleaved
from ...training.methods import parse_method, slug
from ...utils.atomic_io import write_bytes, write_text
from ...utils.console import announce, bar, count, left_out, show
from ...utils.csv import csv_text
from ...utils.hardware import device_name, device_of
from ...utils.lock import writing
from ...utils.settings import changed
from ...visualize.pareto import pareto
from ..job import Job
from ..measure import measure, model_of, report_images
from ..store import COLUMNS, STATIC, TRAINED_ON, Row, RowStore, add_differences, as_row, same_settings
from ..table import body, caption, failures, mean_table, points, provenance, screen, several
from .config import CompareConfig


def plan(config: CompareConfig) -> list[Job]:
    """Every row in the order in which it is run: for each seed static first, then the methods as they were given."""
    methods = [m for m in dict.fromkeys(m.strip() for m in config.methods) if m != STATIC]
    goes_on, jobs = config.start == "static", []
    for seed in dict.fromkeys(config.seeds):
        shared = config.shared(seed)
        first = parse_method(STATIC, shared)
        if goes_on:  # there is no teacher yet
            first = changed(first, {"loss.distill": 0.0})
            model = str(Path(config.out) / "runs" / slug(STATIC, seed) / "model")
            shared = replace(shared, weights=model, teacher=shared.teacher or (model if shared.loss.distill else None))
        rows = [(STATIC, first), *([(TRAINED_ON, parse_method(STATIC, shared))] if goes_on else [])]
        for method, training in [*rows, *((m, parse_method(m, shared)) for m in methods)]:
            key = slug(method, seed)
            jobs.append(
                Job(
                    name=method,
                    seed=seed,
                    training=replace(training, out=str(Path(config.out) / "runs" / key)),
                    trains=config.epochs > 0,
                    epochs=config.epochs * (2 if goes_on and method != STATIC else 1),
                    split=config.split,
                    limit=config.limit,
                    key=key,
                    work=config.out,
                )
            )
    return jobs


def reference(config: CompareConfig) -> str:
    """The row that the others are compared to."""
    return TRAINED_ON if config.start == "static" else STATIC


def run(config: CompareConfig) -> list[Row]:
    """Fill OUT; returns all of its rows, failed ones too."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("compare runs in one process; start it without torchrun.")
    with writing(config.out):
        return _run(config)


def _run(config: CompareConfig) -> list[Row]:
    device_of(config.device)
    out, jobs, console = Path(config.out), plan(config), Console(stderr=True)
    judged = report_images(jobs[0])  # raises what is wrong with the data before anything runs
    if not (out / "compare.json").exists() and ((out / "results.csv").exists() or (out / "config.json").exists()):
        raise UserError(f"{out} holds something else than a comparison: pass another --out.")
    same_settings(out / "compare.json", "comparison", config.fixed())
    size = f"{count(len({job.name for job in jobs}), 'method')}, {count(len(set(config.seeds)), 'seed')}"
    where = device_name(device_of(config.device))
    announce("compare", size, f"{count(len(judged), 'image')} to judge by", where)
    left_out(judged.without(dataset.verify(judged)))
    store = jobs[0].rows
    for number, job in enumerate(jobs, start=1):
        head = f"[{number}/{len(jobs)}] {job.name}, seed {job.seed}"
        if store.finished(job.key) is not None:
            console.print(f"{head}: already in {out / 'results.csv'}, not run again", markup=False)
            continue
        console.print(head, markup=False, style="bold")
        _run_one(config, job, console)
        _collect(config, jobs, store)
    if config.timing_repeats:
        _time_all(config, _collect(config, jobs, store), store, console)
    rows = _collect(config, jobs, store)
    _write(config, rows)
    return rows


def _run_one(config: CompareConfig, job: Job, console: Console) -> None:
    """Train and evaluate one method; whatever goes wrong is written into its row."""
    row, result, text = measure(job)
    job.rows.put(job.key, as_row(row) | {"recipe": config.fingerprint()}, result)
    if text:
        write_text(Path(config.out) / "errors" / f"{job.key}.txt", text)
    if result is None:
        console.print(f"  failed: {row['reason']}", markup=False, style="red")
    else:
        console.print(f"  {result.text}, {result.gmacs:.4g} GMACs", markup=False, highlight=False)


def _collect(config: CompareConfig, jobs: list[Job], store: RowStore) -> list[Row]:
    """All rows of OUT with their differences, those of this call first; writes results.csv."""
    keys = dict.fromkeys([*(job.key for job in jobs), *store.keys()])
    rows = [row for key in keys if (row := store.get(key)) is not None]
    add_differences(rows, reference(config), lambda row: store.correct(slug(row["method"], int(row["seed"]))))
    write_text(Path(config.out) / "results.csv", csv_text(rows, COLUMNS))
    return rows


def _time_all(config: CompareConfig, rows: list[Row], store: RowStore, console: Console) -> None:
    """One interleaved run over all models that there are; what goes wrong here costs the timing alone."""
    rows = [row for row in rows if store.finished(slug(row["method"], int(row["seed"]))) is not None]
    if not rows:
        return
    batch = str(min(config.timing_batch, int(rows[0]["images"])))
    before = {(row["timed"], row["timing_batch"], row["timing_device"]) for row in rows}
    if before == {(rows[0]["timed"] or "never", batch, device_name(device_of(config.device)))}:
        console.print("all models were timed together before, not timed again")
        return
    try:
        _take_turns(config, rows, console)
    except Exception as error:
        console.print(f"timing failed: {reason_of(error)}", markup=False, style="red")
        return
    for row in rows:
        store.put(slug(row["method"], int(row["seed"])), row)


def _take_turns(config: CompareConfig, rows: list[Row], console: Console) -> None:
    device = device_of(config.device)
    half = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
    methods = tuple(dict.fromkeys(row["method"] for row in rows if row["method"] not in (STATIC, TRAINED_ON)))
    seeds = tuple(dict.fromkeys(int(row["seed"]) for row in rows))
    jobs = {job.key: job for job in plan(replace(config, seeds=seeds, methods=methods or (STATIC,)))}
    keys = [slug(row["method"], int(row["seed"])) for row in rows]
    models = {key: model_of(jobs[key]) for key in keys}
    some = report_images(jobs[keys[0]]).spread(config.timing_batch)
    pictures = evaluation_images(some, models[keys[0]].preprocessing, device)
    images = next(dataset.batches(pictures, dataset.in_order(len(pictures), config.timing_batch))).images
    images = images.to(device, torch.bfloat16 if half else torch.float32)
    contenders: dict[str, Any] = {
        f"{key} {layout}": (model.to(device, images.dtype), layout)
        for key, model in models.items()
        for layout in ("masked", "auto")
    }
    with bar(f"  time {len(rows)} models in turn", config.timing_repeats, console) as progress:
        times = interleaved(contenders, images, config.timing_repeats, progress=progress)
    now = datetime.datetime.now().isoformat(timespec="seconds")
    for row, key in zip(rows, keys, strict=True):
        static = times.get(f"{slug(reference(config), int(row['seed']))} auto")
        for kind, layout in (("masked", "masked"), ("compact", "auto")):
            timing = times[f"{key} {layout}"]
            row[f"images_per_second_{kind}"] = f"{timing.images_per_second:.6g}"
            row[f"speed_{kind}"] = f"{timing.speed(static):.4g}" if static else ""
        row |= {"compact_layout": timing.layout, "timing_batch": str(len(images)), "timed": now}
        row |= {"timing_precision": "bf16" if half else "fp32", "timing_device": device_name(device)}


def _write(config: CompareConfig, rows: list[Row]) -> None:
    """results.md, pareto.png and the table on the screen."""
    out, good = Path(config.out), [row for row in rows if row["status"] == "ok"]
    write_text(out / "results.md", markdown(rows, config))
    if good:
        length = f"{config.epochs} epochs a method" if config.epochs else "without training"
        detail = f"{config.backbone}, {int(good[0]['images']):,} images of {Path(config.data).name}, {length}"
        write_bytes(out / "pareto.png", pareto(points(good), detail=detail, reference=reference(config)))
    show(screen(rows))
    print("\n".join(failures(rows)), end="\n" * bool(failures(rows)))


def markdown(rows: list[Row], config: CompareConfig) -> str:
    """A Markdown table with its caption; below it, with several seeds, mean and spread of each method."""
    good, against = [row for row in rows if row["status"] == "ok"], reference(config)
    text = ["# Comparison", "", *body(rows), f"`{config.command()}`", ""]
    if good:
        images = f"of {config.data} ({config.split} split), backbone {config.backbone}"
        text += [f"{caption(rows, images, against)} A difference smaller than its interval is not a result.", ""]
    if any(row["timed"] for row in good):
        columns = ("timing_batch", "timing_precision", "timing_device", "compact_layout")
        batch, precision, device, layout = (several(good, name) for name in columns)
        text += [
            f"Time: batches of {batch}, {precision}, {device}, all models in turn, median; layout {layout}, as `auto` "
            f"chooses; speed is the ratio to `{against}`. With masks: see results.csv.",
            "",
        ]
    text += [provenance(rows), *mean_table(rows)]
    if good:
        text += ["", "![Accuracy against cost](pareto.png)"]
    return "\n".join(text) + "\n"
