"""--compile blocks: torch.compile for what a block computes on rows alone; layouts and policies stay as they are.

All blocks share three small graphs, and so do all methods: compiled in seconds where a whole pass takes minutes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..backbones import timm_vit
from ..backbones.timm_vit import EvidenceRequest, Parts
from ..layouts import Layout

embed = timm_vit.embed
_GRAPHS = 64  # of one function: for training, teacher and validation, with and without masks; PyTorch's limit is 8


@functools.cache
def _parts() -> Parts:
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _GRAPHS)
    # a second size makes sizes a variable: merging leaves another number of rows in every block
    made: list[Any] = [torch.compile(run) for run in (timm_vit.norm_qkv, timm_vit.proj_residual, timm_vit.mlp_residual)]
    return Parts(*made)


def attention(block: Any, layout: Layout, taps: EvidenceRequest) -> None:
    timm_vit.attention(block, layout, taps, _parts())


def mlp(block: Any, layout: Layout, taps: EvidenceRequest) -> None:
    timm_vit.mlp(block, layout, taps, _parts())
