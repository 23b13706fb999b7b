"""How training images are augmented. Nothing here imports torch, so that --help is instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..utils.coerce import at_least, between, require


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of training images, and mixing of their labels."""

    kind: Literal["none", "flip", "pad", "crop", "rand"] = "rand"
    """Nothing; mirror; mirror and a random shift by up to 1/8 (black from outside); random resized crop and mirror; the
    same with RandAugment."""
    on: Literal["auto", "cpu", "device"] = "auto"
    """Where training images are augmented: one by one on the CPU, or whole batches on the device, for arrays. auto: on
    the device where that is a GPU and has room for the arrays."""
    crop_scale: float = 0.35
    """Smallest share of an image's area that the random resized crop takes."""
    color_jitter: float = 0.0
    """Brightness, contrast and saturation change by a factor of 1 plus or minus up to this."""
    rand_magnitude: int = 9
    """RandAugment's magnitude, of 30."""
    erasing: float = 0.0
    """Probability of erasing a random rectangle."""
    mixup: float = 0.0
    """Mixup's alpha; off by default, since A-ViT found that it hurts halting."""
    cutmix: float = 0.0
    """CutMix's alpha; off by default."""
    label_smoothing: float = 0.0
    """Label smoothing of the cross-entropy."""

    def __post_init__(self) -> None:
        for name in ("color_jitter", "mixup", "cutmix"):
            at_least(f"augment.{name}", getattr(self, name), 0)
        for name in ("erasing", "label_smoothing"):
            between(f"augment.{name}", getattr(self, name), 0.0, 1.0)
        require(0 < self.crop_scale <= 1, "augment.crop_scale", "a share of the area in (0, 1]", self.crop_scale)
        require(0 <= self.rand_magnitude <= 30, "augment.rand_magnitude", "0..30", self.rand_magnitude)
