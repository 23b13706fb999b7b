"""How fast: policies on layouts beside static baselines, one configuration at a time, all contenders in turn.

Every contender is built, checked against its reference and only then timed. One that fails is a row with its reason,
and the others go on. Rows are added to OUT/benchmark.csv as soon as a configuration is finished.
"""

from __future__ import annotations

import copy
import datetime
import gc
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ...cost import CostModel
from ...data import dataset
from ...errors import UserError, reason_of
from ...execution.timing import Timing, interleaved
from ...factory import create
from ...model import AdaptiveViT
from ...utils.atomic_io import write_bytes, write_text
from ...utils.console import bar, show
from ...utils.csv import append_csv, cell
from ...utils.environment import commit, versions
from ...utils.hardware import device_of, processor
from ...utils.lock import writing
from .charts import bars, speed_against_macs
from .config import BenchmarkConfig
from .contenders import BEST, OWN, TIMM, Contender, Entry, Setting, checkpoint_for, entries, traces_for
from .rows import COLUMNS, Row, markdown, read, screen

# A contender further from its reference than this is wrong, not rounded: (device, dtype) -> ||out - ref|| / ||ref||.
BOUNDS = {("cpu", "float32"): 2e-4, ("cuda", "float32"): 2e-3}  # a GPU may take products in TF32
ROUNDED = 3e-2  # in 16 bits


def run(config: BenchmarkConfig) -> list[Row]:
    """Measure every configuration and fill OUT; returns the rows of this run, failed ones too."""
    with writing(config.out):
        return _run(config)


def _run(config: BenchmarkConfig) -> list[Row]:
    device = device_of(config.device)
    path = Path(config.out) / "benchmark.csv"
    read(path)
    bases = {name: _base(config, name) for name in dict.fromkeys(config.backbones)}
    sizes = tuple(dict.fromkeys(config.batch_sizes))
    _check(config, device, list(bases.values()), sizes)
    console, rows = Console(stderr=True), list[Row]()
    plan = [(name, dtype, batch) for name in bases for dtype in config.dtypes_on(device.type) for batch in sizes]
    head = head_of(config, device)
    with _threads(config.threads):
        for number, (name, dtype, batch) in enumerate(plan, start=1):
            console.print(f"[{number}/{len(plan)}] {name}, {dtype}, batch {batch}", markup=False, style="bold")
            new = configuration(config, _setting(config, bases[name], name, dtype, batch, device), head, console)
            append_csv(path, *new, columns=COLUMNS)
            rows += new
    _write(config, rows)
    return rows


def _check(config: BenchmarkConfig, device: torch.device, bases: Sequence[AdaptiveViT], sizes: Sequence[int]) -> None:
    """Raise what is wrong with the settings before anything runs."""
    config.layouts_on(device.type)
    config.modes_on(device.type)
    for base in bases:
        for batch in sizes:
            traces_for(config, base, batch, torch.device("cpu"))
            if config.data is not None:
                _images(config, base, batch)
    if config.checkpoint is not None and not any(checkpoint_for(config, base) for base in bases):
        raise UserError(f"checkpoint: {config.checkpoint} holds another backbone or image size than --backbones.")


# -- one configuration ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Checked:
    """A contender that does what it should, and what it does."""

    contender: Contender
    figures: dict[str, Any]  # columns of its row


