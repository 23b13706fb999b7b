"""The kernels without a GPU: their tests again in Triton's interpreter, a process a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.interpreter import INTERPRETED, ON_GPU

FILES = (
    "execution/test_compile_forward.py",
    "execution/test_fused.py",
    "kernels/test_kernels.py",
    "kernels/test_meet_kernels.py",
    "execution/test_memory.py",
    "kernels/test_merge_kernels.py",
    "kernels/test_similar_kernels.py",
    "kernels/test_threshold_gate.py",
    "kernels/test_weighted_kernels.py",
)


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels run in this process")
@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file: str) -> None:
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(Path(__file__).parents[1] / file), "-q", "-n", "0"]
    ran = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ran.returncode == 0, ran.stdout[-5000:]
    assert " passed" in ran.stdout or "[100%]" in ran.stdout
