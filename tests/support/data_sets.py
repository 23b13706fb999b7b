"""Small data sets: folders of pictures and .npz files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CLASSES = ("a", "b", "c")


def pixels(count: int, size: int = 32, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def folder(root: Path, classes: tuple[str, ...] = CLASSES, each: int = 8, seed: int = 0, size: int = 32) -> Path:
    """CLASS/NN.png, the classes told apart by their colour."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i, x in enumerate(pixels(each, size, seed * 1000 + label)):
            x[..., label % 3] |= 192
            Image.fromarray(x).save(root / name / f"{i:02}.png")
    return root


def split_folder(root: Path) -> Path:
    folder(root / "train")
    folder(root / "val", each=4, seed=1)
    return root


def npz(path: Path, **changes: Any) -> Path:
    """As unpack_cifar100.py writes it; a change of None leaves an array out."""
    labels = np.arange(24) % 3
    arrays = {"train_x": pixels(24), "train_y": labels, "test_x": pixels(6, seed=1), "test_y": labels[:6]}
    arrays |= {"classes": np.array(CLASSES)} | changes
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return path
