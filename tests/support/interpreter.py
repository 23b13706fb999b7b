"""Where the kernels of tests run: on a GPU, or in Triton's interpreter (chosen in tests/__init__.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
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


def _without_asserts() -> None:
    """Every sum of integers is computed again in int64, for an assertion that the interpreter leaves out anyway."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _remember_types() -> None:
    """Types and shapes of blocks are made anew for every result; here once for each shape."""
    from triton.language import core
    from triton.runtime import interpreter

    dtype_of, make_type, make_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    dtypes: dict[str, Any] = {}
    types: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(kind.scalar)
        return dtypes[name]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(side, "value", side) for side in shape])
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.name
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = vars(self).copy()
        vars(self).update(tensors[key], handle=handle, type=type)

    interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__ = np_dtype, block_type, tensor


if INTERPRETED:
    _prepare_once()
    _without_asserts()
    _remember_types()

here = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="needs Triton")
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
