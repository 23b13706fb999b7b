"""Returns free memory to the system, since batches of changing lengths fragment glibc's heap."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

EVERY = 5.0  # seconds; a call takes milliseconds


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; other libraries do this themselves, or cannot."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return found


class Trimmer:
    """Trims the heap, at most every few seconds."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def step(self) -> None:
        now, trim = time.monotonic(), _trim()
        if trim is not None and now - self.last >= EVERY:
            self.last = now
            trim(0)
