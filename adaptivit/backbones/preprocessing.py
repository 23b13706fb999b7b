"""How a backbone wants its images: size, crop, interpolation, mean and standard deviation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..utils.coerce import Check, convert, require, up_to

if TYPE_CHECKING:  # a checkpoint's values are checked without torch
    from PIL import Image
    from torch import Tensor, nn
    from torchvision.transforms import InterpolationMode

Side = Annotated[int, up_to(8192)]
Mean = Annotated[float, Check(lambda v: abs(v) <= 1000, "a number in -1000..1000")]
Deviation = Annotated[float, Check(lambda v: 1e-6 <= v <= 1000, "a number in 1e-6..1000")]
_CHANNELS = Check(lambda v: len(v) > 0, "a number for every channel")
_STRIP = 32  # times as long as wide: a longer image is cropped before it is resized
_MIDDLE = 2  # times as long as wide: what is left of it, a crop and the reach of the filters


@dataclass(frozen=True)
class Preprocessing:
    """What a model expects of its images; stored in its checkpoint."""

    size: tuple[Side, Side]
    mean: Annotated[tuple[Mean, ...], _CHANNELS] = (0.485, 0.456, 0.406)
    std: Annotated[tuple[Deviation, ...], _CHANNELS] = (0.229, 0.224, 0.225)
    crop_pct: Annotated[float, Check(lambda v: 0.1 <= v <= 2, "a share in 0.1..2")] = 0.9
    interpolation: Literal["nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos"] = "bicubic"

    @classmethod
    def of(cls, vit: nn.Module, size: tuple[int, int]) -> Preprocessing:
        """timm's own, for the model's image size."""
        known = getattr(vit, "pretrained_cfg", None) or {}
        named = {k: known[k] for k in ("mean", "std", "crop_pct", "interpolation") if known.get(k)}
        return cls.from_config({"size": size, **named})

    @classmethod
    def from_config(cls, values: dict[str, Any]) -> Preprocessing:
        made: Preprocessing = convert("preprocessing", values, cls, strict=True)
        require(len(made.mean) == len(made.std), "preprocessing", "as many values of mean as of std", values)
        return made

    def to_config(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @property
    def shorter(self) -> int:
        """The shorter side before the centre crop."""
        return math.floor(min(self.size) / self.crop_pct)

    @property
    def fill(self) -> tuple[int, ...]:
        """The colour from outside a picture that is turned or moved."""
        return tuple(round(255 * m) for m in self.mean)

    @property
    def mode(self) -> InterpolationMode:
        from torchvision.transforms import InterpolationMode

        return InterpolationMode(self.interpolation)

    def evaluation(self) -> Callable[[Image.Image], Tensor]:
        """Resize the shorter side to size / crop_pct and take the centre; an image of just the right size is
        already cropped and left alone, and of a very long one the middle part alone is resized."""
        from torchvision.transforms import v2

        fit = v2.Compose([v2.Resize(self.shorter, interpolation=self.mode), v2.CenterCrop(self.size)])
        finish = self.to_tensor()

        def transform(image: Image.Image) -> Tensor:
            return finish(image if image.size == self.size[::-1] else fit(self._middle(image)))

        return transform

    def _middle(self, image: Image.Image) -> Image.Image:
        """All of the image, or the middle of a strip, which would need gigabytes once its shorter side is resized."""
        unit = min(image.size) * math.ceil(max(self.size) / min(self.size))
        if max(image.size) <= _STRIP * unit:
            return image
        most = _MIDDLE * unit
        width, height = (side - max(side - most, 0) // 2 * 2 for side in image.size)  # keeps the centre where it is
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))

    def to_tensor(self) -> Callable[[Image.Image], Tensor]:
        """Normalised floats [3, H, W], without a resize."""
        import torch
        from torchvision.transforms import v2

        finish: Any = v2.Compose(
            [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(self.mean, self.std)]
        )
        return finish

    def to_pixels(self, images: Tensor) -> Tensor:
        """Normalised images [B, C, H, W] as pixels [B, H, W, C] in 0..1."""
        mean, std = (images.new_tensor(v).view(-1, 1, 1) for v in (self.mean, self.std))
        return (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1)
