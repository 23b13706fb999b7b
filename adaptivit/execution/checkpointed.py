"""A block whose values are computed again in the backward pass instead of kept (--run.checkpoint-activations).

Kept are the rows before each branch and the evidence that the policy reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..layouts import Layout
from .evidence import EvidenceRequest
from .torch import Executor


class CheckpointedExecutor(Executor):
    name = "PyTorch modules, computed again for the gradient"

    def attention(self, block: Any, layout: Layout, request: EvidenceRequest) -> None:
        _recomputed(super().attention, block, layout, request)

    def mlp(self, block: Any, layout: Layout, request: EvidenceRequest) -> None:
        _recomputed(super().mlp, block, layout, request)


def _recomputed(
    branch: Callable[[Any, Layout, EvidenceRequest], None], block: Any, layout: Layout, request: EvidenceRequest
) -> None:
    """Run a branch on a copy of the layout as it is now: by the backward pass the layout itself has moved on."""
    now, found = copy.copy(layout), request.found

    def run(rows: Tensor) -> tuple[Tensor, Any]:
        here, asked = copy.copy(now), EvidenceRequest(request.wanted, request.index, request.gradient)
        here.rows = rows
        branch(block, here, asked)
        return here.rows, asked.found

    layout.rows, new = checkpoint(run, layout.rows, use_reentrant=False)
    request.found = {**(found or {}), **(new or {})} or None
