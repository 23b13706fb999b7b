"""The log of a run as tables (train.csv, validation.csv) and as one picture: losses, accuracy, depth, live tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from ..errors import UserError, reason_of
from ..tasks.protocol import Task
from ..utils import plotting
from ..utils.atomic_io import write_text
from ..utils.coerce import shown
from ..utils.csv import csv_text
from ..utils.plotting import ACCENT, COLOURS, INK, MUTED, headline

Record = dict[str, Any]

# One colour a term, the same in every run.
_TERMS = {
    "task": ACCENT, "ponder": "#d1495b", "target_depth": "#3d5a98", "prior": "#8ab0e0", "cost": "#e08e1b",
    "ratio": "#8e5aa8", "exits": "#4c9a2a", "expected": "#a3a51c", "geometric": "#8c6239", "distill": "#c86fb0",
    "features": "#2aa6c9",
}  # fmt: skip


def read(path: Path) -> list[Record]:
    """Read the complete lines of a log; none without a file. A damaged line is an error, but one cut off at the end."""
    *lines, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    records = [_record(path, number, line) for number, line in enumerate(lines, start=1)]
    return [*records, _record(path, len(lines) + 1, last)] if last.endswith(b"}") else records


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        record: Record = json.loads(line)
        if record["kind"] in ("train", "validation") and type(record["step"]) is int and record["step"] > 0:
            return record
        why = f"step {shown(record['step'])}, kind {shown(record['kind'])}"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = reason_of(error)
    raise UserError(f"{path} is damaged in line {number} ({why}). Remove that line, or the file.") from None


def write_tables(records: Sequence[Record], where: Path) -> None:
    for kind in ("train", "validation"):
        rows = [_flat(r) for r in records if r["kind"] == kind]
        if rows:
            write_text(where / f"{kind}.csv", csv_text(rows))


def _flat(record: Record) -> Record:
    """Give every element of a list a column of its own: live_1 is the first block."""
    flat: Record = {}
    for name, value in record.items():
        if isinstance(value, list):
            flat |= {f"{name}_{i}": element for i, element in enumerate(value, start=1)}
        elif name != "kind":
            flat[name] = value
    return flat


# -- the picture ----------------------------------------------------------------------------------------------------
def draw(records: Sequence[Record], name: str, task: Task) -> bytes:
    """Four panels over the steps: loss terms, the task's score, depth, live tokens of every block."""
    train = [r for r in records if r["kind"] == "train"]
    validation = [r for r in records if r["kind"] == "validation"]
    width, height, left, gap_x, below, gap_y, above = 560, 300, 84, 190, 78, 190, 96
    figure = plotting.new_figure(left + 2 * width + gap_x + 130, below + 2 * height + gap_y + above)
    places = [(left + (width + gap_x) * (i % 2), below + (height + gap_y) * (1 - i // 2)) for i in range(4)]
    loss, score, depth, live = (plotting.add_axes(figure, *place, width, height) for place in places)
    for axes in (loss, score, depth, live):
        plotting.grid(axes)
        plotting.label_axes(axes, "step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
    _losses(loss, train, name)
    key, metric = next(iter(task.metrics.items()))
    detail = f"{metric.unit or metric.title}, of a training batch (augmented) and of validation"
    _pair(score, train, validation, (task.score, key), task.score.capitalize(), detail)
    last = (validation or train or [{}])[-1]
    cost = f"; {last['gmacs']:.4g} GMACs an image at the end" if "gmacs" in last else ""
    _pair(depth, train, validation, ("mean_depth", "mean_depth"), "Mean depth", f"blocks that compute a patch{cost}")
    _live(live, train)
    return plotting.png_bytes(figure)


def _losses(axes: Any, train: Sequence[Record], name: str) -> None:
    """Draw the loss and its terms, on a logarithmic axis where all are positive and differ much."""
    found = [(term, colour) for term, colour in _TERMS.items() if any(term in r for r in train)]
    shown = [("loss", INK), *found] if len(found) > 1 else [("loss", ACCENT)]
    ends = []
    for term, colour in shown:
        x, y = _series(train, term)
        axes.plot(x, y, color=colour, linewidth=1.6 if term == "loss" else 1.2, alpha=0.95, zorder=3)
        ends.append((term, colour, x, y))
    values = [v for *_, y in ends for v in y]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
        axes.tick_params(which="minor", length=0)
    _labels(axes, ends)
    headline(axes, "Loss and its terms", f"{name}: the weighted sum, and every term unweighted")


def _series(records: Iterable[Record], name: str) -> tuple[list[int], list[float]]:
    pairs = [(r["step"], float(r[name])) for r in records if r.get(name) is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _labels(axes: Any, ends: Sequence[tuple[str, Any, list[int], list[float]]]) -> None:
    """Write the name of every line at its end, moved apart where they would overlap."""
    axes.get_xlim(), axes.get_ylim()  # settles the scale
    box, at, placed = axes.get_window_extent(), -1e9, []
    last = [(axes.transData.transform((x[-1], y[-1]))[1] - box.y0, name, colour) for name, colour, x, y in ends if x]
    for wanted, name, colour in sorted(last):
        at = max(wanted, at + 17.0)
        placed.append((at, name.replace("_", " "), colour))
    style = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    for place, name, colour in placed:
        height = max(place - max(0.0, at - box.height), 0) / box.height
        axes.annotate(name, (1, height), xytext=(5, 0), va="center", fontsize=7.5, color=colour, **style)


def _pair(
    axes: Any, train: Sequence[Record], validation: Sequence[Record], names: tuple[str, str], title: str, detail: str
) -> None:
    """Draw a figure in training and in validation."""
    x, y = _series(train, names[0])
    axes.plot(x, y, color="#9aa3ab", linewidth=1.1, zorder=2)
    there, value = _series(validation, names[1])
    axes.plot(there, value, color=ACCENT, linewidth=1.8, marker="o", markersize=3.5, zorder=3)
    _labels(axes, [("training", MUTED, x, y), ("validation", ACCENT, there, value)])
    headline(axes, title, detail)


def _live(axes: Any, train: Sequence[Record]) -> None:
    """Draw the live tokens, one line a block, from light (the first) to dark."""
    rows = [(r["step"], r["live"]) for r in train if "live" in r]
    layers = len(rows[-1][1]) if rows else 0
    ends = []
    for block in range(layers):
        colour = COLOURS(0.9 - 0.9 * block / max(layers - 1, 1))
        x, y = [step for step, _ in rows], [live[block] for _, live in rows]
        axes.plot(x, y, color=colour, linewidth=1.3, zorder=2 + block / 100)
        if block in (0, layers - 1) or (layers - 1 - block) % max(1, layers // 4) == 0:
            ends.append((f"block {block + 1}", colour, x, y))
    if rows:
        axes.set_ylim(0, 1.04 * float(np.max([live for _, live in rows])))
    _labels(axes, ends)
    headline(axes, "Live tokens", "mean tokens an image that enter each block, in training")
