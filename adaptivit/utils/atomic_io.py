"""Files and directories that appear only when complete: written beside their place, then moved."""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from .lock import writing
from .text import json_text

_NEW = ".{}.new-"  # how the names of unfinished directories begin


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}. Nothing was changed there.") from error


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file in one step."""
    path = Path(path)
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{_beside(path.name)}{os.getpid()}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def _beside(name: str) -> str:
    """How the names of this host's unfinished files begin; the process and a random word follow."""
    return f".{name}.{platform.node()}-"


def _sweep(path: Path) -> None:
    """Remove what processes have left that were killed while they wrote this file."""
    for remains in path.parent.glob(f"{glob.escape(_beside(path.name))}*"):
        pid = remains.name.split("-")[-2]
        if pid.isdigit() and not _lives(int(pid)):
            remains.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json_text(value, indent=2) + "\n")


def recover(path: str | Path) -> None:
    """Clean up after a killed process: a directory that new_directory had moved away comes back, the rest goes."""
    path = Path(path)
    old, remains = _moved(path), [p for p in path.parent.glob(f"{_NEW.format(glob.escape(path.name))}*") if p.is_dir()]
    if not remains and not old.exists():
        return
    with writing(path, wait=10):  # a process that lives is between two moves for a moment only
        if old.is_dir() and not path.exists():
            os.replace(old, path)
        for directory in (old, *remains):
            shutil.rmtree(directory, ignore_errors=True)


def _moved(path: Path) -> Path:
    """Where a directory is while another takes its place."""
    return path.with_name(f".{path.name}.old")


@contextlib.contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """A directory that replaces the one at `path` when the block has ended without an error."""
    path = Path(path)
    with _explained(path), writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        recover(path)
        temporary, old = Path(tempfile.mkdtemp(dir=path.parent, prefix=_NEW.format(path.name))), _moved(path)
        try:
            yield temporary
            os.chmod(temporary, 0o755)
            there = path.exists()
            if there:
                os.replace(path, old)
            try:
                os.replace(temporary, path)
            except BaseException:
                if there:
                    old.rename(path)  # if that fails, `recover` finds it
                raise
            shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