def configuration(config: BenchmarkConfig, at: Setting, head: dict[str, Any], console: Console) -> list[Row]:
    """All contenders of one backbone, dtype and batch size, timed in turn."""
    if not config.skip_compiled:
        torch.compiler.reset()  # torch.compile gives up on code that it has seen in too many shapes
    ready: dict[str, Checked] = {}
    rows: dict[str, dict[str, Any]] = {}
    for entry in entries(config, at):
        same = {"backbone": at.backbone, "img_size": at.images.shape[-1], "batch": at.batch, "dtype": at.dtype}
        same["threads"] = torch.get_num_threads()
        rows[entry.label] = head | same | {"contender": entry.name, "policy": entry.policy, "layout": entry.layout}
        with console.status(f"  prepare {entry.label}"):
            found, reason = _prepare(entry, at)
        rows[entry.label] |= {"status": "failed" if found is None else "ok", "reason": reason}
        if found is None:
            console.print(f"  {entry.label} failed: {reason}", markup=False, style="red")
        else:
            ready[entry.label] = found
            rows[entry.label] |= found.figures
    try:
        calls = {label: checked.contender.call for label, checked in ready.items()}
        with bar(f"  time {len(ready)} contenders in turn", config.repeats, console) as progress:
            settings: dict[str, Any] = {"warm_up": config.warm_up, "inner": config.inner, "progress": progress}
            times = interleaved(calls, at.images, config.repeats, **settings) if ready else {}
    except Exception as error:
        for label in ready:
            rows[label] |= {"status": "failed", "reason": f"timing: {reason_of(error)}"}
        console.print(f"  timing failed: {reason_of(error)}", markup=False, style="red")
    else:
        for label, timing in times.items():
            rows[label] |= _speed(timing, times)
    return [{name: cell(row.get(name)) for name in COLUMNS} for row in rows.values()]


def _prepare(entry: Entry, at: Setting) -> tuple[Checked | None, str]:
    """The entry's contender, the fastest of its candidates, and a reason where it or one of them failed."""
    good: list[Checked] = []
    reasons = []
    for make in entry.makes:
        try:
            good.append(_checked(make, at))
        except Exception as error:
            reasons.append(reason_of(error))
    if not good:
        return None, reasons[0]
    if len(good) > 1:
        times = interleaved({str(i): c.contender.call for i, c in enumerate(good)}, at.images, 7, warm_up=2, inner=None)
        took = {int(name): 1e3 * statistics.median(timing.seconds) for name, timing in times.items()}
        order = sorted(took, key=lambda i: took[i])
        tried = "; ".join(f"{good[i].contender.static_mode} {took[i]:.4g} ms" for i in order)
        good = [good[order[0]]]
        good[0].figures["plan"] = f"tried: {tried}"
    return good[0], f"a candidate failed: {reasons[0]}" if reasons else ""


def _checked(make: Any, at: Setting) -> Checked:
    """Build a contender, run it, and compare what it says with its reference; raises where it is wrong."""
    held = _reserved(at)
    contender: Contender = make()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compilers warn of what is slow; that is measured here
        for _ in range(2):
            contender.call(at.images)
        peak = _peak(contender, at, held)
        made = contender.call(at.images)
        logits: Tensor = (made if isinstance(made, Tensor) else made.logits).float().clone()
        output = made if contender.recording is None else contender.recording(at.images)
        figures = _figures(contender, output, at) | {"peak_mib": peak}
        reference = _reference(contender, output, at)
    if logits.shape != reference.shape:
        raise UserError(f"output check: expected logits {list(reference.shape)}, got {list(logits.shape)}.")
    error = float((logits - reference).norm() / reference.norm())
    bound = BOUNDS.get((at.images.device.type, at.dtype), ROUNDED)
    if not error <= bound:
        raise UserError(f"output check: relative error {error:.2g} against the reference, at most {bound:g} is right.")
    agreement = float((logits.argmax(-1) == reference.argmax(-1)).double().mean())
    return Checked(contender, figures | {"relative_error": error, "top1_agreement": agreement})


def _reference(contender: Contender, output: Any, at: Setting) -> Tensor:
    """[B, classes] in float32: timm's model, or the same decisions replayed with masks."""
    vit, images = at.in_float(contender.model.vit), at.images.float()
    if not contender.adaptive:
        plain: Tensor = vit(images)
        return plain
    trace = output.trace
    if not trace.steps and not bool(trace.attended.all()):
        raise UserError("output check: tokens left, but the trace has no steps that could be replayed.")
    replay = AdaptiveViT(vit, "replay", {"trace": trace}).eval()
    return replay(images, layout="masked").logits.clone()


