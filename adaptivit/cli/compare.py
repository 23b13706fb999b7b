"""Many methods under one recipe: table, CSV and Pareto plot."""

from __future__ import annotations

import sys

from ..errors import UserError
from ..experiments.compare.config import CompareConfig
from .command import Command, say_random


def run(config: CompareConfig) -> None:
    if config.epochs == 0:
        say_random(config.backbone, config.weights)
    from ..experiments.compare.run import run as compare

    try:
        rows = compare(config)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on with what is missing in {config.out}", file=sys.stderr)
        raise SystemExit(130) from None
    if all(row["status"] != "ok" for row in rows):
        raise UserError(f"Every method failed; the first: {rows[0]['reason']}")
    print(f"wrote results.csv, results.md and pareto.png to {config.out}")


COMMAND = Command(CompareConfig, run, policies=True, recipes="policy:NAME")
