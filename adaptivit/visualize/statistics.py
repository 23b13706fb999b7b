"""Intervals, correlations and rows by class (A-ViT Table 1) of what a model did with images.

Shapes: B images, S places where patches were scored.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from ..errors import UserError
from .collect import Array, Seen

Row = dict[str, Any]


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count` (Wilson's, which holds near 0 and 1 too)."""
    z = 1.96
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return centre - half, centre + half


def correlations(x: Array, y: Array) -> tuple[float, float]:
    """Pearson's and Spearman's; NaN for fewer than three pairs or where one side does not vary."""
    if len(x) < 3 or np.ptp(x) < 1e-12 or np.ptp(y) < 1e-12:
        return math.nan, math.nan
    return float(np.corrcoef(x, y)[0, 1]), float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def p_value(r: float, count: int) -> float:
    """Two-sided p of a correlation of `count` pairs, were there none: Student's t with count - 2 degrees of freedom.

    Exact for Pearson's r of normal values, the usual approximation for Spearman's.
    """
    free = count - 2
    if free < 1 or math.isnan(r):
        return math.nan
    square = min(r * r, 1.0)
    if square * (free + 1) > 1:  # t^2 / (t^2 + free) is r^2, so p is I_{1 - r^2}(free / 2, 1/2)
        return _beta(free / 2, 0.5, 1 - square)
    return 1 - _beta(0.5, free / 2, square)


def _beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by a series of positive terms, for x below its mean."""
    if x <= 0:
        return 0.0
    total = term = 1.0
    for n in itertools.count():
        term *= (a + b + n) / (a + 1 + n) * x
        total += term
        if term < 1e-17 * total:
            break
    scale = math.lgamma(a + b) - math.lgamma(a + 1) - math.lgamma(b)
    return total * math.exp(scale + a * math.log(x) + b * math.log1p(-x))


def ranks(values: Array) -> Array:
    """Ranks from 1; equals share their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def mean_and_half(values: Array) -> tuple[Array, Array]:
    """[S, B] -> means over the images [S] and half the width of their 95 % intervals; NaN where nothing is defined."""
    known = np.isfinite(values)
    count, filled = known.sum(1), np.nan_to_num(values)
    mean = np.where(count > 0, filled.sum(1) / np.maximum(count, 1), np.nan)
    spread = np.where(known, (filled - mean[:, None]) ** 2, 0).sum(1) / np.maximum(count - 1, 1)
    return mean, np.where(count > 1, 1.96 * np.sqrt(spread / np.maximum(count, 1)), 0.0)


def by_class(seen: Seen, static: Seen | None = None) -> list[Row]:
    """One row a class that has images: class, images, top-1 %, mean depth.

    With a static model on the same images also its top-1 % and the change in points.
    """
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
    gain, lose = (
        sorted((r for r in rows if sign * r["change"] > 0), key=lambda r: (-abs(r["change"]), -r["images"], r["class"]))
        for sign in (1, -1)
    )
    return gain[:count], lose[:count]


def shallow_and_deep(rows: list[Row], count: int = 6) -> tuple[list[Row], list[Row]]:
    """The classes whose images take the fewest and the most blocks."""
    ranked = sorted(rows, key=lambda r: (r["mean depth"], r["class"]))
    count = min(count, len(ranked) // 2)
    return ranked[:count], ranked[::-1][:count]
