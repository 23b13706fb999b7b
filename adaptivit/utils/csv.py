"""One row after another into a CSV file whose columns may grow."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from ..errors import UserError
from .atomic_io import write_text


def append_csv(path: str | Path, row: dict[str, Any]) -> None:
    """Add a row to a CSV file, new columns at the end; the file is replaced in one step."""
    rows: list[dict[str, Any]] = []
    if Path(path).exists():
        try:
            with Path(path).open(newline="") as file:
                rows = list(csv.DictReader(file))
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{path} is no CSV file to add a row to ({error}).") from None
    flat = {k: " ".join(f"{x:.2f}" for x in v) if isinstance(v, list) else v for k, v in row.items()}
    rows.append(flat)
    names = list(dict.fromkeys(name for r in rows for name in r))
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, out.getvalue())
