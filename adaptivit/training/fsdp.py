"""--run.fsdp: every process keeps a part of each weight, of its gradient and of AdamW's state (PyTorch's FSDP2).

Every Linear of a block is a unit of its own, gathered when it runs and given back after it: the loop in forward.py
calls the parts of a block, never the block. All else (norms, embeddings, head, policy) is one unit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..model import AdaptiveViT
from ..utils.sharded import like, whole


def shard(model: AdaptiveViT, device: str, processes: int) -> None:
    """Shard a model in place; scalars (a gate's gamma and beta) cannot be sharded and stay whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # the warning is of in-place work on the view that a Linear returns, which training does not do
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    mesh = init_device_mesh(device, (processes,))
    for module in (m for block in model.backbone.blocks for m in block.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    scalars = {p for p in model.parameters() if p.ndim == 0}
    for p in scalars:
        p.data = p.data.to(device)
    fully_shard(model, mesh=mesh, ignored_params=scalars)


@torch.no_grad()
def finish_gradients(model: nn.Module) -> None:
    """Average the gradients of scalars over the processes, as FSDP does with all else; 0 where no loss reached."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    scalars = [p.grad for p in parameters if p.ndim == 0 and p.grad is not None]
    if scalars:
        joined = torch.stack(scalars)
        dist.all_reduce(joined)
        for gradient, value in zip(scalars, joined / dist.get_world_size(), strict=True):
            gradient.copy_(value)


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Clip the gradient of a sharded model to a norm; returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    sharded = [g.to_local() for g in gradients if hasattr(g, "to_local")]
    square = torch.stack([g.float().square().sum() for g in sharded]).sum()
    dist.all_reduce(square)
    for g in gradients:
        if not hasattr(g, "to_local"):
            square = square + g.float().square()
    norm = square.sqrt()
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for g in gradients:
        local: Tensor = g.to_local() if hasattr(g, "to_local") else g
        local.mul_(factor)
    return norm


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """AdamW's state dict with whole tensors on the CPU; every process has to call it."""
    state = optimizer.state_dict()
    moved = {i: {k: whole(v).cpu() for k, v in values.items()} for i, values in state["state"].items()}
    return {**state, "state": moved}


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load such a state dict, sharded as the parameters are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    placed = {
        i: {k: like(parameters[i], v) if v.shape == parameters[i].shape else v for k, v in values.items()}
        for i, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": placed})
