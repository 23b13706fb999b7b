"""Preprocessing: what torchvision's resize and crop give, without the memory of a strip's whole enlargement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from adaptivit.backbones.preprocessing import Preprocessing
from adaptivit.data import image_files
from adaptivit.data.augment import training_transform
from adaptivit.data.augment_config import AugmentConfig
from adaptivit.errors import DataError

STRIPS = [(16000, 1), (1, 16000), (1000, 3), (64000, 40)]


def smooth(width: int, height: int) -> Image.Image:
    """Noise of a few cells, enlarged: a place that is off by a pixel differs by little, one that is wrong by much."""
    drawn = np.random.default_rng(width * 100_003 + height)
    cells = (max(2, width // 16), max(2, height // 16))
    small = Image.fromarray(drawn.integers(0, 256, (cells[1], cells[0], 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def plain(expects: Preprocessing, image: Image.Image) -> torch.Tensor:
    """Resize all of it, then crop."""
    fit = v2.Compose([v2.Resize(expects.shorter, interpolation=expects.mode), v2.CenterCrop(expects.size)])
    return expects.to_tensor()(fit(image))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos", "nearest"])
@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_every_ordinary_shape_is_resized_then_cropped(size: tuple[int, int], interpolation: str) -> None:
    expects = Preprocessing(size, interpolation=interpolation)
    drawn = np.random.default_rng(0)
    shapes = [(1, 1), (1, 32), (32, 1), (7, 224), (2, 64), (320, 10), (40, 40), (41, 40), (1500, 47)]
    for short, ratio in zip(drawn.integers(2, 90, 40).tolist(), drawn.uniform(1, 32, 40).tolist(), strict=True):
        sides = (short, int(short * ratio))
        shapes.append(sides if short % 2 else sides[::-1])
    for shape in shapes:
        image = smooth(*shape)
        assert torch.equal(expects.evaluation()(image), plain(expects, image)), shape


def test_a_strip_is_cropped_first_and_looks_the_same() -> None:
    expects = Preprocessing((32, 32), mean=(0, 0, 0), std=(1, 1, 1))
    for shape in ((1600, 40), (40, 1601), (20, 999), (3333, 33)):
        image = smooth(*shape)
        difference = (expects.evaluation()(image) - plain(expects, image)).abs()
        assert float(difference.max()) < 0.12, "more than a shift by a pixel"
        assert float(difference.mean()) < 0.02


@pytest.mark.parametrize("strip", STRIPS)
def test_no_path_enlarges_a_strip(strip: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """129 bytes of PNG took gigabytes: 16,000 x 1 pixels became 3,968,000 x 248."""
    largest, resize = [0], Image.Image.resize

    def watched(self: Image.Image, size: Any, *given: Any, **more: Any) -> Image.Image:
        largest[0] = max(largest[0], size[0] * size[1])
        assert size[0] * size[1] < 4_000_000, f"resized to {size}"
        return resize(self, size, *given, **more)

    monkeypatch.setattr(Image.Image, "resize", watched)
    expects, image = Preprocessing((224, 224)), Image.new("RGB", strip)
    assert expects.evaluation()(image).shape == (3, 224, 224)
    for kind in ("none", "pad", "crop", "rand"):
        assert training_transform(expects, AugmentConfig(kind=kind))(image).shape == (3, 224, 224)  # type: ignore[arg-type]
    assert largest[0]


def test_what_would_not_fit_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A side of millions needs a pointer a row; where memory ends all the same, the file is named."""
    Image.new("1", (1, 70_000)).save(tmp_path / "tall.png")
    with pytest.raises(DataError, match=r"tall.png \(a side of at most 65,535 pixels is taken, got 1 x 70000"):
        image_files.open_image(tmp_path / "tall.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "good.png")

    def full(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(image_files, "rgb", full)
    with pytest.raises(DataError, match=r"good.png \(MemoryError\)"):
        image_files.open_image(tmp_path / "good.png")
