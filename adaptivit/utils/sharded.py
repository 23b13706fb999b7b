"""Tensors that FSDP has sharded over processes: gathered, and sharded again."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def whole(value: Tensor) -> Tensor:
    """A tensor with all its parts; every process has to call it. One that is not sharded is itself."""
    gather: Any = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def like(own: Tensor, value: Tensor) -> Tensor:
    """`value`, whole and the same in every process, on the device of `own` and sharded as that is."""
    if not hasattr(own, "full_tensor"):
        return value.to(own.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(own, DTensor)
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
