"""What a checkpoint costs: a curve measured on images, its budget, and a policy on weights as they are."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..budget import curve as budgets
from ..budget.curve import Calibration, Point
from ..budget.measure import Check
from ..budget.measure import Progress as Progressing
from ..budget.measure import check as check_budgets
from ..checkpoint.config import read_config
from ..checkpoint.place import checkpoint_at, has_random_weights
from ..data import dataset
from ..data.dataset import Images, Labelled
from ..errors import DataError, UserError
from ..evaluation.predict import find_images
from ..factory import create, load
from ..model import AdaptiveViT
from ..policies import spec
from ..utils.atomic_io import new_directory, write_bytes, write_json, write_text
from ..utils.console import announce, bar, count, left_out, screen_table, show
from ..utils.csv import csv_text
from ..utils.environment import summary
from ..utils.hardware import device_name, device_of
from ..utils.plotting import ACCENT, DASHED, INK, MUTED, add_axes, grid, headline, label_axes, new_figure, png_bytes
from ..utils.text import json_text, signed_percent

FIRST, LEAST, MOST = 64, 512, 2048  # images: to see how much they differ in cost, and for the curve


def calibrate(
    checkpoint: str,
    data: str | None = None,
    budget: str | None = None,
    *,
    out: str | None = None,
    device: str = "auto",
    **how: Any,
) -> None:
    """Measure the curve, check it on other images, and write it; without data, set a budget by the curve that is there.

    The flags of the command; `how` as for `measured`."""
    if budget is not None:
        budgets.parse(budget)
    source = checkpoint_at(checkpoint)
    model = load(source).float().to(device_of(device))
    budget = budget or model.budget
    place, rows, files = Path(out or source), list[Check](), dict[str, bytes]()
    if data is None:
        model.budget = budget
    else:
        rows, files = measured(model, data, budget, checkpoint, **how)
    assert model.calibration is not None
    _store(source, out, model.calibration.to_config(model.budget), files)
    if files:
        print(f"wrote the curve to {place / 'config.json'}, with {' and '.join(files)} beside it")
    print(costs_now(model, place, rows))


def apply(
    backbone: str,
    policy: str,
    out: str,
    *,
    weights: str | None = None,
    img_size: int | None = None,
    budget: str | None = None,
    data: str | None = None,
    device: str = "auto",
    **how: Any,
) -> None:
    """Write a checkpoint of a policy on weights as they are, at its budget; the flags of the command."""
    if budget is not None:
        budgets.parse(budget)
    name, settings = spec.parse(policy)
    model = create(backbone, name, weights=weights, img_size=img_size, **settings).to(device_of(device))
    rows, files = list[Check](), dict[str, bytes]()
    if model.policy.traits.fits_images:
        print(_fit(model, data, how["batch_size"], how["workers"]))
        data = None  # every image costs the same
    if data is not None:
        rows, files = measured(model, data, budget, out, **how)
    elif budget is not None:
        rows = _without_images(model, budget, how["latency_batch"])
    model.save_pretrained(out, **({"random_weights": True} if has_random_weights(weights, backbone) else {}))
    for file, content in files.items():
        write_bytes(Path(out) / file, content)
    print(f"wrote {' with '.join([f'{out}: {spec.spec(name, model.policy.settings)} on {backbone}', *files])}")
    print(costs_now(model, Path(out), rows))


def _fit(model: AdaptiveViT, data: str | None, batch_size: int, workers: int) -> str | None:
    """Find on the first images what the policy needs, as training does."""
    if data is None:
        raise UserError(
            f"{model.policy_name} chooses its patches on images: give some as --data (labels are not looked at)."
        )
    gone: dict[str, None] = {}
    images = torch.cat(_tensors(model, _images(data).spread(FIRST), batch_size, workers, gone))
    left_out(list(gone))
    return model.policy.init_gate(model, images.to(next(model.parameters()).device))


def _without_images(model: AdaptiveViT, budget: str, latency_batch: int | None) -> list[Check]:
    """Set a budget where it fixes how many tokens stay, whatever an image shows."""
    if not model.policy.traits.dial_fixes_counts and not budgets.parse(budget).free:
        raise UserError(
            f"budget: what {model.policy_name} costs depends on the images: give some as --data (labels are not looked "
            "at), or leave --budget out."
        )
    shape = (1, model.backbone.in_chans, *model.backbone.image_size)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    where = device_name(next(model.parameters()).device)
    announce(f"calibrate {model.policy_name}", "without images: every image costs the same", where)
    with bar("calibrate") as progress:
        model.calibrate(noise, budget, latency_batch=latency_batch, progress=progress)
    return check_budgets(model, noise, _own(budget))


def _own(budget: str | None) -> list[str]:
    return [] if budget is None or budgets.parse(budget).free else [budget]


def measured(
    model: AdaptiveViT,
    data: str,
    budget: str | None,
    name: str,
    *,
    check: str | None = None,
    limit: int | None = None,
    latency_batch: int | None = None,
    batch_size: int = 32,
    workers: int = 0,
) -> tuple[list[Check], dict[str, bytes]]:
    """Measure the model's curve and set its budget; the budgets checked on other images, and files that tell of it."""
    images, others = _images(data), None if check is None else _images(check)
    gone: dict[str, None] = {}  # what was left out
    where = device_name(next(model.parameters()).device)
    announce(f"calibrate {model.policy_name}", f"{count(len(images), 'image')} of {data}", where)
    with bar("calibrate") as progress:
        limit = limit or _enough(model, images, budget, batch_size, workers, progress)
        first, second = _halves(images, limit) if others is None else (images.spread(limit), others.spread(limit))
        known, unseen = (_tensors(model, part, batch_size, workers, gone) for part in (first, second))
        sizes: dict[str, Any] = {"batch_size": batch_size, "latency_batch": latency_batch}
        curve = model.calibrate(known, budget, **sizes, progress=progress)
        asked = list(dict.fromkeys([*_own(budget), *curve.tenths()]))
        rows = check_budgets(model, unseen, asked, batch_size, progress)
    show(table(curve, rows, sum(map(len, unseen)), name))
    for line in notes(model, curve):
        print(line)
    left_out(list(gone))
    content = as_csv(curve, rows, model, data, check or "").encode()
    return rows, {"calibration.csv": content, "calibration.png": picture(curve, rows, model)}


