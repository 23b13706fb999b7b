"""Which model a command runs: the flags that name it, and the model that they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..utils.coerce import check_size

if TYPE_CHECKING:
    from ..model import AdaptiveViT


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


def build(config: ModelConfig) -> AdaptiveViT:
    """The model that a command line names, at the budget that it names."""
    model = _built(config)
    if config.budget is not None:
        model.budget = config.budget
    if config.max_macs is not None:
        model.max_macs = config.max_macs
    return model


def _built(config: ModelConfig) -> AdaptiveViT:
    from ..factory import create, load
    from ..policies import spec

    if (config.checkpoint is None) == (config.backbone is None):
        raise UserError("Expected either --checkpoint DIR or --backbone NAME (with --weights FILE and --policy).")
    if config.checkpoint is not None:
        if config.weights is not None or config.img_size is not None or config.policy != "static":
            raise UserError("--checkpoint brings its own policy, weights and image size; leave those flags out.")
        return load(config.checkpoint).float()
    policy, values = spec.parse(config.policy)
    assert config.backbone is not None
    return create(config.backbone, policy, weights=config.weights, img_size=config.img_size, **values)


def names_of(path: str | None, model: AdaptiveViT) -> list[str] | None:
    """The class names in a file, one for each class of the model; None where there is no file."""
    if path is None:
        return None
    try:
        names = [line for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the class names in {path} ({error}).") from None
    if len(names) != (count := model.vit.num_classes):
        raise UserError(f"class_names: expected {count} names, one a line for each class, got {len(names)} in {path}.")
    return names
