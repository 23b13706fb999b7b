"""Augmentation of one image at a time on the CPU, by torchvision's transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from ..backbones.preprocessing import Preprocessing
from .augment_config import AugmentConfig

PAD = 8  # the share of the side by which `--augment.kind pad` pads: 4 pixels of CIFAR's 32


def training_transform(preprocessing: Preprocessing, config: AugmentConfig) -> Callable[[Image.Image], Tensor]:
    """From an image to an augmented, normalised tensor [3, H, W]; draws from torch's generator."""
    steps: list[Any] = []
    size, mode = preprocessing.size, preprocessing.mode
    if config.kind in ("crop", "rand"):
        steps.append(v2.RandomResizedCrop(size, scale=(config.crop_scale, 1.0), interpolation=mode))
    else:
        if config.kind == "pad":
            steps.append(_shifted)
        steps.append(v2.Resize(size, interpolation=mode))
    if config.kind != "none":
        steps.append(v2.RandomHorizontalFlip())
    if config.color_jitter:
        steps.append(v2.ColorJitter(*[config.color_jitter] * 3))
    if config.kind == "rand" and config.rand_magnitude:
        steps.append(v2.RandAugment(magnitude=config.rand_magnitude, fill=list(preprocessing.fill)))
    steps.append(preprocessing.to_tensor())
    if config.erasing:
        steps.append(v2.RandomErasing(p=config.erasing))
    return v2.Compose(steps)


def _shifted(image: Image.Image) -> Image.Image:
    """A window of the image's size, anywhere in the image padded with black by an eighth of its side."""
    across, down = image.width // PAD, image.height // PAD
    left = int(torch.randint(2 * across + 1, ())) - across
    top = int(torch.randint(2 * down + 1, ())) - down
    return image.crop((left, top, left + image.width, top + image.height))
