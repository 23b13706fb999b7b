"""Flags that name the model of a command. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..utils.coerce import check_size


@dataclass(frozen=True)
class ModelConfig:
    """Which model: a checkpoint of ours, or a backbone with a policy."""

    checkpoint: str | None = None
    """Directory saved by `train` or save_pretrained."""
    backbone: str | None = None
    """timm name, where there is no checkpoint."""
    policy: str = "static"
    """Policy and settings for that backbone, e.g. aht:threshold=0.9 (listed below)."""
    weights: str | None = None
    """Weights for that backbone: .safetensors or .pth in timm's keys."""
    img_size: int | None = None
    """Image size in pixels; default: the backbone's."""
    budget: str | None = None
    """What an image may cost in the mean: '0.8 GMACs', -33% or '3 ms'; for a calibrated checkpoint. none: its
    settings."""
    max_macs: str | None = None
    """What any single image may cost at most: '1.0 GMACs' or -20%."""

    def __post_init__(self) -> None:
        check_size(self.img_size)
