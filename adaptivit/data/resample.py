"""PIL's resize on batches of tensors, each image with its own box.

Shapes: B images, C channels, [h, w] source pixels, [H, W] target pixels. A resize is two matrix products with PIL's
weights, 22-bit fixed-point numbers: exact in float64, so equal on any device. It is PIL's bit for bit, with one
exception: if a picture shrinks more in height than in width, Pillow 13 resizes down before across, and pixels differ
by rounding (1 of 255, at hard edges a few).
"""

from __future__ import annotations

import torch
from torch import Tensor

_UNIT = 2.0**22  # PIL's fixed point


def _bilinear(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def _bicubic(x: Tensor) -> Tensor:
    """Keys' cubic with a = -0.5."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


FILTERS = {"bilinear": _bilinear, "bicubic": _bicubic}


def weights(low: Tensor, length: Tensor, total: int, wanted: Tensor, source: int, interpolation: str) -> Tensor:
    """One axis: [B, H, h] float64, the share of each source pixel in each target pixel.

    low, length [B]: the box, whose pixels alone are looked at. total: the pixels that it would become. wanted [H] or
    [B, H]: which of these; one outside 0..total - 1 is black."""
    low, length = low.double()[:, None], length.double()[:, None]
    scale = length / total
    centre = low + (wanted + 0.5) * scale  # [B, H]
    pixel = torch.arange(source, device=low.device, dtype=torch.float64)
    share = FILTERS[interpolation]((pixel + 0.5 - centre[..., None]) / scale.clamp(min=1)[..., None])
    inside = (pixel >= low) & (pixel < low + length)  # [B, h]
    share = share * inside[:, None]
    share = share * (1 / share.sum(-1, keepdim=True).clamp(min=1e-9))
    known = ((wanted >= 0) & (wanted < total)).expand(centre.shape)
    fixed = torch.copysign((share.abs() * _UNIT + 0.5).floor(), share) / _UNIT
    return fixed * known[..., None]


def resize(images: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Across, then down, as PIL: uint8 [B, C, h, w] -> [B, C, H, W]; weights [B or 1, H, h], [B or 1, W, w]."""
    wide = _rounded(torch.matmul(images.double(), across.mT[:, None]))
    return _rounded(torch.matmul(down[:, None], wide.double()))


def _rounded(values: Tensor) -> Tensor:
    return values.add_(0.5).clamp_(0, 255).to(torch.uint8)  # the conversion cuts off
