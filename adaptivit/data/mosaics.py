"""Small pictures kept as large ones, which store and load better: a folder with labels.npz and mosaics.

SPLIT_*.webp (or .png), in the order of their names, hold square tiles row by row; labels.npz has SPLIT_y and maybe
`classes`. The side of a tile follows from the number of labels. CIFAR-100 in this form is 65 MB and is read in seconds.
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
from . import npz

LABELS = "labels.npz"
Array = np.ndarray[Any, Any]


def read(path: Path) -> dict[str, Array]:
    """SPLIT_x [n, s, s, 3], SPLIT_y [n] and `classes`; the last folder is kept, since commands ask more than once."""
    stamp = tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in sorted(path.iterdir()) if f.is_file())
    return dict(_read(path, stamp))


@functools.lru_cache(maxsize=1)
def _read(path: Path, stamp: object) -> dict[str, Array]:
    arrays = npz.read(path / LABELS)
    with ThreadPoolExecutor() as pool:
        for name in [n for n in arrays if n.endswith("_y")]:
            split = name[:-2]
            files = sorted(f for f in path.glob(f"{split}_*") if f.suffix.lower() in (".webp", ".png"))
            if not files:
                raise DataError(f"{path / LABELS} has {name}, but there is no mosaic {split}_*.webp or .png beside it.")
            sheets = list(pool.map(_sheet, files))
            side = _side(sheets, np.size(arrays[name]), path, split)
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
