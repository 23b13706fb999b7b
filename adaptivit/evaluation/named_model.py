"""The model, and the class names, that the flags of a command name."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError
from ..factory import create, load
from ..model import AdaptiveViT
from ..policies import spec
from .model_config import ModelConfig


def build(config: ModelConfig) -> AdaptiveViT:
    """The model that a command line names, at the budget that it names."""
    model = _built(config)
    if config.budget is not None:
        model.budget = config.budget
    if config.max_macs is not None:
        model.max_macs = config.max_macs
    return model


def _built(config: ModelConfig) -> AdaptiveViT:
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
