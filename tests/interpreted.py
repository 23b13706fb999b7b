"""Where Triton kernels can run: on a GPU, or in Triton's interpreter, which must be chosen before Triton is imported.

Without a GPU, a file of such tests is run again by one of its own in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
ON_GPU = DEVICE == "cuda"
DTYPES = (torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else []))  # the interpreter cannot multiply bf16

here = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="runs in the process that test_in_the_interpreter starts")
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
elsewhere = pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels run in this process")


def run_again(file: str) -> None:
    """The tests of this file in the interpreter; their output if they fail."""
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "pytest", file, "-q"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
