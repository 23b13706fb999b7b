"""Many methods under one recipe: train each, evaluate all on the same images, time them in turn, draw the front.

The rows are kept in OUT/results.csv as they come (compare_results.py), so that an interrupted comparison goes on with
what is missing, and one method's failure is a row of its own and not the end.
"""

from __future__ import annotations

import datetime
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ...data import dataset
from ...data.gpu_pipeline import evaluation_images
from ...errors import UserError, first_line
from ...evaluation.evaluate import Result, evaluate
from ...evaluation.timing import interleaved
from ...model import AdaptiveViT
from ...policies import spec
from ...training.methods import full_spec, slug
from ...training.run import fit
from ...utils.atomic_io import write_bytes, write_text
from ...utils.environment import commit, versions
from ...utils.hardware import device_of
from ...visualize.pareto import pareto
from .config import CompareConfig
from .plan import Entry, model_of, plan, report_images
from .results import STATIC, TIMING, TRAINED_ON, Results, Row
from .table import failures, markdown, points, screen


def run(config: CompareConfig) -> list[Row]:
    """Fill OUT; returns all of its rows, failed ones too."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("compare runs in one process; start it without torchrun.")
    device_of(config.device)
    report_images(config, config.seeds[0])  # what is wrong with the data is said before anything runs
    results, console = Results(config), Console(stderr=True)
    for number, entry in enumerate(entries := plan(config), start=1):
        head = f"[{number}/{len(entries)}] {entry.method}, seed {entry.seed}"
        if results.find(entry.method, entry.seed) is not None:
            console.print(f"{head}: already in {results.path / 'results.csv'}, not run again", markup=False)
            continue
        console.print(head, markup=False, style="bold")
        _run_one(config, entry, results, console)
    if config.timing_repeats:
        _time_all(config, results, console)
    _write(config, results)
    return results.rows


def _run_one(config: CompareConfig, entry: Entry, results: Results, console: Console) -> None:
    """Train and evaluate one method; whatever goes wrong is written into its row."""
    row, result, text = measure(config, entry, console)
    results.put(row, result)
    if text:
        write_text(results.path / "errors" / f"{slug(entry.method, entry.seed)}.txt", text)
    if result is None:
        console.print(f"  failed: {row['reason']}", markup=False, style="red")
    else:
        console.print(f"  {result.text}, {result.gmacs:.4g} GMACs", markup=False, highlight=False)


def measure(
    config: CompareConfig,
    entry: Entry,
    console: Console,
    adjust: Callable[[AdaptiveViT], dict[str, Any]] | None = None,
    stop: Callable[[], bool] | None = None,
) -> tuple[dict[str, Any], Result | None, str]:
    """Train where there are epochs to train, and evaluate: (row, result or nothing, text of an unexpected error).

    adjust: changes the model before it is evaluated; what it returns goes into the row. stop: see train.fit.
    """
    row = _head(config, entry)
    try:
        begun, resumed = time.perf_counter(), (entry.run / "config.json").exists()
        if config.epochs:
            fit(replace(entry.training, resume=resumed), stop=stop)
            if not resumed:  # a part of the time was spent in another call
                row["seconds_training"] = round(time.perf_counter() - begun, 1)
        model = model_of(config, entry).to(device_of(config.device))
        if adjust is not None:
            row |= adjust(model)
        result = _evaluate(config, entry, model, console)
    except Exception as error:
        known = isinstance(error, UserError)
        reason = first_line(error) if known else f"{type(error).__name__}: {first_line(error)}"
        return row | {"status": "failed", "reason": reason}, None, "" if known else traceback.format_exc()
    return row | _figures(model, result), result, ""


def _evaluate(config: CompareConfig, entry: Entry, model: AdaptiveViT, console: Console) -> Result:
    labelled = report_images(config, entry.seed).for_model(model)
    images = evaluation_images(labelled, model.preprocessing, device_of(config.device))
    order = dataset.in_order(len(images), config.batch_size)
    with _bar(console) as progress:
        task = progress.add_task("evaluate", total=len(images))
        return evaluate(
            model,
            dataset.batches(images, order, config.workers),
            device=device_of(config.device),
            progress=lambda done, _: progress.update(task, completed=done),
        )


def _bar(console: Console) -> Progress:
    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, transient=True)


def _head(config: CompareConfig, entry: Entry) -> dict[str, Any]:
    """What is known of a row before it is run."""
    return {
        "model": config.backbone,
        "method": entry.method,
        "policy": spec.parse(entry.training.policy)[0],
        "settings": full_spec(entry.training),
        "seed": entry.seed,
        "epochs": entry.epochs,
        "commit": commit(),
        "device": _device_name(config),
        "date": datetime.date.today().isoformat(),
    } | versions()


def _figures(model: AdaptiveViT, result: Result) -> dict[str, Any]:
    """timm's column names where timm has them."""
    return {
        "status": "ok",
        **result.metrics,
        "top1_err": 100 - result.metrics["top1"],
        "top5_err": 100 - result.metrics["top5"],
        "param_count": round(sum(p.numel() for p in model.parameters()) / 1e6, 3),
        "img_size": model.preprocessing.size[0],
        "crop_pct": model.preprocessing.crop_pct,
        "interpolation": model.preprocessing.interpolation,
        "images": result.images,
        "gmacs": result.gmacs,
        "gmacs_blocks": result.gmacs_blocks,
        "gmacs_static": result.gmacs_static,
        "gmacs_share": result.gmacs / result.gmacs_static,
        "mean_depth": result.mean_depth,
        "live": result.live,
    }


