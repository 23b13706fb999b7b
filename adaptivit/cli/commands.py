"""What the commands do with their configuration: build the model, run, print a table, write files."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from .. import __version__, tasks
from ..checkpoint.export_config import ExportConfig
from ..data import dataset
from ..data.dataset import Labelled
from ..data.gpu_pipeline import evaluation_images
from ..errors import UserError
from ..evaluation import evaluate as evaluation
from ..evaluation import predict as prediction
from ..evaluation.model_config import ModelConfig
from ..evaluation.named_model import build, names_of
from ..experiments.benchmark.config import BenchmarkConfig
from ..experiments.calibrate_config import CalibrateConfig
from ..experiments.compare.config import CompareConfig
from ..factory import create, load
from ..model import AdaptiveViT
from ..policies import spec
from ..serve.config import DemoConfig, ServeConfig
from ..tasks.protocol import Task
from ..training.config import TrainConfig
from ..utils.atomic_io import write_text
from ..utils.csv import append_csv
from ..utils.hardware import device_of
from ..utils.text import signed_percent
from .config import EvaluateConfig, PredictConfig
from .visualize_config import VisualizeConfig


def train(config: TrainConfig) -> None:
    from accelerate import PartialState

    from ..training.run import fit

    result = fit(config)
    if PartialState().is_main_process:
        place = Path(config.out) / "model"
        print(f"saved {place}: {result.text} at {result.gmacs:.4f} GMACs on validation")


def compare(config: CompareConfig) -> None:
    """adaptivit compare"""
    from ..experiments.compare.run import run

    try:
        rows = run(config)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on with what is missing in {config.out}", file=sys.stderr)
        raise SystemExit(130) from None
    if all(row["status"] != "ok" for row in rows):
        raise UserError(f"Every method failed; the first: {rows[0]['reason']}")
    print(f"wrote results.csv, results.md and pareto.png to {config.out}")


def benchmark(config: BenchmarkConfig) -> None:
    """adaptivit benchmark"""
    from ..experiments.benchmark.run import run

    try:
        rows = run(config)
    except KeyboardInterrupt:
        print(f"interrupted; finished configurations are in {config.out}/benchmark.csv", file=sys.stderr)
        raise SystemExit(130) from None
    failed = sum(row["status"] != "ok" for row in rows)
    print(f"wrote benchmark.csv, benchmark.md{' and charts' * (failed < len(rows))} to {config.out}")
    if failed:
        print(f"{failed} of {len(rows)} contenders failed", file=sys.stderr)
        raise SystemExit(1)


def evaluate(config: EvaluateConfig) -> None:
    """adaptivit evaluate"""
    model = build(config.model)
    other = load(config.compare_to).float() if config.compare_to else None
    labelled = dataset.for_evaluation(config.data, config.split, model.task)
    if config.limit is not None:
        labelled = labelled.spread(config.limit)
    for m in filter(None, (model, other)):
        labelled.for_model(m)  # say what does not fit before anything runs
    result = _measure(model, labelled, config, "evaluate")
    row = _row(config, model, result)
    if config.precision == "bf16":
        row["flipped_decisions"] = _flips(model, labelled, config)
    Console(width=None if Console().is_terminal else 110).print(_table(row, result))
    if config.split == "auto" and not {"test", "val"} & set(dataset.read(config.data)):
        print(f"note: {config.data} has neither test nor val; if the model was trained on it, these figures flatter")
    if result.unreadable:
        print(f"{result.unreadable} images could not be read and were left out")
    if other is not None:
        second = _measure(other, labelled, config, "compare")
        difference, half, n = evaluation.paired_difference(result, second)
        row |= {"difference": difference, "difference_ci95": half, "compared_to": config.compare_to}
        print(
            f"against {config.compare_to} ({second.text} at {second.gmacs:.4f} GMACs): "
            f"{difference:+.2f} ± {half:.2f} points (paired, 95 %, {n} images), "
            f"{signed_percent(result.gmacs / second.gmacs - 1)} GMACs"
        )
    if config.json:
        write_text(config.json, json.dumps(row, indent=2) + "\n")
    if config.csv:
        append_csv(config.csv, row)


def _measure(model: AdaptiveViT, labelled: Labelled, config: EvaluateConfig, what: str) -> evaluation.Result:
    device = device_of(config.device)
    model = model.to(device, torch.bfloat16 if config.precision == "bf16" else torch.float32)
    labelled = labelled.for_model(model)
    images = evaluation_images(labelled, model.preprocessing, device)
    order = dataset.in_order(len(images), config.batch_size)
    metric = next(iter(tasks.get(model.task).metrics.values()))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[score]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=len(images), score="")
        return evaluation.evaluate(
            model,
            dataset.batches(images, order, config.workers),
            layout=config.layout,
            device=device,
            progress=lambda done, score: progress.update(
                task, completed=done, score=f"{metric.title} {metric.text(score)}"
            ),
        )


def _flips(model: AdaptiveViT, labelled: Labelled, config: EvaluateConfig) -> float:
    device = device_of(config.device)
    images = evaluation_images(labelled.spread(64), model.preprocessing, device)
    batch = next(dataset.batches(images, dataset.in_order(len(images), 64)))
    return evaluation.flipped_decisions(model, build(config.model).to(device), batch.images.to(device))


def _row(config: EvaluateConfig, model: AdaptiveViT, result: evaluation.Result) -> dict[str, Any]:
    """timm's column names where timm has them."""
    row: dict[str, Any] = {
        "model": config.model.checkpoint or config.model.backbone,
        "policy": spec.spec(model.policy_name, model.policy.settings) if model.policy_name != "replay" else "replay",
        **result.row(),
        "param_count": round(sum(p.numel() for p in model.parameters()) / 1e6, 3),
        "img_size": model.preprocessing.size[0],
        "crop_pct": model.preprocessing.crop_pct,
        "interpolation": model.preprocessing.interpolation,
    }
    row |= {k: v for k, v in result.summary().items() if k not in row}
    return row | {
        "precision": config.precision,
        "device": torch.cuda.get_device_name() if device_of(config.device).type == "cuda" else "cpu",
        "date": datetime.date.today().isoformat(),
        "adaptivit": __version__,
        "torch": torch.__version__,
    }


