"""Two processes under torchrun take the same steps as one at the same global batch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from test_data import SMALL, split_folder, train
from test_resume import log, weights

PLAIN = ("--augment", "none", "--lr", 1e-3, "--clip-grad", 0)


def assert_close_weights(a: Path, b: Path, tolerance: float = 1e-5) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name in first:
        if name.endswith("qkv.bias"):  # a key's bias has no gradient but rounding, which AdamW blows up: not compared
            for state in (first, second):
                state[name] = state[name].unflatten(0, (3, -1))[[0, 2]]
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=tolerance, msg=f"other weights: {name}")


def environment() -> dict[str, str]:
    """Compiled imports are kept between runs, whatever this process does: two processes import torch at once."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    cache = Path(tempfile.gettempdir()) / f"adaptivit-pycache-{os.getuid()}"
    return {"PYTHONPYCACHEPREFIX": str(cache)} | kept | {"OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def torchrun(*words: Any) -> tuple[int, str, str]:
    """torchrun with two processes; all of them end with this call. Returns its code and what it said."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]
    run = subprocess.Popen(
        [str(w) for w in (*start, "-m", "adaptivit", *words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        said, wrong = run.communicate(timeout=120)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
    return run.returncode, said, wrong


def pair(where: Path, out: Path, *more: Any) -> None:
    """Two forks of this process as torchrun would start them: the imports are already there."""
    port = free_port()
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                file = os.open(out.with_suffix(f".{rank}.txt"), os.O_WRONLY | os.O_CREAT)
                os.dup2(file, 1)
                os.dup2(file, 2)
                sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
                AcceleratorState._reset_state(reset_partial_state=True)
                PartialState._reset_state()
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
                code = train(where, out, *more)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    said = "".join(out.with_suffix(f".{rank}.txt").read_text() for rank in range(2))
    assert codes == [0, 0], said[-3000:]


def test_torchrun_ends_in_the_weights_of_one_process(tmp_path: Path) -> None:
    where = split_folder(tmp_path / "in")
    more = (*PLAIN, "--policy", "static")
    assert train(where, tmp_path / "one", *more) == 0
    words = ("--data", where, "--out", tmp_path / "two", "--device", "cpu", *SMALL, *more)
    code, said, wrong = torchrun("train", *words)
    assert code == 0, wrong[-3000:]
    assert said.count("saved") == 1, "one process speaks"
    assert_close_weights(tmp_path / "one", tmp_path / "two")
    assert [r["step"] for r in log(tmp_path / "two") if r["kind"] == "train"] == [1, 2, 3]


@pytest.mark.parametrize("policy", ["static", "aht", "avit"])
def test_two_processes_train_every_policy(tmp_path: Path, policy: str) -> None:
    """With `aht` the planners get no gradient from the task loss, and are parameters all the same."""
    where = split_folder(tmp_path / "in")
    more = (*PLAIN, "--policy", policy, "--clip-grad", 1)
    assert train(where, tmp_path / "one", *more) == 0
    pair(where, tmp_path / "two", *more)
    assert_close_weights(tmp_path / "one", tmp_path / "two")


def test_two_processes_with_every_loss_and_an_average(tmp_path: Path) -> None:
    """Means over tokens differ between shares of a batch, so the weights are near, not equal."""
    where = split_folder(tmp_path / "in")
    more = (*PLAIN, "--policy", "aht:straight_through=true", "--target-depth", 0.1, "--ponder", 0.01)
    more += ("--budget", 1, "--ema", 0.9)
    assert train(where, tmp_path / "one", *more) == 0
    pair(where, tmp_path / "two", *more)
    assert_close_weights(tmp_path / "one", tmp_path / "two", 5e-3)


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    where = split_folder(tmp_path / "in")
    with pytest.raises(AssertionError, match="multiple of 2 processes"):
        pair(where, tmp_path / "two", "--batch-size", 7)
    assert not (tmp_path / "two").exists()
