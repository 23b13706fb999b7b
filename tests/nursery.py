"""Processes of their own for what is to be killed, or to be one of two: forks of one that has imported everything and
done nothing yet. Forks of the tests' own process would not do: once autograd has threads there, none of them may run a
backward pass."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

LIMIT = 300  # seconds: a process that waits for ever ends
_clean = multiprocessing.get_context("forkserver")
_clean.set_forkserver_preload(["conftest", "test_distributed"])
_imported_in = os.getpid()


def begin(
    work: Callable[..., int], *given: Any, said: Path | None = None, after: float = 0.0, **more: str
) -> BaseProcess:
    """A process that does this work and ends with its code; what it says goes to a file. `more` is its environment.

    Work and what it is given travel by name: functions of a module, not closures."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # a server of Python 3.11 looks nowhere else for the preload
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ |= {} if path is None else {"PYTHONPATH": path}
    process = _clean.Process(target=_live, args=(work, given, said, after, more), daemon=True)
    process.start()
    return process


def ended(process: BaseProcess) -> int | None:
    """Its code, or minus the signal that ended it."""
    process.join(LIMIT + 20)
    assert process.exitcode is not None, "the child hung"
    return process.exitcode


def _live(
    work: Callable[..., int], given: tuple[Any, ...], said: Path | None, after: float, more: dict[str, str]
) -> None:
    code = 99
    try:
        signal.alarm(LIMIT)
        file = os.open(said or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        assert _imported_in != os.getpid(), "the imports should have been there"
        torch.set_num_threads(1)  # as in the tests' own process, to be equal bit for bit
        os.environ |= more
        time.sleep(after)
        code = work(*given)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
