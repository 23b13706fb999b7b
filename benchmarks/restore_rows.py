"""Rows of committed results as `adaptivit reproduce` keeps finished ones, so that a table can be completed on a machine
that has not run it: python benchmarks/restore_rows.py results/cifar100-main runs/reproduce/work

Rows that others start from are left out, since their weights are not committed: they are trained again.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from adaptivit.files import write_bytes, write_json
from adaptivit.reproduce import TABLES


def restore(results: Path, work: Path) -> list[str]:
    """The names of the rows that are now in WORK/rows."""
    table, found = TABLES[results.name], []
    starts = {run.start for run in table.runs}
    with np.load(results / "correct.npz") as right, (results / "results.csv").open(newline="") as file:
        indices = right["indices"]
        for row in csv.DictReader(file):
            name = f"{row['method']}, seed {row['seed']}"
            place = work / "rows" / f"{row['recipe']}.json"
            if row["method"] in starts or row["status"] != "ok" or place.exists():
                continue
            buffer = io.BytesIO()
            correct = np.unpackbits(right[name], count=len(indices)).astype(bool)
            np.savez_compressed(buffer, correct=correct, indices=indices)
            write_bytes(place.with_suffix(".npz"), buffer.getvalue())
            write_json(place, {k: v for k, v in row.items() if k != "paper"})
            found.append(name)
    return found


if __name__ == "__main__":
    for name in restore(Path(sys.argv[1]), Path(sys.argv[2])):
        print("restored", name)
