"""Throughput and latency beside static baselines, in one run."""

from __future__ import annotations

import sys

from ..experiments.benchmark.config import BenchmarkConfig
from .command import Command, say_random


def run(config: BenchmarkConfig) -> None:
    say_random(" ".join(config.backbones), config.weights)
    from ..experiments.benchmark.run import run as benchmark

    try:
        rows = benchmark(config)
    except KeyboardInterrupt:
        print(f"interrupted; finished configurations are in {config.out}/benchmark.csv", file=sys.stderr)
        raise SystemExit(130) from None
    failed = sum(row["status"] != "ok" for row in rows)
    print(f"wrote benchmark.csv, benchmark.md{' and charts' * (failed < len(rows))} to {config.out}")
    if failed:
        print(f"{failed} of {len(rows)} contenders failed", file=sys.stderr)
        raise SystemExit(1)


COMMAND = Command(BenchmarkConfig, run, policies=True)
