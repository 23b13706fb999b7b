"""Where Triton kernels can run: on a GPU, or in Triton's interpreter, which must be chosen before Triton is imported.

Without a GPU, test_interpreter.py runs the files of such tests again in processes with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
ON_GPU = DEVICE == "cuda"
DTYPES = (torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else []))  # the interpreter cannot multiply bf16


class _Stays:
    """Triton's language for the interpreter, which is not taken back after a launch."""

    def restore(self) -> None:
        pass


def _prepare_once() -> None:
    """Let the interpreter prepare Triton's language once a function: it does so at every call, for most of its time."""
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang

    @cache
    def once(fn: Callable[..., Any]) -> _Stays:
        prepare(fn)
        return _Stays()

    interpreter._patch_lang = once


if INTERPRETED:
    _prepare_once()

here = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="runs in a process that test_interpreter.py starts")
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
elsewhere = pytest.mark.skipif(INTERPRETED, reason="runs in the process that started this one")
