"""From a picture to what a model reads, for evaluation and for training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, v2

from ..training.config import TrainConfig

PAD = 8  # the share of the side by which `--augment pad` pads: 4 pixels of CIFAR's 32


@dataclass(frozen=True)
class Preprocessing:
    """What a model expects of its images; stored in its checkpoint."""

    size: tuple[int, int]
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    crop_pct: float = 0.9
    interpolation: str = "bicubic"

    @classmethod
    def of(cls, vit: nn.Module, size: tuple[int, int]) -> Preprocessing:
        """timm's own, for the model's image size."""
        known = getattr(vit, "pretrained_cfg", None) or {}
        named: dict[str, Any] = {k: known[k] for k in ("mean", "std", "crop_pct", "interpolation") if known.get(k)}
        named.update({k: tuple(named[k]) for k in ("mean", "std") if k in named})
        return cls(size=size, **named)

    @classmethod
    def from_config(cls, values: dict[str, Any]) -> Preprocessing:
        clean: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**clean)

    def to_config(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @property
    def shorter(self) -> int:
        """The shorter side before the centre is taken."""
        return math.floor(min(self.size) / self.crop_pct)

    def evaluation(self) -> Callable[[Image.Image], Tensor]:
        """Resize the shorter side to size / crop_pct and take the centre; a picture of just the right size is
        taken as already cropped and is left alone."""
        mode = InterpolationMode(self.interpolation)
        fit = v2.Compose([v2.Resize(self.shorter, interpolation=mode), v2.CenterCrop(self.size)])
        finish = self._finish()

        def transform(image: Image.Image) -> Tensor:
            wanted = (self.size[1], self.size[0])
            return finish(image if image.size == wanted else fit(image))

        return transform

    def training(self, config: TrainConfig) -> Callable[[Image.Image], Tensor]:
        mode = InterpolationMode(self.interpolation)
        steps: list[Any] = []
        if config.augment in ("crop", "rand"):
            steps.append(v2.RandomResizedCrop(self.size, scale=(config.crop_scale, 1.0), interpolation=mode))
        else:
            if config.augment == "pad":
                steps.append(_shifted)
            steps.append(v2.Resize(self.size, interpolation=mode))
        if config.augment != "none":
            steps.append(v2.RandomHorizontalFlip())
        if config.color_jitter:
            steps.append(v2.ColorJitter(*[config.color_jitter] * 3))
        if config.augment == "rand" and config.rand_magnitude:
            steps.append(v2.RandAugment(magnitude=config.rand_magnitude, fill=list(self.fill)))
        steps.append(self._finish())
        if config.random_erasing:
            steps.append(v2.RandomErasing(p=config.random_erasing))
        return v2.Compose(steps)

    @property
    def fill(self) -> tuple[int, ...]:
        """What comes in from outside the picture when it is turned or moved."""
        return tuple(round(255 * m) for m in self.mean)

    def _finish(self) -> Any:
        return v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(self.mean, self.std)])


def _shifted(image: Image.Image) -> Image.Image:
    """A window of the image's size, anywhere in the image padded with black by an eighth of its side."""
    across, down = image.width // PAD, image.height // PAD
    left = int(torch.randint(2 * across + 1, ())) - across
    top = int(torch.randint(2 * down + 1, ())) - down
    return image.crop((left, top, left + image.width, top + image.height))