def _figures(contender: Contender, output: Any, at: Setting) -> dict[str, Any]:
    """What ran: MACs an image, their share of the static model's, tokens that were live."""
    model = contender.model
    costs = CostModel(model.shape, at.base.shape.tokens)
    static = CostModel(model.whole or model.shape, costs.tokens).static
    macs, live, layout = static, 1.0, contender.layout
    if not isinstance(output, Tensor):
        trace, layout = output.trace, layout or output.layout
        macs, live = float(output.macs.mean()), float(trace.attended.double().mean())
        if output.layout == "padded":  # every image is as long as the longest
            longest = (rows.amax(-1, keepdim=True).double() for rows in (trace.live, trace.live_mlp))
            macs += float(costs.blocks(*longest)) - float(output.parts["blocks"].mean())
        elif output.layout == "masked":  # every row is computed
            macs += costs.static - costs.embedding - costs.head - float(output.parts["blocks"].mean())
    found = {"gmacs": macs / 1e9, "mac_share": macs / static, "mean_live_share": live}
    return found | {"layout": layout, "static_mode": contender.static_mode, "plan": contender.plan}


# -- memory of a GPU ------------------------------------------------------------------------------------------------
def _reserved(at: Setting) -> int:
    """Bytes that cannot be given back: tensors in use, and the pools of CUDA graphs."""
    if not at.images.is_cuda:
        return 0
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _peak(contender: Contender, at: Setting, before: int) -> float | None:
    """MiB that a call needs beside the weights, with what a CUDA graph holds all the time."""
    if not at.images.is_cuda:
        return None
    held = max(0, _reserved(at) - before) if contender.graph else 0
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    contender.call(at.images)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - start + held) / 2**20


# -- time -----------------------------------------------------------------------------------------------------------
def _speed(timing: Timing, times: Mapping[str, Timing]) -> dict[str, Any]:
    found: dict[str, Any] = {f"ms_p{p}": 1e3 * timing.percentile(p / 100) for p in (20, 50, 80)}
    found["images_per_s"] = timing.batch / statistics.median(timing.seconds)
    for column, name in (("best_static", BEST), ("timm", TIMM), ("own_static", OWN)):
        found[f"speed_vs_{column}"] = timing.speed(times[name]) if name in times else None
    return found


# -- what all contenders have in common -----------------------------------------------------------------------------
def _base(config: BenchmarkConfig, name: str) -> AdaptiveViT:
    """The static model whose weights all contenders run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return create(name, "static", weights=config.weights, img_size=config.img_size)


def _setting(
    config: BenchmarkConfig, cpu: AdaptiveViT, name: str, dtype: str, batch: int, device: torch.device
) -> Setting:
    kind: torch.dtype = getattr(torch, dtype)
    checkpoint = checkpoint_for(config, cpu)
    return Setting(
        backbone=name,
        dtype=dtype,
        images=_images(config, cpu, batch).to(device, kind),
        base=copy.deepcopy(cpu).to(device, kind),
        traces=traces_for(config, cpu, batch, device),
        models={} if checkpoint is None else {f"checkpoint {config.checkpoint}": checkpoint.to(device, kind)},
    )


def _images(config: BenchmarkConfig, base: AdaptiveViT, batch: int) -> Tensor:
    """[B, C, H, W] of the data, evenly spread, or drawn."""
    if config.data is None:
        drawn = torch.Generator().manual_seed(config.seed)
        return torch.randn(batch, base.backbone.in_chans, *base.preprocessing.size, generator=drawn)
    some = dataset.Images(dataset.for_evaluation(config.data, "auto").spread(batch), base.preprocessing.evaluation())
    loaded = next(dataset.batches(some, dataset.in_order(len(some), batch)))
    if len(loaded.images) != batch:
        raise UserError(f"data: expected {batch} readable images for a batch, got {len(loaded.images)}: {config.data}.")
    return loaded.images


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def head_of(config: BenchmarkConfig, device: torch.device) -> dict[str, Any]:
    """Columns that all rows of a run share."""
    return versions() | {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else processor(),
        "commit": commit(),
        "repeats": config.repeats,
        "seed": config.seed,
    }


def _write(config: BenchmarkConfig, rows: list[Row]) -> None:
    """benchmark.md, the charts and the table on the screen."""
    out, good = Path(config.out), [row for row in rows if row["status"] == "ok"]
    write_text(out / "benchmark.md", markdown(rows, config.command()))
    if good:
        write_bytes(out / "bars.png", bars(good))
    if good and config.plot:
        write_bytes(out / "speed_vs_macs.png", speed_against_macs(good))
    show(*screen(rows), width=140)
