"""Two processes and one place to write: the second is told who the first is; what a killed one left is no obstacle."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adaptivit.errors import UserError
from adaptivit.utils.atomic_io import new_directory, write_text
from adaptivit.utils.lock import writing
from tests.support.commands import refused, static
from tests.support.data_sets import folder

HOLD = """
import sys, time
from adaptivit.utils.lock import writing
with writing(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def other(place: Path, code: str = HOLD) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes there, killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", code, str(place)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_every_command_that_writes_a_directory_names_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, data, model = tmp_path / "out", folder(tmp_path / "in", each=1), static(tmp_path / "model")
    commands = [
        ("train", "--data", data),
        ("compare", "--data", data, "--methods", "tome"),
        ("benchmark",),
        ("quickstart", "--fast"),
        ("visualize", "--backbone", "test_vit", "--policy", "tome", "--images", data),
        ("calibrate", model, "--data", data),
        ("apply", "--backbone", "test_vit"),
    ]
    with other(out) as process:
        for words in commands:
            line = refused(capsys, *words, "--out", out)
            assert f"{out} is being written by another process ({platform.node()}, pid {process.pid}, since " in line
        with pytest.raises(UserError, match=f"pid {process.pid}"), new_directory(out):
            pass
        assert not out.exists()
    with other(model) as process:
        assert f"pid {process.pid}" in refused(capsys, "calibrate", model, "--data", data)


def test_the_lock_of_a_killed_process_is_no_obstacle(tmp_path: Path) -> None:
    with other(tmp_path / "out"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == [".out.lock"]
    with writing(tmp_path / "out"), writing(tmp_path / "sub" / ".." / "out"):  # the same thread may hold it twice
        assert str(os.getpid()) in (tmp_path / ".out.lock").read_text()
    assert list(tmp_path.iterdir()) == []


def test_threads_and_forks(tmp_path: Path) -> None:
    """Another thread is another writer; a forked process, which may live longer, does not hold its parent's locks."""
    found: list[bool] = []

    def elsewhere() -> None:
        with pytest.raises(UserError, match=f"pid {os.getpid()}"), writing(tmp_path / "out"):
            pass
        found.append(True)

    with writing(tmp_path / "out"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found
    forked = HOLD.replace("print(", "os.fork() or time.sleep(5) or sys.exit(); print(").replace(
        "import sys", "import os, sys"
    )
    with other(tmp_path / "out", forked):
        pass
    with writing(tmp_path / "out"):
        pass


def test_inside_where_nothing_can_be_written_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with writing(tmp_path / "out"):
        assert [p.name for p in (tmp_path / "out").iterdir()] == [".lock"]
    assert list((tmp_path / "out").iterdir()) == []


KILLED = """
import os, sys
from adaptivit.utils import atomic_io
os.replace = lambda *_: os.kill(os.getpid(), 9)
atomic_io.write_text(sys.argv[1], "half")
"""


def test_what_killed_writers_left_is_removed_by_the_next(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a[1].txt")], check=False)
    (tmp_path / f".a[1].txt.{platform.node()}-{os.getpid()}-x").touch()  # of a process that lives
    (tmp_path / ".a[1].txt.elsewhere-1-x").touch()  # of another machine: whether it still writes is unknown here
    assert len(list(tmp_path.iterdir())) == 3
    write_text(tmp_path / "a[1].txt", "whole")
    assert len(list(tmp_path.iterdir())) == 3
    assert (tmp_path / "a[1].txt").read_text() == "whole"
    (tmp_path / ".out.new-x").mkdir()
    (tmp_path / ".out.backup").mkdir()  # of somebody else's
    with new_directory(tmp_path / "out"):
        assert not (tmp_path / ".out.new-x").exists()
    assert (tmp_path / ".out.backup").exists()
