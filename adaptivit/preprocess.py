"""From a picture to what a model reads, for evaluation and for training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from .config import TrainConfig


@dataclass(frozen=True)
class Preprocessing:
    """What a model expects of its images; stored in its checkpoint."""

    size: tuple[int, int]
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    crop_pct: float = 0.9
    interpolation: str = "bicubic"

    @classmethod
    def of(cls, vit: VisionTransformer) -> Preprocessing:
        """timm's own, for the model's image size."""
        known = getattr(vit, "pretrained_cfg", None) or {}
        named: dict[str, Any] = {k: known[k] for k in ("mean", "std", "crop_pct", "interpolation") if known.get(k)}
        named.update({k: tuple(named[k]) for k in ("mean", "std") if k in named})
        return cls(size=tuple(vit.patch_embed.img_size), **named)

    @classmethod
    def from_config(cls, values: dict[str, Any]) -> Preprocessing:
        clean: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**clean)

    def to_config(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def evaluation(self) -> Callable[[Image.Image], Tensor]:
        """Resize the shorter side to size / crop_pct and take the centre; a picture of just the right size is
        taken as already cropped and is left alone."""
        mode = InterpolationMode(self.interpolation)
        shorter = math.floor(min(self.size) / self.crop_pct)
        fit = v2.Compose([v2.Resize(shorter, interpolation=mode), v2.CenterCrop(self.size)])
        finish = self._finish()

        def transform(image: Image.Image) -> Tensor:
            wanted = (self.size[1], self.size[0])
            return finish(image if image.size == wanted else fit(image))

        return transform

    def training(self, config: TrainConfig) -> Callable[[Image.Image], Tensor]:
        mode = InterpolationMode(self.interpolation)
        steps: list[Any] = []
        if config.augment in ("crop", "rand"):
            steps.append(v2.RandomResizedCrop(self.size, scale=(0.35, 1.0), interpolation=mode))
        else:
            steps.append(v2.Resize(self.size, interpolation=mode))
        if config.augment != "none":
            steps.append(v2.RandomHorizontalFlip())
        if config.augment == "rand" and config.rand_magnitude:
            fill = [round(255 * m) for m in self.mean]
            steps.append(v2.RandAugment(magnitude=config.rand_magnitude, fill=fill))
        steps.append(self._finish())
        if config.random_erasing:
            steps.append(v2.RandomErasing(p=config.random_erasing))
        return v2.Compose(steps)

    def _finish(self) -> Any:
        return v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(self.mean, self.std)])
