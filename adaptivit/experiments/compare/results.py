"""What a comparison has found so far: OUT/results.csv and the images that every row got right.

OUT/compare.json      what all methods have in common; another comparison is refused
OUT/results.csv       one row a method and seed, written as soon as it is known; the raw truth
OUT/correct/SLUG.npz  which images the row got right, so that differences stay paired after a resume
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError
from ...evaluation.evaluate import Result, paired_difference
from ...training.methods import slug
from ...utils.atomic_io import write_bytes, write_json, write_text
from ...utils.csv import csv_text, read_csv
from .config import CompareConfig

COLUMNS = (
    *("model", "method", "policy", "settings", "seed", "status", "reason"),
    *("top1", "top1_err", "top5", "top5_err", "param_count", "img_size", "crop_pct", "interpolation", "images"),
    *("epochs", "gmacs", "gmacs_blocks", "gmacs_static", "gmacs_share", "mean_depth", "live"),
    *("difference", "difference_ci95", "compared_to"),
    *("images_per_second_masked", "images_per_second_compact", "compact_layout", "speed_masked", "speed_compact"),
    *("timing_batch", "timing_precision", "timing_device", "timed"),
    *("seconds_training", "recipe", "commit", "device", "date", "adaptivit", "torch", "timm", "python"),
)
TIMING = COLUMNS[COLUMNS.index("images_per_second_masked") : COLUMNS.index("timed") + 1]
STATIC, TRAINED_ON = "static", "static, trained on"

Row = dict[str, str]


class Results:
    """The rows of one comparison, on disk and in memory; every cell is text, empty where nothing is known."""

    def __init__(self, config: CompareConfig) -> None:
        """Open the comparison in --out, or begin one; refuse a directory that holds another."""
        self.path, self.recipe = Path(config.out), config.fingerprint()
        self.reference = TRAINED_ON if config.start == "static" else STATIC
        settings, file = self.path / "compare.json", self.path / "results.csv"
        new = json.loads(json.dumps(config.fixed()))
        if settings.exists():
            _same(settings, new)
        elif file.exists() or (self.path / "config.json").exists():
            raise UserError(f"{self.path} holds something else than a comparison: pass another --out.")
        else:
            write_json(settings, {"compare": new})
        self.rows: list[Row] = _read(file)

    def find(self, method: str, seed: int) -> Row | None:
        """The finished row of a method, or nothing."""
        for row in self.rows:
            wanted = (row["method"], row["seed"], row["recipe"], row["status"]) == (
                method,
                str(seed),
                self.recipe,
                "ok",
            )
            if wanted and self.recall(row) is not None:
                return row
        return None

    def put(self, values: Mapping[str, Any], result: Result | None = None) -> None:
        """Add a row, or replace the one of the same method and seed; what differs from static is worked out anew."""
        row = as_row(values) | {"recipe": self.recipe}
        if result is not None:
            keep_correct(self._correct(row["method"], int(row["seed"])), result)
        same = [i for i, r in enumerate(self.rows) if (r["method"], r["seed"]) == (row["method"], row["seed"])]
        if same:
            self.rows[same[0]] = row
        else:
            self.rows.append(row)
        add_differences(self.rows, self.reference, self.recall)
        self.write()

    def write(self) -> None:
        write_rows(self.path / "results.csv", self.rows)

    def good(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "ok"]

    def recall(self, row: Row) -> Result | None:
        """The row's result as far as a paired difference needs it: which images it got right. Nothing where the file
        is missing or damaged; the row is then run again."""
        return read_correct(self._correct(row["method"], int(row["seed"])))

    def _correct(self, method: str, seed: int) -> Path:
        return self.path / "correct" / f"{slug(method, seed)}.npz"


def as_row(values: Mapping[str, Any]) -> Row:
    return {name: _cell(values.get(name)) for name in COLUMNS}


def write_rows(path: Path, rows: Sequence[Row], columns: Sequence[str] = COLUMNS) -> None:
    write_text(path, csv_text(rows, columns))


def keep_correct(path: Path, result: Result) -> None:
    """Which images a model got right, in a small file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, correct=np.array(result.scores, bool), indices=np.array(result.indices))
    write_bytes(path, buffer.getvalue())


def read_correct(path: Path) -> Result | None:
    """That file as far as a paired difference needs it; nothing where it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            correct, indices = file["correct"].tolist(), file["indices"].tolist()
    except Exception:  # a damaged archive can raise anything
        return None
    metrics = {"top1": 100 * sum(correct) / len(correct), "top5": math.nan}
    unknown: dict[str, Any] = dict.fromkeys(("gmacs", "gmacs_blocks", "gmacs_static"), math.nan)
    unknown |= {"mean_depth": math.nan, "live": [], "live_mlp": [], "layout": "", "images_per_second": math.nan}
    return Result(len(correct), 0, metrics, **unknown, scores=[100.0 * c for c in correct], indices=indices)


def add_differences(rows: Sequence[Row], reference: str, recall: Callable[[Row], Result | None]) -> None:
    """Every row against the reference of its seed, on the same images."""
    good = [row for row in rows if row["status"] == "ok"]
    references = {row["seed"]: recall(row) for row in good if row["method"] == reference}
    for row in good:
        static = references.get(row["seed"])
        if static is None or row["method"] == reference:
            continue
        own = recall(row)
        if own is not None:
            mean, half, _ = paired_difference(own, static)
            found = {"difference": mean, "difference_ci95": half, "compared_to": reference}
            row.update({k: _cell(v) for k, v in found.items()})


def _same(path: Path, new: dict[str, Any]) -> None:
    try:
        old = dict(json.loads(path.read_text())["compare"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged; pass another --out.") from None
    differ = [f"{k} (was {old.get(k)!r}, now {v!r})" for k, v in new.items() if old.get(k) != v]
    if differ:
        raise UserError(f"{path.parent} holds another comparison: {'; '.join(differ[:4])}. Pass another --out.")


def _read(path: Path) -> list[Row]:
    rows = [{name: row.get(name, "") for name in COLUMNS} for row in read_csv(path)]
    if any(not row["seed"].isdigit() for row in rows):
        raise UserError(f"{path} is not a comparison's CSV file (a row without a seed): pass another --out.")
    for row in rows:
        _check_numbers(path, row)
    return rows


def _check_numbers(path: Path, row: Row) -> None:
    """A row that was damaged by hand is named before anything runs."""
    needed = ("top1", "images", "gmacs", "gmacs_share", "mean_depth") if row["status"] == "ok" else ()
    optional = ("difference", "difference_ci95", "images_per_second_compact", "speed_compact")
    for name in (*needed, *(n for n in optional if row[n])):
        try:
            value = float(row[name])
        except ValueError:
            value = math.nan
        if math.isnan(value) or (name == "top1" and not 0 <= value <= 100) or (name == "images" and value < 1):
            raise UserError(f"{path}: {name} of {row['method']!r} is {row[name]!r}; mend it, or pass another --out.")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return " ".join(f"{x:.2f}" for x in value)
    return "" if value is None else str(value)
