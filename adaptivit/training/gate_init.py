"""Starting values of a policy's gate, before training or instead of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..checkpoint.config import read_config
from ..data import dataset
from ..data.dataset import Labelled
from ..data.gpu_pipeline import evaluation_images
from ..model import AdaptiveViT
from .config import TrainConfig


def init_gate(
    model: AdaptiveViT, values: dict[str, Any], config: TrainConfig, some: Labelled, device: torch.device | str
) -> str | None:
    """Set the gate's start on up to 64 images; returns a line for the log.

    Nothing is done if the settings give the start, or the weights bring a trained policy of this kind.
    """
    weights, aims = config.weights, config.loss.cost or getattr(model.policy.settings, "start_at", "") == "budget"
    share = config.loss.cost_target if aims else None
    trained = weights is not None and Path(weights).is_dir() and read_config(weights)["policy"] == model.policy_name
    if "beta" in values or trained:
        return None
    images = evaluation_images(some.spread(64), model.preprocessing, device)
    batch = next(dataset.batches(images, dataset.in_order(len(images), 64)))
    return model.policy.init_gate(model, batch.images.to(device), share) if len(batch.labels) else None
