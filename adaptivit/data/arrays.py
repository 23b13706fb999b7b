"""Images in arrays: an .npz file, or a folder of mosaics, which store and load better than small pictures.

A folder of mosaics has labels.npz with SPLIT_y and maybe `classes`; SPLIT_*.webp (or .png), in the order of their
names, hold square tiles row by row. The side of a tile follows from the number of labels. CIFAR-100 in this form is
65 MB and is read in seconds.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..errors import DataError, first_line
from .dataset import Labelled

LABELS = "labels.npz"
Array = np.ndarray[Any, Any]


def read(path: Path) -> dict[str, Array]:
    """Plain arrays from an .npz file; nothing in it is executed."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # a damaged archive can raise anything
        raise DataError(f"Not a readable .npz of plain arrays: {path} ({first_line(error)}).") from None


def splits(arrays: dict[str, Any], path: Path, labelled: bool = True) -> dict[str, Labelled]:
    """The splits in these arrays: train_x, train_y and so on; labels may be missing where `labelled` is false."""
    names = tuple(str(c) for c in np.atleast_1d(arrays["classes"])) if "classes" in arrays else ()
    found: dict[str, Labelled] = {}
    for split, prefix in (("train", "train_"), ("val", "val_"), ("test", "test_"), ("all", "")):
        if f"{prefix}x" not in arrays:
            continue
        x: Any = np.atleast_1d(arrays[f"{prefix}x"])
        y: Any = np.atleast_1d(arrays.get(f"{prefix}y", np.empty(0))) if labelled else np.zeros(len(x))
        if len(x) != len(y) or len(x) == 0:
            raise DataError(f"{path}: {prefix}x has {len(x)} images, {prefix}y {len(y)} labels.")
        if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[-1] != 3):
            wanted = "uint8 [n, h, w, 3] or [n, h, w]"
            raise DataError(f"{path}: {prefix}x: expected {wanted}, got {x.dtype} {x.shape}.")
        found[split] = Labelled(f"{path}:{split}", x, y, names)
    if not found:
        raise DataError(f"{path} has none of train_x, val_x, test_x, x (found: {', '.join(arrays) or 'nothing'}).")
    return found


def mosaics(path: Path) -> dict[str, Array]:
    """SPLIT_x [n, s, s, 3], SPLIT_y [n] and `classes`; the last folder is kept, since commands ask more than once."""
    stamp = tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in sorted(path.iterdir()) if f.is_file())
    return dict(_mosaics(path, stamp))


@functools.lru_cache(maxsize=1)
def _mosaics(path: Path, stamp: object) -> dict[str, Array]:
    arrays = read(path / LABELS)
    with ThreadPoolExecutor() as pool:
        for name in [n for n in arrays if n.endswith("_y")]:
            split = name[:-2]
            files = sorted(f for f in path.glob(f"{split}_*") if f.suffix.lower() in (".webp", ".png"))
            if not files:
                raise DataError(f"{path / LABELS} has {name}, but there is no mosaic {split}_*.webp or .png beside it.")
            sheets = list(pool.map(_sheet, files))
            side = _side(sheets, len(np.atleast_1d(arrays[name])), path, split)
            arrays[f"{split}_x"] = np.concatenate([_tiles(s, side, f) for s, f in zip(sheets, files, strict=True)])
    return arrays


def _sheet(file: Path) -> Array:
    try:
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # a damaged file can raise anything
        raise DataError(f"Cannot read the mosaic {file} ({first_line(error)}).") from None


def _side(sheets: list[Array], count: int, path: Path, split: str) -> int:
    area = sum(s.shape[0] * s.shape[1] for s in sheets)
    side = math.isqrt(area // count) if count else 0
    if side == 0 or side * side * count != area:
        raise DataError(
            f"{path}: the {len(sheets)} mosaics {split}_* have {area} pixels, which are no {count} equal squares "
            f"({split}_y has {count} labels)."
        )
    return side


def _tiles(sheet: Array, side: int, file: Path) -> Array:
    """[rows * side, columns * side, 3] -> [rows * columns, side, side, 3]"""
    high, wide = sheet.shape[:2]
    if high % side or wide % side:
        raise DataError(f"{file}: {wide} x {high} pixels cannot be cut into tiles of {side}.")
    return sheet.reshape(high // side, side, wide // side, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
