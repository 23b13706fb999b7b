"""Where the kernels of tests run: on a GPU, or in Triton's interpreter (chosen in tests/__init__.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
ON_GPU = DEVICE == "cuda"
DTYPES = (torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else []))  # the interpreter cannot multiply bf16


class _Unrestored:
    """The interpreter's patches of Triton's language, which stay after a launch."""

    def restore(self) -> None:
        pass


def _prepare_once() -> None:
    """Let the interpreter prepare Triton's language once a function: it does so at every call, for most of its time."""
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang

    @cache
    def once(fn: Callable[..., Any]) -> _Unrestored:
        prepare(fn)
        return _Unrestored()

    interpreter._patch_lang = once


if INTERPRETED:
    _prepare_once()

here = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="needs Triton")
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
