"""Files and directories that appear only when complete: written beside their place, then moved."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from .text import json_text


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
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
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


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json_text(value, indent=2) + "\n")


def recover(path: str | Path) -> None:
    """Clean up after a killed process: a directory that new_directory had moved away comes back."""
    path = Path(path)
    old = path.with_name(f".{path.name}.old")
    if old.is_dir() and not path.exists():
        os.replace(old, path)
    for remains in path.parent.glob(f".{path.name}.*"):
        if remains.is_dir():
            shutil.rmtree(remains, ignore_errors=True)


@contextlib.contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """A directory that replaces the one at `path` when the block has ended without an error."""
    path = Path(path)
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            yield temporary
            os.chmod(temporary, 0o755)
            old = None
            if path.exists():
                old = path.with_name(f".{path.name}.old")
                shutil.rmtree(old, ignore_errors=True)
                os.replace(path, old)
            try:
                os.replace(temporary, path)
            except BaseException:
                if old is not None:
                    old.rename(path)  # if that fails, `recover` finds it
                raise
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