def _table(row: dict[str, Any], result: evaluation.Result) -> Table:
    table = Table(title=f"{row['model']}, {row['policy']}", show_header=False, title_justify="left")
    share, shown = signed_percent(-result.saved), result.shown()
    lines = {
        "images": f"{result.images}",
        " / ".join(metric.title for metric, _ in shown): " / ".join(metric.text(value) for metric, value in shown),
        "GMACs an image": f"{result.gmacs:.4f} ({share} against static {result.gmacs_static:.4f})",
        "mean depth": f"{result.mean_depth:.2f} of {len(result.live)} blocks",
        "live tokens by block": " ".join(f"{n:.0f}" for n in result.live),
        "images/s": f"{result.images_per_second:.1f} ({result.layout}, {row['device']}, {row['precision']})",
    }
    if result.plan_gap is not None:
        correlation = "undefined" if result.plan_correlation is None else f"{result.plan_correlation:.3f}"
        lines["plan"] = f"mean N - N_target {result.plan_gap:+.2f}, correlation {correlation}"
    if "flipped_decisions" in row:
        lines["flipped decisions"] = f"{100 * row['flipped_decisions']:.3f} % of token depths differ from fp32"
    for name, value in lines.items():
        table.add_row(name, value)
    return table


def calibrate(config: CalibrateConfig) -> None:
    """adaptivit calibrate"""
    from ..experiments.calibrate import run

    run(config)


def predict(config: PredictConfig) -> None:
    """adaptivit predict"""
    if config.out and config.format == "table":
        raise UserError("--out writes jsonl or csv: add --format jsonl or --format csv.")
    paths = prediction.find_images(config.images)
    model = build(config.model)
    names, task = names_of(config.class_names, model), tasks.get(model.task)
    device = device_of(config.device)
    found = prediction.predict(
        model.to(device),
        paths,
        names=names,
        top_k=config.top_k,
        layout=config.layout,
        batch_size=config.batch_size,
        device=str(device),
    )
    if config.format == "jsonl":
        _emit(prediction.as_jsonl(found, task), config.out)
    elif config.format == "csv":
        _emit(prediction.as_csv(found, task), config.out)
    else:
        Console(width=None if Console().is_terminal else 120).print(_predictions(found, task))


