"""CSV files: one writer, one reader, and rows added to a file whose columns may grow."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from .atomic_io import write_text


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Iterable[str] = (), digits: int | None = None) -> str:
    """Rows as CSV: these columns first, then others as they come; `digits`: significant ones of a float."""
    names = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n", restval="")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.{digits}g}" if digits and isinstance(v, float) else v for k, v in row.items()})
    return out.getvalue()


def cell(value: Any) -> str:
    """A value as text: six digits of a float, two decimals in a list, nothing for None and NaN."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return " ".join(f"{x:.2f}" for x in value)
    return "" if value is None else str(value)


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file, none where there is no file; every cell is text."""
    if not Path(path).exists():
        return []
    try:
        with Path(path).open(newline="") as file:
            return [{k: v or "" for k, v in row.items() if k is not None} for row in csv.DictReader(file)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file ({error}).") from None


def append_csv(path: str | Path, *rows: Mapping[str, Any], columns: Iterable[str] = ()) -> None:
    """Add rows to a CSV file, new columns at the end; the file is replaced in one step."""
    flat = [{k: cell(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
    write_text(path, csv_text([*read_csv(path), *flat], columns))
