"""Static: every token through every block. The baseline, through the same loop."""

from __future__ import annotations

from .base import Policy


class Static(Policy):
    """Answers nothing."""