def export(config: ExportConfig) -> None:
    """adaptivit export"""
    from ..checkpoint.export import export as write
    from ..checkpoint.model_card import pictures_for

    model = load(config.checkpoint).float()
    images = pictures_for(model, prediction.find_images(config.images)[:64]) if config.images else None
    kind, tolerance = config.kind, config.tolerance
    with Console(stderr=True).status("tracing the model, then comparing; a minute or two"):
        done = write(model, config.out, format=config.format, kind=kind, images=images, tolerance=tolerance)
    print(
        f"wrote {done.path}: {config.format}, {done.kind}, {done.size / 1e6:.1f} MB; on {done.images} images the "
        f"largest difference of a logit is {done.difference:.2g}, "
        f"and {100 * done.flipped:.2f} % of the tokens differ in depth"
    )


def _emit(text: str, out: str | None) -> None:
    if out is None:
        print(text, end="")
    else:
        write_text(out, text)


def visualize(config: VisualizeConfig) -> None:
    """adaptivit visualize"""
    from ..visualize import data_set, report

    start = time.perf_counter()
    chosen = (config.checkpoint, config.backbone, config.policy, config.weights, config.img_size)
    model = build(ModelConfig(*chosen, config.budget, config.max_macs))
    device = device_of(config.device)
    names = names_of(config.class_names, model)
    static = _static_model(config.static, model) if config.static else None
    images: Any = list(config.images)
    if config.data is not None:
        images = data_set(config.data, model, config.limit, config.split)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def step(what: str, done: int, total: int) -> None:
        if not tasks:
            bars.start()  # not before: a mistake is said in one line
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done, total=total)

    try:
        page = report(
            model.to(device),
            images,
            config.out,
            static=None if static is None else static.to(device),
            class_names=names,
            name=config.checkpoint or "",
            shown=config.shown,
            tokens=config.tokens,
            batch_size=config.batch_size,
            seed=config.seed,
            command=_command("visualize"),
            progress=step,
        )
    finally:
        if tasks:
            bars.stop()
    print(f"wrote {page} and its pictures in {time.perf_counter() - start:.1f} s")


def serve(config: ServeConfig) -> None:
    """adaptivit serve"""
    _serving().serve(config)


def demo(config: DemoConfig) -> None:
    """adaptivit demo"""
    _serving().demo(config)


def _serving() -> Any:
    try:
        from ..serve import command
    except ModuleNotFoundError as error:
        needed = ("fastapi", "uvicorn", "starlette", "pydantic", "python_multipart")
        if (error.name or "").partition(".")[0] not in needed:
            raise
        raise UserError("Serving needs FastAPI and uvicorn: pip install 'adaptivit[serve]'.") from None
    return command


def _static_model(path: str, model: AdaptiveViT) -> AdaptiveViT:
    if not Path(path).is_file():
        return load(path).float()
    if model.backbone_name is None:
        raise UserError(
            f"static: {path} is a weights file, and the backbone has no timm name; give a checkpoint directory."
        )
    return create(model.backbone_name, "static", weights=path, img_size=model.preprocessing.size)


def _command(name: str) -> str:
    """The command line as it was given, to be run again."""
    return shlex.join(["adaptivit", *sys.argv[1:]]) if sys.argv[1:2] == [name] else ""


def _predictions(found: list[prediction.Prediction], task: Task) -> Table:
    table = Table()
    for name in ("image", "answer", "GMACs", "of static", "mean depth"):
        table.add_column(name, justify="left" if name in ("image", "answer") else "right")
    for p in found:
        share = f"{100 * p.gmacs / p.static_gmacs:.0f} %"
        table.add_row(p.image, task.caption(p.answer), f"{p.gmacs:.3f}", share, f"{p.mean_depth:.2f}")
    return table
