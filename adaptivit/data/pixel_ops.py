"""torchvision's operations on a batch of 8-bit pictures, each with a strength of its own; without a device sync.

Shapes: images uint8 [B, 3, H, W]; amounts float32 [B, 6], the strength in the first column or a matrix [2, 3].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2.functional import equalize_image

IDENTITY, AFFINE, BRIGHTNESS, CONTRAST, COLOUR, SHARPNESS, POSTERIZE, SOLARIZE, AUTOCONTRAST, EQUALIZE = range(10)


def _strength(amounts: Tensor) -> Tensor:
    return amounts[:, 0, None, None, None]


def _bytes(values: Tensor) -> Tensor:
    return values.clamp_(0, 255).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    r, g, b = images.float().unbind(1)
    return r.mul(0.2989).add_(g, alpha=0.587).add_(b, alpha=0.114).floor_()[:, None]


def brightness(images: Tensor, amounts: Tensor) -> Tensor:
    return _bytes(images * _strength(amounts))


def contrast(images: Tensor, amounts: Tensor) -> Tensor:
    factor = _strength(amounts)
    return _bytes((images * factor).add_(_grey(images).mean((1, 2, 3), keepdim=True) * (1 - factor)))


def colour(images: Tensor, amounts: Tensor) -> Tensor:
    factor = _strength(amounts)
    return _bytes((images * factor).add_(_grey(images) * (1 - factor)))


def sharpness(images: Tensor, amounts: Tensor) -> Tensor:
    """The border stays as it is."""
    out = images.float()
    inner = out[..., 1:-1, 1:-1]
    if inner.numel() == 0:
        return images
    soft = F.avg_pool2d(out, 3, 1).mul_(9).add_(inner, alpha=4).div_(13).round_()  # ones around a five
    inner.add_(soft.sub_(inner).mul_(1 - _strength(amounts)))
    return _bytes(out)


def posterize(images: Tensor, amounts: Tensor) -> Tensor:
    return images & _strength(amounts).to(torch.uint8)


def solarize(images: Tensor, amounts: Tensor) -> Tensor:
    return torch.where(images >= _strength(amounts), 255 - images, images)


def autocontrast(images: Tensor, amounts: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True).float(), images.amax((2, 3), keepdim=True).float()
    flat = low == high
    scale = torch.where(flat, 1.0, (high - low) * (1 / 255))
    return _bytes((images - torch.where(flat, 0.0, low)).div_(scale))


def equalize(images: Tensor, amounts: Tensor) -> Tensor:
    out: Tensor = equalize_image(images)
    return out


_IN_ORDER = (brightness, contrast, colour, sharpness, posterize, solarize, autocontrast, equalize)
OPERATIONS: dict[int, Callable[[Tensor, Tensor], Tensor]] = dict(enumerate(_IN_ORDER, BRIGHTNESS))


def affine(images: Tensor, amounts: Tensor, fill: Tensor) -> Tensor:
    """Nearest pixels under a matrix from target to source, pixels counted from the centre; fill [3] from outside."""
    h, w = images.shape[2:]
    x = torch.arange(w, device=images.device, dtype=torch.float32) - (w - 1) / 2
    y = torch.arange(h, device=images.device, dtype=torch.float32)[:, None] - (h - 1) / 2
    a, b, c, d, e, f = amounts[:, :, None, None].unbind(1)
    grid = torch.stack([(a * x + b * y + c) / (w / 2), (d * x + e * y + f) / (h / 2)], -1)
    fill = fill[:, None, None]
    return F.grid_sample(images - fill, grid, mode="nearest", align_corners=False).add_(fill).to(torch.uint8)
