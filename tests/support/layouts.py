"""A layout that the tests of layouts and kernels share."""

from __future__ import annotations

from torch import Tensor

from adaptivit.layouts import PackedOnDevice, RowSchedule


class Still(PackedOnDevice):
    """Moves no row because a token has left."""

    def __init__(self, x: Tensor, read: int) -> None:
        super().__init__(x, read, RowSchedule(moves=frozenset()))
