"""Figures, tables and JSON as text."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any


def signed_percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f} %"  # + 0.0: no minus before a zero


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, the first column aligned left, the others right."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = ["---", *["---:"] * (len(names) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (names, rule, *cells)]


def headed(groups: Mapping[str, Mapping[str, str]]) -> str:
    """Headings, under each its entries as `name: text`, wrapped at the width of the terminal."""
    width, parts = shutil.get_terminal_size((120, 24)).columns, list[str]()
    for heading, entries in groups.items():
        lines = [
            textwrap.fill(f"  {name}: {text}", width, subsequent_indent="      ", break_on_hyphens=False)
            for name, text in entries.items()
        ]
        parts.append("\n".join([heading, *lines]))
    return "\n\n".join(parts)


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON, which has no NaN and no infinity: null in their place."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_nulls(value), indent=indent, allow_nan=False)


def _nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _nulls(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_nulls(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
