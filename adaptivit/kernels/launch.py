"""What the Triton kernels share: whether they can run here, how they are launched, and how an operation is declared.

Every kernel has its PyTorch reference beside it, in the same file. The number of live rows is a tensor on the device
(`rows` [1]): buffers have room for all tokens, kernels stop at the live ones, and the host never waits to learn how
many there are. What lies behind them in a buffer is left over from before and may be anything, NaN included. A kernel's
pointer that is None switches off what it would be for.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = tl = None  # type: ignore[assignment,unused-ignore]
jit: Any = (lambda kernel: kernel) if triton is None else triton.jit

__all__ = [
    "INTERPRETED",
    "LOG2E",
    "KernelRows",
    "Log2",
    "alike",
    "blank",
    "jit",
    "live",
    "log2_weight",
    "multiprocessors",
    "operation",
    "pointers",
    "power_of_two",
    "precision",
    "run_on",
    "tl",
    "triton",
    "usable",
    "weight_kind",
]

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
on_cpu = False  # tests set it, to run the kernels in Triton's interpreter
LOG2E = 1.4426950408889634


def usable(device: torch.device) -> bool:
    """Whether the kernels can run on tensors of this device (in Triton's interpreter on a CPU)."""
    return triton is not None and (device.type == "cuda" or (on_cpu and INTERPRETED))


def run_on(t: Tensor) -> bool:
    """Whether kernels without a gradient may take this tensor now."""
    return usable(t.device) and t.dtype != torch.float64 and not torch.is_grad_enabled()


@lru_cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # so that the interpreter goes round the loops
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_two(n: int, least: int = 16) -> int:
    """The next power of two, at least `least`: the sides of a tile."""
    return max(least, 1 << (n - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """How tl.dot multiplies float32: as torch is told to."""
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"


def operation(name: str, outputs: Callable[..., Any]) -> Callable[[Callable[..., None]], Any]:
    """Declare the torch operation adaptivit::`name` by what it writes: run(out, *inputs). `out`, tensors that are not
    written yet, comes from outputs(*inputs), which tells torch.compile the shapes too."""

    def declare(run: Callable[..., None]) -> Any:
        def made(*inputs: Any) -> Any:
            out = outputs(*inputs)
            run(out, *inputs)
            return out

        out, *inputs = inspect.signature(run, eval_str=True).parameters.values()
        made.__signature__ = inspect.Signature(inputs, return_annotation=out.annotation)  # type: ignore[attr-defined]
        op = torch.library.custom_op(f"adaptivit::{name}", made, mutates_args=())
        op.register_fake(outputs)
        return op

    return declare


def pointers(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Tensors as kernels take them: boolean ones as bytes."""
    return tuple(t.view(torch.uint8) if t is not None and t.dtype == torch.bool else t for t in tensors)


def blank(rows: int, width: int, space: int, like: Tensor) -> Tensor:
    """[rows, width] that has not been written, in memory for rows of `space` columns where that is more.

    Where buffers of several widths are needed one after the other, an allocator keeps a block for each width; with the
    space of the widest they are one."""
    memory = like.new_empty(rows * max(width, space))
    return memory[: rows * width].view(rows, width)


def live(rows: Tensor | None, values: Tensor) -> int:
    """Live rows on the host, for the references alone."""
    return len(values) if rows is None else int(rows[0])


@dataclass(frozen=True)
class KernelRows:
    """Rows as the kernels take them."""

    rows: Tensor  # [R', D]
    index: Tensor | None = None  # [R] where each row is to be taken from first
    count: Tensor | None = None  # [1] live rows, where they are fewer than there is room for
    expected: int = 0  # rows that are expected: they choose tiles


@dataclass(frozen=True)
class Log2:
    """A key's weight by its binary logarithm."""

    values: Tensor  # [R] float32


def log2_weight(weight: Tensor | Log2 | None) -> Tensor | None:
    """What the kernels read of a key's weight: a boolean one as it is, of others the binary logarithm."""
    if isinstance(weight, Log2):
        return weight.values
    return weight if weight is None or weight.dtype == torch.bool else weight.log2()


def weight_kind(weight: Tensor | None) -> int:
    """0: all ones, 1: boolean, 2: logarithms."""
    return 0 if weight is None else 1 if weight.dtype == torch.bool else 2


def alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same with one dtype and one set of strides, which the kernels are told once: q and k that were normed on
    their own are no views of qkv any more."""
    first = tensors[-1]
    if all(t.dtype == first.dtype and t.stride() == first.stride() and t.stride(-1) == 1 for t in tensors):
        return tensors
    return tuple(t.to(first.dtype).contiguous() for t in tensors)
