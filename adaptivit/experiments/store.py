"""What experiments keep on disk, so that the same command goes on: settings, rows. No torch."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..utils.atomic_io import write_bytes, write_json
from ..utils.csv import cell

if TYPE_CHECKING:
    from ..evaluation.evaluate import Result

COLUMNS = (
    *("model", "method", "policy", "settings", "seed", "status", "reason"),
    *("top1", "top1_err", "top5", "top5_err", "param_count", "img_size", "crop_pct", "interpolation", "images"),
    *("epochs", "gmacs", "gmacs_blocks", "gmacs_static", "gmacs_share", "mean_depth", "live"),
    *("difference", "difference_ci95", "compared_to"),
    *("images_per_second_masked", "images_per_second_compact", "compact_layout", "speed_masked", "speed_compact"),
    *("timing_batch", "timing_precision", "timing_device", "timed"),
    *("seconds_training", "recipe", "commit", "device", "date", "adaptivit", "torch", "timm", "python"),
)
STATIC, TRAINED_ON = "static", "static, trained on"

Row = dict[str, str]  # every cell is text, empty where nothing is known


def as_row(values: Mapping[str, Any]) -> Row:
    return {name: cell(values.get(name)) for name in COLUMNS}


def same_settings(path: Path, kind: str, settings: Mapping[str, Any]) -> None:
    """Keep the settings that all calls for one directory share; refuse others and name what differs."""
    new = json.loads(json.dumps(settings))
    if not path.exists():
        write_json(path, {kind: new})
        return
    try:
        old = dict(json.loads(path.read_text())[kind])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged: pass another --out.") from None
    names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    differ = [f"{name} (was {old.get(name)!r}, now {new.get(name)!r})" for name in names]
    if differ:
        raise UserError(f"{path.parent} holds another {kind}: {'; '.join(differ[:4])}. Pass another --out.")


class RowStore:
    """Rows by key, each written as soon as it is known: KEY.json, and KEY.npz with the images that it got right."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def get(self, key: str) -> Row | None:
        """The row, finished or failed; None where there is none or the file is damaged."""
        try:
            row: Row = json.loads(self.path(key).read_text())
        except (OSError, ValueError):
            return None
        return row

    def finished(self, key: str) -> Row | None:
        """The row of a job that has ended well; None otherwise, and where its images are missing."""
        row = self.get(key)
        return row if row is not None and row.get("status") == "ok" and self.correct(key) is not None else None

    def keys(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def put(self, key: str, row: Row, result: Result | None = None) -> None:
        """Write the row, after the images that the result got right."""
        if result is not None:
            import numpy as np

            buffer = io.BytesIO()
            np.savez_compressed(buffer, correct=np.array(result.scores, bool), indices=np.array(result.indices))
            write_bytes(self.path(key).with_suffix(".npz"), buffer.getvalue())
        write_json(self.path(key), row)

    def correct(self, key: str) -> Result | None:
        """The result as far as a paired difference needs it; None where the file is missing or damaged."""
        import numpy as np

        from ..evaluation.evaluate import Result

        try:
            with np.load(self.path(key).with_suffix(".npz"), allow_pickle=False) as file:
                correct, indices = file["correct"].tolist(), file["indices"].tolist()
        except Exception:  # a damaged archive can raise anything
            return None
        metrics = {"top1": 100 * sum(correct) / len(correct), "top5": math.nan}
        unknown: dict[str, Any] = dict.fromkeys(("gmacs", "gmacs_blocks", "gmacs_static"), math.nan)
        unknown |= {"mean_depth": math.nan, "live": [], "live_mlp": [], "layout": "", "images_per_second": math.nan}
        return Result(len(correct), 0, metrics, **unknown, scores=[100.0 * c for c in correct], indices=indices)


def add_differences(rows: Sequence[Row], reference: str, correct: Callable[[Row], Result | None]) -> None:
    """Every row against the reference of its seed, on the same images."""
    from ..evaluation.evaluate import paired_difference

    good = [row for row in rows if row["status"] == "ok"]
    references = {row["seed"]: correct(row) for row in good if row["method"] == reference}
    for row in good:
        static, own = references.get(row["seed"]), correct(row)
        if static is None or own is None or row["method"] == reference:
            continue
        mean, half, _ = paired_difference(own, static)
        row |= {"difference": cell(mean), "difference_ci95": cell(half), "compared_to": reference}
