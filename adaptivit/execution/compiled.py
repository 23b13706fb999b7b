"""A block's row-wise parts under torch.compile (--run.compile blocks); layouts and policies run as they are.

All blocks and all policies share three small graphs, compiled in seconds where a whole pass takes minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..backbones.protocol import Backbone
from .torch import Executor

_GRAPHS = 64  # of one function: for training, teacher and validation, with and without masks; PyTorch's limit is 8


class CompiledExecutor(Executor):
    name = "compiled blocks"
    full_last_mlp = True  # other rows in the last MLP would need one more graph

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self.norm_qkv, self.proj_residual, self.mlp_residual = _compiled()  # type: ignore[method-assign]


@functools.cache
def _compiled() -> tuple[Callable[..., Any], ...]:
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _GRAPHS)
    # a second size makes sizes a variable: merging leaves another number of rows in every block
    return tuple(torch.compile(run) for run in (Executor.norm_qkv, Executor.proj_residual, Executor.mlp_residual))
