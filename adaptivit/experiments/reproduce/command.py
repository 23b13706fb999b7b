"""adaptivit reproduce: list, show or run. torch comes in only where something runs."""

from __future__ import annotations

import signal
import sys
import time

from .plan import ReproduceConfig, plan
from .show import dry_run, listing

UNFINISHED = 75  # exit code where --minutes were not enough: try again


def reproduce(config: ReproduceConfig) -> None:
    if not config.table:
        listing()
        return
    if config.dry_run:
        from .job import finished

        dry_run(config, [finished(job) is not None for job in plan(config)])
        return
    begun = time.monotonic()  # importing torch is a part of --minutes
    from .execute import execute

    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        rows = execute(config, begun)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on with what is missing in {config.work}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    failed, left = sum(row["status"] != "ok" for row in rows), len(plan(config)) - len(rows)
    if rows:
        print(f"wrote results.csv, results.md{' and plots' * (failed < len(rows))} to {config.directory}")
    if failed:
        print(f"{failed} of {len(rows)} rows failed; the same command runs them again", file=sys.stderr)
        raise SystemExit(1)
    if left:
        print(f"{left} of {left + len(rows)} rows are not finished; the same command goes on", file=sys.stderr)
        raise SystemExit(UNFINISHED)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt
