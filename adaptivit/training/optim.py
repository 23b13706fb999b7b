"""AdamW's parameter groups, the learning-rate schedule, and an average of the weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..model import AdaptiveViT
from .config import TrainConfig


def adamw(model: AdaptiveViT, config: TrainConfig) -> torch.optim.AdamW:
    """Weight decay on matrices alone: not on biases, norms, embeddings and the two scalars of a gate.

    Scalars have a group of their own, since FSDP shards all else and AdamW takes no mixture.
    """
    still = model.backbone.no_weight_decay()
    groups: dict[tuple[bool, bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            backbone = name.startswith("vit.")
            decays = parameter.ndim > 1 and name.removeprefix("vit.") not in still
            group = {
                "params": [],
                "weight_decay": config.optim.weight_decay if decays else 0.0,
                "share": config.optim.backbone_lr if backbone else 1.0,  # of the learning rate
                "backbone": backbone,
            }
            groups.setdefault((backbone, decays, parameter.ndim == 0), group)["params"].append(parameter)
    return torch.optim.AdamW(list(groups.values()), lr=config.optim.lr, fused=True)


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """Linear warm-up, then a cosine down to min_lr; a function of the step, so that a resumed run needs no state."""
    own = config.optim
    warm, total = own.warmup_epochs * steps_per_epoch, config.epochs * steps_per_epoch
    if step < warm:
        return own.lr * (step + 1) / max(warm, 1)
    share = (step - warm) / max(total - warm, 1)
    return own.min_lr + (own.lr - own.min_lr) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


class Average:
    """Exponential moving average of a model's parameters."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {k: v.detach().clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))  # the first steps count less
        for name, value in model.state_dict().items():
            kept = self.values[name]
            if kept.is_floating_point():
                kept.lerp_(value.to(kept.dtype), 1 - decay)
            else:
                kept.copy_(value)

    @contextlib.contextmanager
    def used(self, model: nn.Module) -> Iterator[None]:
        """The model with the averaged weights, and its own back afterwards."""
        own: dict[str, Tensor] = {k: v.detach().clone() for k, v in model.state_dict().items()}
        model.load_state_dict(self.values)
        try:
            yield
        finally:
            model.load_state_dict(own)
