"""CPU times of two source trees, pass by pass in turns, to show that a refactoring makes nothing slower.

    python benchmarks/refactor_speed.py BEFORE_TREE AFTER_TREE --turns 30 --out refactor_speed.csv

DeiT-T with seeded random weights. Each tree has a worker process with PYTHONPATH=TREE. In every turn both run the same
pass, one after the other, the first one alternating, so the machine's load falls on both. The ratio of a turn is
after / before; printed are the medians, the median ratio and the quartiles of the ratios. Names that differ between
trees are in snapshot_names.py.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

BACKBONE = "deit_tiny_patch16_224"
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {  # in the names of b85ff43
    "static": ("static", {}),
    "fold": ("fold", {"budget": 0.67}),
    "aht": ("aht", {"gamma": 4.0, "beta": -8.0}),  # 0.61 of the MACs of static on these weights
}
HEADER = ["policy", "batch", "before_ms", "after_ms", "ratio", "ratio_q1", "ratio_q3", "turns", "macs_equal"]


# -- a worker -------------------------------------------------------------------------------------------------------
def work(threads: int) -> None:
    """Answer every line {"policy", "batch", "passes"} with the time of a pass in ms, until the input ends."""
    import time

    import snapshot
    import snapshot_names as names
    import torch

    import adaptivit

    torch.set_num_threads(threads)
    models: dict[str, Any] = {}
    print(json.dumps({"tree": str(Path(adaptivit.__file__).parents[1]), "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        name, batch = asked["policy"], asked["batch"]
        if name not in models:
            policy, settings = POLICIES[name]
            models[name] = snapshot.build(BACKBONE, *names.policy_spec(policy, settings, 12))
        images = snapshot.pictures(BACKBONE, batch)
        with torch.inference_mode():
            begun = time.perf_counter()
            for _ in range(asked["passes"]):
                output = models[name](images)
            ms = 1000 * (time.perf_counter() - begun) / asked["passes"]
        print(json.dumps({"ms": ms, "macs": output.macs.tolist(), "layout": output.layout}), flush=True)


class Worker:
    def __init__(self, tree: Path, threads: int) -> None:
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--work", "--threads", str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.about = self._read()
        if Path(self.about["tree"]) != tree:
            raise SystemExit(f"the worker for {tree} imported {self.about['tree']}")

    def __call__(self, policy: str, batch: int, passes: int) -> dict[str, Any]:
        pipe: IO[str] = self.process.stdin  # type: ignore[assignment]
        pipe.write(json.dumps({"policy": policy, "batch": batch, "passes": passes}) + "\n")
        pipe.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        pipe: IO[str] = self.process.stdout  # type: ignore[assignment]
        line = pipe.readline()
        if not line:
            raise SystemExit(f"a worker ended (exit {self.process.wait()}); its error is above")
        return json.loads(line)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait()


# -- turns ----------------------------------------------------------------------------------------------------------
def measure(workers: list[Worker], policy: str, batch: int, turns: int) -> dict[str, Any]:
    passes = max(1, 4 // batch)
    macs = [worker(policy, batch, passes)["macs"] for worker in workers]  # warm
    times: list[list[float]] = [[], []]
    for turn in range(turns):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            times[side].append(workers[side](policy, batch, passes)["ms"])
    ratios = [after / before for before, after in zip(*times, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if turns > 1 else ratios * 3
    values = (statistics.median(times[0]), statistics.median(times[1]), middle, low, high)
    texts = [f"{v:.3f}" for v in values]
    return dict(zip(HEADER, (policy, batch, *texts, turns, macs[0] == macs[1]), strict=True))


def about(tree: Path, side: str, worker: Worker) -> dict[str, Any]:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True, check=False).stdout

    changed = "+" if git("status", "--porcelain", "--", "adaptivit").strip() else ""
    return {f"{side}_commit": git("rev-parse", "--short", "HEAD").strip() + changed, "torch": worker.about["torch"]}


def write(path: Path, rows: list[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", help="the tree before, the tree after")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.threads)
        return 0
    if len(given.trees) != 2:
        parser.error("expected two trees: before and after")
    import snapshot

    trees = [tree.resolve() for tree in given.trees]
    workers = [Worker(tree, given.threads) for tree in trees]
    more = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": snapshot.processor(),
        "cores": os.cpu_count(),
        "threads": given.threads,
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }
    for tree, side, worker in zip(trees, ("before", "after"), workers, strict=True):
        more |= about(tree, side, worker)
    print(", ".join(f"{key} {value}" for key, value in more.items()))
    print("".join(f"{name:>11}" for name in HEADER))
    rows: list[Mapping[str, Any]] = []
    for batch in given.batches:
        for policy in given.policies:
            row = measure(workers, policy, batch, given.turns)
            print("".join(f"{row[name]!s:>11}" for name in HEADER), flush=True)
            rows.append(row | more)
    for worker in workers:
        worker.close()
    if given.out:
        write(given.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
