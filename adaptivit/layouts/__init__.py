"""How live tokens are stored and moved: `masked` (training, reference) and `packed` (ragged, no padding)."""

from __future__ import annotations

import torch

from ..errors import unknown
from .base import Layout
from .masked import Masked
from .packed import Packed

LAYOUTS: dict[str, type[Layout]] = {"masked": Masked, "packed": Packed}

__all__ = ["LAYOUTS", "Layout", "Masked", "Packed", "choose"]


def choose(name: str, *, training: bool, device: torch.device) -> type[Layout]:
    """The layout of that name; `auto` is packed where its rows pay for moving them.

    Gradients of absent keys (straight-through halting) exist on `masked` alone, so training runs there. On a GPU
    the packed layout of this version attends length by length, which costs more launches than it saves work.
    """
    if name == "auto":
        name = "masked" if training or device.type != "cpu" else "packed"
    if name not in LAYOUTS:
        raise unknown("layout", name, (*LAYOUTS, "auto"))
    return LAYOUTS[name]
