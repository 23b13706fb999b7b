"""Memory that is free goes back to the system.

Batches of ever other lengths leave holes in glibc's heap that the next batch does not fit into, and a service grows
though it keeps nothing. glibc gives such pages back when it is asked to.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

EVERY = 5.0  # seconds; a call takes milliseconds


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc: others do this by themselves, or cannot
        return None
    return found


class Keeper:
    """Asks every few seconds at most."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def look(self) -> None:
        now, trim = time.monotonic(), _trim()
        if trim is not None and now - self.last >= EVERY:
            self.last = now
            trim(0)
