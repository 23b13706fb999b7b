"""How live tokens are stored and moved: `masked` (training, reference), `packed` (ragged, no padding), `gathered`."""

from __future__ import annotations

import torch

from ..errors import unknown
from .base import Layout
from .gathered import Gathered
from .masked import Masked
from .packed import Packed
from .similarity import Similarity

LAYOUTS: dict[str, type[Layout]] = {"masked": Masked, "packed": Packed, "gathered": Gathered}

__all__ = ["LAYOUTS", "Gathered", "Layout", "Masked", "Packed", "Similarity", "choose"]


def choose(name: str, *, training: bool, device: torch.device, equal: bool) -> type[Layout]:
    """The layout of that name; `auto` is a compact one where its rows pay for moving them.

    Gradients of absent keys (straight-through halting) exist on `masked` alone, so training runs there. A policy that
    keeps equally many tokens in every image (`equal`) has fixed shapes and runs on `gathered`. On a GPU the packed
    layout of this version attends length by length, which costs more launches than it saves work.
    """
    if name == "auto" and training:
        name = "masked"
    elif name == "auto":
        name = "gathered" if equal else "masked" if device.type != "cpu" else "packed"
    if name not in LAYOUTS:
        raise unknown("layout", name, (*LAYOUTS, "auto"))
    return LAYOUTS[name]