def costs_now(model: AdaptiveViT, place: Path, rows: Sequence[Check]) -> str:
    """The last line: what a checkpoint costs from now on, whether that is the goal, and what to do."""
    curve, again = model.calibration, f"adaptivit calibrate {place}"
    if model.budget is None or curve is None:
        data, cost = (" --data IMAGES", "") if curve is None else ("", f", {_cost_of(curve.settings.macs, curve)}")
        return f"{place} costs what its settings say{cost}; to change that: {again}{data} --budget -33%"
    device = next(model.parameters()).device
    wanted = curve.wanted(budgets.parse(model.budget), device_name(device))
    position = model.budget_state.position(device)
    found = [row.point.macs for row in rows if row.budget == model.budget]
    macs = (found or [p.macs for p in curve.points if p.position == position] or [wanted])[0]
    error = macs / wanted - 1
    missed = error > budgets.GOAL or (curve.continuous and error < -budgets.GOAL)
    end = f"missed by {100 * error:+.1f} %: calibrate on more images" if missed else "reached"
    cost = _cost_of(macs, curve)
    return f"{place} costs {cost} from now on, goal {model.budget} {end}; to undo it: {again} --budget none"


def _cost_of(macs: float, curve: Calibration) -> str:
    return f"{budgets.gmacs(macs)} ({signed_percent(macs / curve.static - 1)})"


