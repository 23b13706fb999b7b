"""Where Triton kernels can run: on a GPU, or in Triton's interpreter, which must be chosen before Triton is imported.

Without a GPU, test_interpreter.py runs the files of such tests again in processes with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
ON_GPU = DEVICE == "cuda"
DTYPES = (torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else []))  # the interpreter cannot multiply bf16

here = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="runs in a process that test_interpreter.py starts")
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
