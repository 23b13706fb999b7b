"""Rows of committed results as `adaptivit reproduce` keeps finished ones, so that a table can be completed on a machine
that has not run it:

    python benchmarks/restore_rows.py docs/results/raw/cifar100-main WORK --data CIFAR100 --weights WEIGHTS

Rows that others start from are left out, since their weights are not committed: they are trained again. A row is known
by its name, its seed, and the very words of --data and --weights. What its settings were is in its column `settings`.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from adaptivit.experiments.reproduce import TABLES
from adaptivit.experiments.reproduce.plan import ReproduceConfig, plan
from adaptivit.utils.atomic_io import write_bytes, write_json


def restore(results: Path, work: Path, data: str, weights: str) -> list[str]:
    """The names of the rows that are now in WORK/rows."""
    table, found = TABLES[results.name], []
    starts = {run.start for run in table.runs}
    wanted = ReproduceConfig(table=table.name, data=data, weights=weights, work=str(work), dry_run=True)
    keys = {(job.name, str(job.seed)): job.key for job in plan(wanted)}
    with np.load(results / "correct.npz") as right, (results / "results.csv").open(newline="") as file:
        indices = right["indices"]
        for row in csv.DictReader(file):
            name = f"{row['method']}, seed {row['seed']}"
            key = keys.get((row["method"], row["seed"]))
            place = work / "rows" / f"{key}.json"
            if key is None or row["method"] in starts or row["status"] != "ok" or place.exists():
                continue
            buffer = io.BytesIO()
            correct = np.unpackbits(right[name], count=len(indices)).astype(bool)
            np.savez_compressed(buffer, correct=correct, indices=indices)
            write_bytes(place.with_suffix(".npz"), buffer.getvalue())
            write_json(place, {k: v for k, v in row.items() if k != "paper"} | {"recipe": key})
            found.append(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="docs/results/raw/TABLE")
    parser.add_argument("work", type=Path, help="what --work of `adaptivit reproduce` will be")
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", required=True)
    given = parser.parse_args()
    if given.results.name not in TABLES:
        parser.error(f"expected a folder with the name of a table, got {given.results}; see adaptivit reproduce")
    missing = [name for name in ("results.csv", "results.md", "correct.npz") if not (given.results / name).exists()]
    if missing:
        parser.error(f"expected {missing[0]} in {given.results}; it is not there")
    for name in restore(given.results, given.work, given.data, given.weights):
        print("restored", name)
    print("go on with", next(x for x in (given.results / "results.md").read_text().splitlines() if x.startswith("`")))


if __name__ == "__main__":
    main()
