"""Policies: which tokens stop, skip or merge. One short file a method; `register` adds one of your own."""

from __future__ import annotations

from .records import BUILT_IN, Record
from .registry import build, get, known, names, register

__all__ = ["BUILT_IN", "Record", "build", "get", "known", "names", "register"]
