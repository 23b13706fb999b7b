"""How figures are written."""

from __future__ import annotations


def signed_percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f} %"  # + 0.0: no minus before a zero
