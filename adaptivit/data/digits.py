"""The embedded data: scikit-learn's handwritten digits, each placed at random on a larger, noisy, coloured canvas.

Shapes: B images of 64 x 64 px, 8 x 8 patches. A digit covers four of the 64 patches, the rest is background. Placement,
colour, background and a slight distortion are drawn anew every epoch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dataset import Labelled, Loaded, mix

SIZE, PATCH, BOX = 64, 8, 16  # canvas, patch and digit, in pixels
MEAN, STD = 0.2, 0.25
TEST = 360  # digits kept for the report
PLACEMENTS = 4  # how often each of them is shown
TRAINING_PLACEMENTS = 6  # how often a training digit is shown in the fixed set


def draw(digits: Tensor, generator: torch.Generator, distort: bool) -> Tensor:
    """[B, 8, 8] ink in 0..1 -> [B, 3, 64, 64] pictures in 0..1."""
    count = len(digits)
    cell = torch.randint(0, (SIZE - BOX) // PATCH + 1, (count, 2, 1), generator=generator) * PATCH
    colour = 0.6 + 0.4 * torch.rand(count, 3, 1, 1, generator=generator)
    smooth = F.interpolate(torch.eye(4)[None], size=SIZE, mode="linear")[0]  # [4, 64]
    soft = smooth.T @ torch.rand(count, 3, 4, 4, generator=generator) @ smooth
    noise = torch.rand(count, 1, SIZE, SIZE, generator=generator)
    u = (torch.rand(count, 5, generator=generator) * 2 - 1) * float(distort)
    angle, wide, high = u[:, 0] * math.radians(10), 1 + 0.1 * u[:, 1], 1 + 0.1 * u[:, 2]
    across = torch.stack([angle.cos() * wide, -angle.sin() * wide, 0.1 * u[:, 3]], 1)
    down = torch.stack([angle.sin() * high, angle.cos() * high, 0.1 * u[:, 4]], 1)
    field = F.affine_grid(torch.stack([across, down], 1), [count, 1, BOX, BOX], align_corners=False)
    ink = F.grid_sample(digits[:, None], field, align_corners=False)[:, 0]
    # two one-hot products put the digit at its cell: row y of the canvas shows row y - cell of the digit
    rows, columns = ((torch.arange(SIZE) - cell)[..., None] == torch.arange(BOX)).float().unbind(1)
    alpha = (rows @ ink @ columns.transpose(1, 2))[:, None]
    return (0.2 * soft + 0.08 * noise) * (1 - alpha) + colour * alpha


@dataclass(frozen=True)
class Digits:
    """Training digits and test digits, which are disjoint."""

    train_x: Tensor  # [n, 8, 8]
    train_y: Tensor  # [n]
    test_x: Tensor
    test_y: Tensor

    @classmethod
    def load(cls, few: bool = False) -> Digits:
        from sklearn.datasets import load_digits  # takes more than a second, and digits are seldom the data

        bunch = load_digits()
        x, y = torch.tensor(bunch.images / 16, dtype=torch.float32), torch.tensor(bunch.target)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        test, train = order[:TEST], order[TEST:]
        if few:
            test, train = test[:30], train[:96]
        return cls(x[train], y[train], x[test], y[test])

    def training(self, seed: int, epoch: int, batch_size: int) -> Iterator[Loaded]:
        """One epoch of freshly drawn pictures, normalised."""
        generator = torch.Generator().manual_seed(mix(seed, epoch))
        order = torch.randperm(len(self.train_x), generator=generator)
        for chosen in order[: len(order) // batch_size * batch_size].split(batch_size):
            pictures = draw(self.train_x[chosen], generator, distort=True)
            yield Loaded(normalise(pictures), self.train_y[chosen], chosen, [])

    def testing(self, batch_size: int = 120, seed: int = 1) -> list[Loaded]:
        """Every test digit at several places; the same pictures on every call."""
        pictures = normalise(placed(self.test_x, PLACEMENTS, seed, distort=False))
        labels, index = self.test_y.repeat(PLACEMENTS), torch.arange(len(pictures))
        parts = (values.split(batch_size) for values in (pictures, labels, index))
        return [Loaded(images, y, i, []) for images, y, i in zip(*parts, strict=True)]


def placed(digits: Tensor, places: int, seed: int, distort: bool) -> Tensor:
    """Every digit at several places, [places * n, 3, 64, 64] in 0..1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([draw(digits, generator, distort) for _ in range(places)])


@functools.cache
def splits() -> dict[str, Labelled]:
    """The same digits as fixed 8-bit pictures, for `--data digits`.

    `val` is a tenth of the training digits, absent from `train`; `test` has the quickstart's test pictures."""
    digits = Digits.load()
    held = len(digits.train_x) // 10
    parts = {
        "train": (digits.train_x[held:], digits.train_y[held:], TRAINING_PLACEMENTS, 2, True),
        "val": (digits.train_x[:held], digits.train_y[:held], PLACEMENTS, 3, False),
        "test": (digits.test_x, digits.test_y, PLACEMENTS, 1, False),
    }
    classes = tuple(str(i) for i in range(10))
    found = {}
    for name, (x, y, places, seed, distort) in parts.items():
        pictures = (placed(x, places, seed, distort) * 255).round().to(torch.uint8)
        items: Any = pictures.permute(0, 2, 3, 1).contiguous().numpy()
        found[name] = Labelled(f"digits:{name}", items, y.repeat(places).tolist(), classes)
    return found


def normalise(pictures: Tensor) -> Tensor:
    return (pictures - MEAN) / STD


def visible(images: Tensor) -> Tensor:
    """The reverse of normalise, [B, H, W, 3] in 0..1, with the dark background brightened for people."""
    return (images * STD + MEAN).clamp(0, 1).pow(0.7).permute(0, 2, 3, 1)
