"""A batch to train on, and settings by their last names."""

from __future__ import annotations

from typing import Any

import torch

from adaptivit.data.dataset import Loaded
from adaptivit.training.config import RENAMED, TrainConfig, with_settings

PLAIN = TrainConfig(data="")


def batch(count: int = 4) -> Loaded:
    images = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return Loaded(images, torch.arange(count) % 3, torch.arange(count), [])


def named(config: TrainConfig = PLAIN, /, **values: Any) -> TrainConfig:
    """The configuration with other settings: lr for optim.lr, ponder for loss.ponder."""
    return with_settings(config, {(RENAMED | {"task": "loss.task"}).get(name, name): v for name, v in values.items()})
