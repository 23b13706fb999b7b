"""Tasks: labels, head, loss, metrics and answers. A task is one file; `register` adds one of your own."""

from __future__ import annotations

from .registry import BUILT_IN, DEFAULT, get, known, names, register

__all__ = ["BUILT_IN", "DEFAULT", "get", "known", "names", "register"]