def _enough(
    model: AdaptiveViT, images: Labelled, budget: str | None, batch_size: int, workers: int, progress: Progressing
) -> int:
    """How many images the curve is to be measured on, by how much a few of them differ in cost."""
    if model.policy.traits.dial_fixes_counts or len(images) <= LEAST:
        return LEAST
    few = _tensors(model, images.spread(FIRST), batch_size, workers, {})
    curve = model.calibrate(few, batch_size=batch_size, progress=progress)
    device = device_name(next(model.parameters()).device)
    own = _own(budget)
    if own and budgets.parse(own[0]).ms is None:
        goals = [curve.wanted(budgets.parse(own[0]), device)]
    else:
        goals = [curve.wanted(budgets.parse(tenth), device) for tenth in curve.tenths()]
    needed = max((curve.needed(macs) or LEAST for macs in goals), default=LEAST)
    return min(max(round(1.2 * needed), LEAST), MOST)  # the spread of so few is an estimate itself


def _images(source: str) -> Labelled:
    """Images whose labels do not matter; not the test split where there is another."""
    try:
        found = dataset.unlabelled(source)
    except DataError:
        if not Path(source).is_dir():
            raise
        others: list[str] = []
        paths = find_images((source,), others)
        return Labelled(source, paths, [0] * len(paths), ("",), tuple(others))
    return next(found[name] for name in ("val", "train", "all", "test") if name in found)


def _halves(images: Labelled, limit: int) -> tuple[Labelled, Labelled]:
    chosen = images.spread(2 * limit)
    if len(chosen) < 2:
        raise DataError(f"{images.source}: expected at least 2 images, one for the curve and one to check it on.")
    halves = [chosen.part(range(start, len(chosen), 2)) for start in (0, 1)]
    return halves[0], halves[1]


def _tensors(model: AdaptiveViT, part: Labelled, batch_size: int, workers: int, gone: dict[str, None]) -> list[Tensor]:
    """The images that can be read; the others are named in `gone`."""
    source = Images(part, model.preprocessing.evaluation())
    batches = list(dataset.batches(source, dataset.in_order(len(source), batch_size), workers))
    gone |= dict.fromkeys(part.without(i for batch in batches for i in batch.unreadable))
    if not any(len(batch.images) for batch in batches):
        raise DataError(f"{part.source}: no image could be read.")
    return [batch.images for batch in batches if len(batch.images)]


def _store(source: Path, out: str | None, curve: dict[str, Any], files: dict[str, bytes]) -> None:
    """Into the checkpoint, or a copy of it; nothing else of it changes."""
    entry = read_config(source) | {"calibration": curve}
    if out is None:
        write_json(source / "config.json", entry)
        for name, content in files.items():
            write_bytes(source / name, content)
        return
    with new_directory(out) as place:
        shutil.copytree(source, place, dirs_exist_ok=True)
        write_text(place / "config.json", json_text(entry, indent=2) + "\n")
        for name, content in files.items():
            write_bytes(place / name, content)


def notes(model: AdaptiveViT, curve: Calibration) -> list[str]:
    """Lines below the table: steps, milliseconds, a warning, the budget that was set."""
    lines = []
    if not curve.continuous:
        lines.append(f"{curve.dial} fixes how many tokens stay: a budget is met by the nearest step below it")
    if curve.latency is not None:
        slow, fast = curve.latency.points[0][1], curve.latency.points[-1][1]
        lines.append(
            f"milliseconds hold for {curve.latency.images} of {curve.latency.dtype} on {curve.latency.device}, "
            f"{curve.latency.layout}: {slow:.3g} ms down to {fast:.3g} ms"
        )
    device = next(model.parameters()).device
    warning = curve.accuracy_warning(model.budget, device_name(device))
    if warning is not None:
        lines.append(f"note: {warning}")
    if model.budget is not None:
        lines.append(f"budget {model.budget}: {curve.dial} = {model.budget_state.position(device):.5g}")
    return lines


