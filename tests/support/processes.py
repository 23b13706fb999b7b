"""Processes of their own for what is to be killed, or to be one of two: forks of one that has imported everything and
done nothing yet. Forks of the tests' own process would not do: once autograd has threads there, none of them may run a
backward pass."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from adaptivit.training import log_plots
from tests.support.commands import train, weights

LIMIT = 300  # seconds: a process that waits for ever ends
_clean = multiprocessing.get_context("forkserver")
_clean.set_forkserver_preload(["tests.conftest", "tests.training.test_distributed"])
_imported_in = os.getpid()


def begin(
    work: Callable[..., int], *given: Any, output: Path | None = None, after: float = 0.0, **more: str
) -> BaseProcess:
    """A process that does this work and ends with its code; what it says goes to a file. `more` is its environment.

    Work and what it is given travel by name: functions of a module, not closures."""
    # A server of Python 3.11 looks nowhere else for the preload.
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ |= {} if path is None else {"PYTHONPATH": path}
    process = _clean.Process(target=_live, args=(work, given, output, after, more), daemon=True)
    process.start()
    return process


def ended(process: BaseProcess) -> int | None:
    """Its code, or minus the signal that ended it."""
    process.join(LIMIT + 20)
    assert process.exitcode is not None, "the child hung"
    return process.exitcode


def _live(
    work: Callable[..., int], given: tuple[Any, ...], output: Path | None, after: float, more: dict[str, str]
) -> None:
    code = 99
    try:
        signal.alarm(LIMIT)
        file = os.open(output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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


def assert_close_weights(a: Path, b: Path, tolerance: float = 1e-5) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name in first:
        if name.endswith("qkv.bias"):  # a key's bias has no gradient but rounding, which AdamW blows up: not compared
            for state in (first, second):
                state[name] = state[name].unflatten(0, (3, -1))[[0, 2]]
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=tolerance, msg=f"other weights: {name}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ranked(rank: int, first: Callable[[], None] | None, where: Path, out: Path, more: tuple[Any, ...]) -> int:
    """In a process of its own: train as one of two."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    log_plots.draw = lambda *_: b""  # torchrun's processes draw
    if first is not None:
        first()
    return train(where, out, *more)


def start_pair(
    where: Path,
    out: Path,
    *more: Any,
    first: Callable[[], None] | None = None,
    port: int = 0,
    late: float = 0.0,
    **environ: str,
) -> tuple[list[int | None], list[str]]:
    """Two processes as torchrun would start them, with the imports already there. Their codes and output. The second
    may be late."""
    environ["MASTER_PORT"] = str(port or free_port())
    files = [out.with_suffix(f".{rank}.txt") for rank in range(2)]
    pair = [
        begin(ranked, rank, first, where, out, more, output=files[rank], after=rank * late, **environ)
        for rank in range(2)
    ]
    return [ended(process) for process in pair], [file.read_text() for file in files]


def pair(where: Path, out: Path, *more: Any, first: Callable[[], None] | None = None) -> None:
    codes, printed = start_pair(where, out, *more, first=first)
    assert codes == [0, 0], "".join(printed)[-3000:]