def _device_name(config: CompareConfig) -> str:
    if device_of(config.device).type == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU ({threads} thread{'s' if threads > 1 else ''})"


def _time_all(config: CompareConfig, results: Results, console: Console) -> None:
    """One interleaved run over all models that there are; what goes wrong here costs the timing alone."""
    rows = [row for row in results.good() if results.find(row["method"], int(row["seed"])) is row]
    if not rows:
        return
    batch = str(min(config.timing_batch, int(rows[0]["images"])))
    before = {(row["timed"], row["timing_batch"], row["timing_device"]) for row in rows}
    if before == {(rows[0]["timed"] or "never", batch, _device_name(config))}:
        console.print("all models were timed together before, not timed again")
        return
    try:
        _take_turns(config, results, rows, console)
    except Exception as error:
        console.print(f"timing failed: {type(error).__name__}: {first_line(error)}", markup=False, style="red")
        return
    results.write()


def _take_turns(config: CompareConfig, results: Results, rows: list[Row], console: Console) -> None:
    device = device_of(config.device)
    half = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
    seeds, methods = tuple({int(row["seed"]): None for row in rows}), tuple({row["method"]: None for row in rows})
    known = replace(
        config, seeds=seeds, methods=tuple(m for m in methods if m not in (STATIC, TRAINED_ON)) or (STATIC,)
    )
    entries = {(entry.method, str(entry.seed)): entry for entry in plan(known)}
    contenders, images = {}, None
    for row in rows:
        model = model_of(config, entries[row["method"], row["seed"]])
        if images is None:
            some = report_images(config, config.seeds[0]).spread(config.timing_batch)
            pictures = evaluation_images(some, model.preprocessing, device)
            images = next(dataset.batches(pictures, dataset.in_order(len(pictures), config.timing_batch))).images
            images = images.to(device, torch.bfloat16 if half else torch.float32)
        model = model.to(device, images.dtype)
        for layout in ("masked", "auto"):
            contenders[f"{row['method']}\n{row['seed']}\n{layout}"] = (model, layout)
    assert images is not None
    with _bar(console) as progress:
        task = progress.add_task(f"time {len(rows)} models in turn", total=config.timing_repeats)
        times = interleaved(
            contenders, images, config.timing_repeats, progress=lambda done: progress.update(task, completed=done)
        )
    now = datetime.datetime.now().isoformat(timespec="seconds")
    for row in rows:
        masked, compact = (times[f"{row['method']}\n{row['seed']}\n{layout}"] for layout in ("masked", "auto"))
        static = times.get(f"{results.reference}\n{row['seed']}\nauto")
        speeds = [f"{t.speed(static):.4g}" if static else "" for t in (masked, compact)]
        rates = [f"{t.images_per_second:.6g}" for t in (masked, compact)]
        facts = [str(len(images)), "bf16" if half else "fp32", _device_name(config), now]
        row.update(zip(TIMING, (*rates, compact.layout, *speeds, *facts), strict=True))


def _write(config: CompareConfig, results: Results) -> None:
    """results.md, pareto.png and the table on the screen."""
    write_text(results.path / "results.md", markdown(results.rows, config))
    good = results.good()
    if good:
        length = f"{config.epochs} epochs a method" if config.epochs else "without training"
        source = f"{int(good[0]['images']):,} images of {Path(config.data).name}"
        detail = f"{config.backbone}, {source}, {length}"
        picture = pareto(points(good), detail=detail, reference=results.reference)
        write_bytes(results.path / "pareto.png", picture)
    console = Console(width=None if Console().is_terminal else 120)
    console.print(screen(results.rows))
    for line in failures(results.rows):
        console.print(line, markup=False, highlight=False)
