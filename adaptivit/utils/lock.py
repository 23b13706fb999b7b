"""Locks between processes, which the system takes back when a process ends, however it ends."""

from __future__ import annotations

import contextlib
import datetime
import errno
import math
import os
import platform
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

_NONE_HERE = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # file systems without locks
_handles: set[int] = set()  # that this process holds; a forked one must not keep them when this one has ended
_written: dict[Path, int] = {}  # what this process writes, and which of its threads


class Lock:
    """An exclusive lock on a file, gone when its process is."""

    def __init__(self, path: Path) -> None:
        self.path, self.handle = path, -1

    def acquire(self, wait: bool = True) -> bool:
        if fcntl is None:
            raise UserError("Processes share their work by file locks, which this system does not have.")
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                if _is_at(handle, self.path):  # else its holder has removed it in the meantime
                    break
                os.close(handle)
            except BlockingIOError:
                os.close(handle)
                return False
            except BaseException:
                os.close(handle)
                raise
        self.handle = handle
        _handles.add(handle)
        return True

    def release(self) -> None:
        _handles.discard(self.handle)
        os.close(self.handle)
        self.handle = -1

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextlib.contextmanager
def writing(path: str | Path, wait: float = 0.5) -> Iterator[None]:
    """Hold a directory that is written. Where another process holds it, an error names that one, after `wait` seconds:
    one that was killed takes a moment to end.

    The lock is a file beside the directory, inside where its parent cannot be written, and says who holds it.
    """
    place = Path(path).resolve()
    thread = threading.get_ident()
    if fcntl is None or _written.get(place) == thread:
        yield
        return
    try:
        lock = _lock_for(place)
        held = _within(lock, wait)
    except OSError as error:
        if error.errno not in _NONE_HERE:
            raise UserError(f"Cannot write {path}: {error.strerror or error}.") from error
        yield
        return
    if not held:
        other = _holder(lock.path)
        raise UserError(f"{path} is being written by another process ({other}). Wait for it, or choose another --out.")
    now = datetime.datetime.now().isoformat(" ", "seconds")
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(lock.handle, 0)
        os.write(lock.handle, f"{platform.node()}, pid {os.getpid()}, since {now}: {command}".encode(errors="replace"))
    _written[place] = thread
    try:
        yield
    finally:
        if _written.pop(place, None) is not None:  # not in a forked process
            with contextlib.suppress(OSError):
                lock.path.unlink()
            lock.release()


def _lock_for(place: Path) -> Lock:
    place.parent.mkdir(parents=True, exist_ok=True)
    if os.access(place.parent, os.W_OK):
        return Lock(place.with_name(f".{place.name}.lock"))
    place.mkdir(exist_ok=True)
    return Lock(place / ".lock")


def _within(lock: Lock, seconds: float) -> bool:
    if math.isinf(seconds):
        return lock.acquire()
    end = time.monotonic() + seconds
    while not lock.acquire(wait=False):
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True


def _holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip() or "it begins just now"
    except OSError:
        return "which has just ended"


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _let_go() -> None:
    """In a forked process: the locks are its parent's."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()
    _written.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
