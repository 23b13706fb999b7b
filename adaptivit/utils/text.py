"""Figures and tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def signed_percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f} %"  # + 0.0: no minus before a zero


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, the first column aligned left, the others right."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = ["---", *["---:"] * (len(names) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (names, rule, *cells)]
