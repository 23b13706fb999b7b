"""Which layout and which executor run a pass, and why: the one place that chooses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..backbones.protocol import Backbone
from ..errors import unknown
from ..layouts import LAYOUTS, GatheredOnDevice, Layout, PackedOnDevice
from . import cpu, triton
from .checkpointed import CheckpointedExecutor
from .cpu import CpuExecutor
from .torch import Executor
from .triton import TritonExecutor


@dataclass(frozen=True)
class Choice:
    """How a pass runs."""

    layout: type[Layout]
    executor: Executor
    why: str = "asked for"  # the reason for the layout
    refusal: str | None = None  # why the fused kernels do not run

    @property
    def fused(self) -> bool:
        return isinstance(self.executor, TritonExecutor)

    def explain(self, device: torch.device) -> str:
        """All of it in a line."""
        because = "" if self.refusal is None or device.type == "cpu" else f" (no fused kernels: {self.refusal})"
        return f"{self.layout.name} on {device.type} with {self.executor.name}{because}: {self.why}"


def choose(
    backbone: Backbone,
    layout: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    fixed_counts: bool,
    training: bool,
    recompute: bool = False,
) -> Choice:
    """The layout of that name (`auto`: the fastest one that is correct) and the executor with the fewest passes.

    A policy with `fixed_counts` keeps as many tokens in every image: fixed shapes, which `gathered` runs. Gradients of
    absent keys (straight-through halting) exist on `masked` alone, so others train there. Without fused kernels a
    packed batch on a GPU attends length by length and waits for every count, which costs more than it saves.
    """
    if layout not in LAYOUTS and layout != "auto":
        raise unknown("layout", layout, (*LAYOUTS, "auto"))
    refusal = "training" if training else triton.refusal(backbone, dtype, device)
    name, why = layout, "asked for"
    if layout == "auto":
        if fixed_counts:
            name, why = "gathered", "the policy keeps as many tokens in every image"
        elif training:
            name, why = "masked", "training: gradients of absent tokens exist there alone"
        elif device.type == "cpu" or refusal is None:
            name, why = "packed", "images differ in length, and rows that left are not computed"
        else:
            name, why = "masked", f"the fused kernels cannot run: {refusal}"
    on_device = {"packed": PackedOnDevice, "gathered": GatheredOnDevice}
    if refusal is None and name in on_device:
        return Choice(on_device[name], TritonExecutor(backbone), why)
    chosen = LAYOUTS[name]
    executor = Executor(backbone)
    if training and recompute and torch.is_grad_enabled():
        executor = CheckpointedExecutor(backbone)
    elif not training and chosen.drops_rows and cpu.refusal(backbone, device) is None:
        executor = CpuExecutor(backbone)
    return Choice(chosen, executor, why, refusal)
