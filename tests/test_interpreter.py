"""The kernels without a GPU: their tests again in Triton's interpreter, side by side, a process a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted import INTERPRETED, ON_GPU

FILES = ("test_fused.py", "test_kernels.py", "test_weighted_kernels.py")


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels run in this process")
def test_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    running = {}
    for file in FILES:
        with (tmp_path / file).open("w") as out:
            command = [sys.executable, "-m", "pytest", str(Path(__file__).with_name(file)), "-q"]
            running[file] = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    codes = {file: process.wait() for file, process in running.items()}
    for file, code in codes.items():
        said = (tmp_path / file).read_text()
        assert code == 0, said[-5000:]
        assert " passed" in said or "[100%]" in said
