"""--checkpoint-activations: what a block computes is not kept for the backward pass but computed again there.

The two functions of a block as in backbone.py. Kept are the rows before each branch and what the policy looks at.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..backbones import timm_vit
from ..backbones.timm_vit import EvidenceRequest
from ..layouts import Layout

embed = timm_vit.embed


def attention(block: Any, layout: Layout, taps: EvidenceRequest) -> None:
    _again(timm_vit.attention, block, layout, taps)


def mlp(block: Any, layout: Layout, taps: EvidenceRequest) -> None:
    _again(timm_vit.mlp, block, layout, taps)


def _again(
    branch: Callable[[Any, Layout, EvidenceRequest], None], block: Any, layout: Layout, taps: EvidenceRequest
) -> None:
    """Run a branch on a copy of the layout as it is now: by the backward pass the layout itself has moved on."""
    now, found = copy.copy(layout), taps.found

    def run(rows: Tensor) -> tuple[Tensor, Any]:
        here, looked = copy.copy(now), EvidenceRequest(taps.wanted, taps.index, taps.gradient)
        here.rows = rows
        branch(block, here, looked)
        return here.rows, looked.found

    layout.rows, new = checkpoint(run, layout.rows, use_reentrant=False)
    taps.found = {**(found or {}), **(new or {})} or None
