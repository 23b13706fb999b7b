"""Which classes gain and lose against the static model, and which go deep (A-ViT Table 1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import UserError
from .seen import Seen

Row = dict[str, Any]


def by_class(seen: Seen, static: Seen | None = None) -> list[Row]:
    """One row a class that has images: class, images, top-1 %, mean depth; with `static` also its top-1 % and the
    change in points. `static` is what a static model said of the same images."""
    if seen.labels is None or seen.correct is None:
        raise UserError("Classes can be compared where labels are known: give a labelled data set.")
    if static is not None and (static.names != seen.names or static.correct is None):
        raise UserError("The static model was run on other images.")
    rows = []
    for number in np.unique(seen.labels):
        own = seen.labels == number
        row: Row = {"class": seen.class_name(int(number)), "images": int(own.sum())}
        row["top-1 %"] = 100 * float(seen.correct[own].mean())
        if static is not None and static.correct is not None:
            row["static top-1 %"] = 100 * float(static.correct[own].mean())
            row["change"] = row["top-1 %"] - row["static top-1 %"]
        row["mean depth"] = float(seen.mean_depth[own].mean())
        rows.append(row)
    return rows


def gain_and_lose(rows: list[Row], count: int = 8) -> tuple[list[Row], list[Row]]:
    """The classes that gain most and those that lose most; of equals those with more images."""
    ranked = sorted(rows, key=lambda r: (-r["change"], -r["images"], r["class"]))
    gain = [r for r in ranked if r["change"] > 0][:count]
    lose = [r for r in sorted(rows, key=lambda r: (r["change"], -r["images"], r["class"])) if r["change"] < 0][:count]
    return gain, lose


def shallow_and_deep(rows: list[Row], count: int = 6) -> tuple[list[Row], list[Row]]:
    """The classes whose images take the fewest and the most blocks."""
    ranked = sorted(rows, key=lambda r: (r["mean depth"], r["class"]))
    count = min(count, len(ranked) // 2)
    return ranked[:count], ranked[::-1][:count]
