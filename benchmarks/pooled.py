"""Paired differences between methods over the images of several comparisons together.

    python benchmarks/pooled.py runs/adapt runs/eval --pairs fold:budget=0.678~tome:r=10 ... --csv pooled.csv

Reads what `adaptivit compare` left in each directory (results.csv and the per-image hits) and prints, for every pair
A~B, top-1 of A minus B in points with its 95 % interval, for each directory and for all together.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
from pathlib import Path

import numpy as np

from adaptivit.training.methods import slug
from adaptivit.utils.atomic_io import write_text


def hits(directory: Path, method: str, seed: int = 0) -> dict[int, bool]:
    """Image index -> whether the method was right."""
    with np.load(directory / "rows" / f"{slug(method, seed)}.npz") as file:
        return dict(zip(file["indices"].tolist(), file["correct"].tolist(), strict=True))


def share(directory: Path, method: str) -> float:
    with (directory / "results.csv").open(newline="") as file:
        return next(float(r["gmacs_share"]) for r in csv.DictReader(file) if r["method"] == method)


def paired(differences: list[float]) -> tuple[float, float]:
    mean = sum(differences) / len(differences)
    variance = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return mean, 1.96 * math.sqrt(variance / len(differences))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--pairs", nargs="+", required=True)
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    rows = []
    for pair in given.pairs:
        a, b = pair.split("~")
        everything: list[float] = []
        for directory in given.directories:
            first, second = hits(directory, a), hits(directory, b)
            differences = [100.0 * (first[i] - second[i]) for i in sorted(first) if i in second]
            everything += differences
            shares = share(directory, a), share(directory, b)
            rows.append((pair, directory.name, *shares, len(differences), *paired(differences)))
        rows.append((pair, "together", rows[-1][2], rows[-1][3], len(everything), *paired(everything)))
    names = ("pair", "images_of", "share_first", "share_second", "images", "difference", "ci95")
    for row in rows:
        costs = f"at {row[2]:.3f} and {row[3]:.3f} of static"
        print(f"{row[0]:60} {row[1]:9} {row[4]:5} images  {row[5]:+.2f} ± {row[6]:.2f}  {costs}")
    if given.csv:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(names)
        writer.writerows((*r[:2], *(f"{x:.4f}" for x in r[2:4]), r[4], *(f"{x:.4f}" for x in r[5:])) for r in rows)
        write_text(given.csv, out.getvalue())


if __name__ == "__main__":
    main()
