"""Comparing weights, and a pickle that would run code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], but: tuple[str, ...] = ()) -> bool:
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items() if k not in but)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)