def table(curve: Calibration, rows: Sequence[Check], images: int, checkpoint: str) -> Table:
    """The budgets that were checked on images that the curve has not seen."""
    names = ("budget", curve.dial, "live tokens", "GMACs asked for", "GMACs", "against static", "error", "expected")
    cells = []
    for row in rows:
        error = curve.error(row.wanted)
        expected = "?" if error is None else f"±{100 * error:.2f} %" if curve.continuous else "a step"
        cost = (
            f"{row.wanted / 1e9:.4f}",
            f"{row.point.macs / 1e9:.4f}",
            signed_percent(row.point.macs / curve.static - 1),
        )
        place = (row.budget, f"{row.position:.4f}", f"{row.point.live:.1f}")
        cells.append((*place, *cost, f"{100 * row.error:+.2f} %", expected))
    title = f"{checkpoint}: curve of {curve.images} images, checked on {images} others"
    return screen_table(title, cells, names, left=0)


def as_csv(curve: Calibration, rows: Sequence[Check], model: AdaptiveViT, data: str, checked: str) -> str:
    """The curve's points, then the budgets checked on unseen images."""
    columns = ("kind", "budget", "dial", "position", "live", "gmacs_asked", "gmacs", "gmacs_sd", "gmacs_static")
    where = {
        "images": curve.images,
        "data": data,
        "check": checked,
        "policy": model.policy_name,
        "device": device_name(next(model.parameters()).device),
    }
    lines: list[dict[str, Any]] = [{"kind": "curve", "position": p.position, **_cost(p)} for p in curve.points]
    for row in rows:
        asked = {"kind": "unseen", "budget": row.budget, "position": row.position, "gmacs_asked": row.wanted / 1e9}
        errors = {"error": row.error, "expected_error": curve.error(row.wanted)}
        lines.append(asked | _cost(row.point) | errors)
    same = {"dial": curve.dial, "gmacs_static": curve.static / 1e9} | where | summary()
    return csv_text([same | line for line in lines], [*columns, "error", "expected_error", *where], digits=8)


def _cost(point: Point) -> dict[str, Any]:
    spread = None if point.spread is None else point.spread / 1e9
    return {"live": point.live, "gmacs": point.macs / 1e9, "gmacs_sd": spread}


def picture(curve: Calibration, rows: Sequence[Check], model: AdaptiveViT) -> bytes:
    """MACs against the position of the dial: the curve, and the budgets checked on unseen images."""
    figure = new_figure(1000, 640)
    axes = add_axes(figure, 96, 84, 1000 - 96 - 40, 640 - 84 - 110)
    x, y = [p.position for p in curve.points], [p.macs / 1e9 for p in curve.points]
    if curve.continuous:
        axes.plot(x, y, color=ACCENT, linewidth=1.8, zorder=3)
    else:
        axes.scatter(x, y, s=9, color=ACCENT, linewidths=0, zorder=3)
    axes.scatter([r.position for r in rows], [r.point.macs / 1e9 for r in rows], s=42, color=INK, zorder=4)
    axes.axhline(curve.static / 1e9, color=MUTED, linewidth=1.1, linestyle=DASHED, zorder=1)
    grid(axes)
    axes.set_ylim(0, 1.08 * max(*y, curve.static / 1e9))
    if curve.continuous:  # far ends, where nothing changes any more, would squeeze the rest
        span = curve.points[0].macs - curve.points[-1].macs
        busy = [p.position for p in curve.points if 0.01 * span < p.macs - curve.points[-1].macs < 0.99 * span] or x
        room = 0.15 * (max(busy) - min(busy)) or 1.0
        axes.set_xlim(min(busy) - room, max(busy) + room)
    label_axes(axes, curve.dial, "GMACs an image")
    detail = f"line: {curve.images} images; dots: budgets on images that it has not seen; dashed: static"
    headline(axes, f"What {model.policy_name} costs by its {curve.dial}", detail)
    return png_bytes(figure)
