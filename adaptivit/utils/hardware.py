"""Devices, and their names for reports of measured times."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import UserError


@cache
def processor() -> str:
    try:
        names = [s for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("model name")]
    except OSError:
        names = []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor()} ({threads} thread{'s' if threads > 1 else ''})"


def device_of(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda was asked for, but torch sees no GPU.")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


class _Unclamped(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        skipped = func is torch.Tensor.clamp_ and args[0].is_meta
        return args[0] if skipped else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Modules made here have shapes alone; timm's clamp of first weights would take most of the time."""
    with torch.device("meta"), _Unclamped():
        yield
