"""How live tokens are stored and moved: `masked` (training, reference), `packed` (ragged, no padding), `gathered`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import unknown
from .base import Layout, RowSchedule
from .gathered import Gathered
from .masked import Masked
from .packed import Packed
from .similarity import Match, Similarity
from .triton import GatheredOnDevice, HeadRows, PackedOnDevice

LAYOUTS: dict[str, type[Layout]] = {"masked": Masked, "packed": Packed, "gathered": Gathered}

__all__ = [
    "LAYOUTS",
    "Choice",
    "Gathered",
    "GatheredOnDevice",
    "HeadRows",
    "Layout",
    "Masked",
    "Match",
    "Packed",
    "PackedOnDevice",
    "RowSchedule",
    "Similarity",
    "choose",
]


@dataclass(frozen=True)
class Choice:
    """Which layout runs, with which functions, and why."""

    type: type[Layout]
    fused: bool  # fused kernels (fused.py) or timm's modules (backbone.py)
    why: str


def choose(name: str, *, training: bool, device: torch.device, equal: bool, refusal: str | None) -> Choice:
    """The layout of that name; `auto` is a compact one where its rows pay for moving them.

    A policy that keeps equally many tokens in every image (`equal`) has fixed shapes and runs on `gathered`. Gradients
    of absent keys (straight-through halting) exist on `masked` alone, so others train there. `refusal` says why the
    fused kernels cannot run (fused.refusal): without them, a packed batch on a GPU attends length by length and waits
    for every count, which costs more than it saves.
    """
    if name not in LAYOUTS and name != "auto":
        raise unknown("layout", name, (*LAYOUTS, "auto"))
    why = "asked for"
    fused = not training and refusal is None
    if name == "auto":
        if equal:
            name, why = "gathered", "the policy keeps as many tokens in every image"
        elif training:
            name, why = "masked", "training: gradients of absent tokens exist there alone"
        elif device.type == "cpu" or fused:
            name, why = "packed", "images differ in length, and rows that left are not computed"
        else:
            name, why = "masked", f"the fused kernels cannot run: {refusal}"
    on_device = {"packed": PackedOnDevice, "gathered": GatheredOnDevice}
    if fused and name in on_device:
        return Choice(on_device[name], True, why)
    return Choice(LAYOUTS[name], False, why)
