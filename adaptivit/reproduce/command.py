"""adaptivit reproduce: list, show or run. torch comes in only where something runs."""

from __future__ import annotations

import sys

from .plan import ReproduceConfig, plan
from .show import dry_run, listing


def reproduce(config: ReproduceConfig) -> None:
    if not config.table:
        listing()
        return
    if config.dry_run:
        from .execute import finished

        dry_run(config, [finished(job) is not None for job in plan(config)])
        return
    from .execute import execute

    try:
        rows = execute(config)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on with what is missing in {config.work}", file=sys.stderr)
        raise SystemExit(130) from None
    failed = sum(row["status"] != "ok" for row in rows)
    print(f"wrote results.csv, results.md{' and plots' * (failed < len(rows))} to {config.directory}")
    if failed:
        print(f"{failed} of {len(rows)} rows failed; the same command runs them again", file=sys.stderr)
        raise SystemExit(1)
