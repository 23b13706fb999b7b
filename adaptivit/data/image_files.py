"""Image files: which ones can be read, and how they are opened, upright and in RGB."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps

from ..errors import DataError, first_line

Image.init()
# What Pillow decodes here: not its stubs, which know a file's name alone, and not EPS, for which it starts Ghostscript.
FORMATS = tuple(name for name in Image.ID if name not in ("BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"))
SUFFIXES = {s for s, kind in Image.registered_extensions().items() if kind in (*FORMATS, "MPO")}  # JPEG opens MPO
SIDE = 65_535  # pixels, as in a JPEG: rows cost memory of their own, in an image of one column most of all


@dataclass(frozen=True)
class Stored:
    """An encoded image inside another file."""

    name: str
    open: Callable[[], io.BytesIO]

    def __str__(self) -> str:
        return self.name


def _turned(image: Image.Image) -> bool:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
    except Exception:  # faulty EXIF does not make the picture unreadable
        return False


def rgb(image: Image.Image) -> Image.Image:
    """The image upright, as its EXIF says, in three channels of 8 bits; grey of 16 bits keeps its upper 8."""
    if _turned(image):
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # PIL would cut it off at 255, all white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def open_image(image: Any) -> Image.Image:
    """Upright and in RGB, from a file or a PIL image; DataError names a file that cannot be read."""
    if isinstance(image, Image.Image):
        return rgb(image)
    try:
        with opened(image) as file:
            return rgb(file)
    except Exception as error:  # whatever a damaged file or another kind of object raises
        raise DataError(f"Cannot read the image {image} ({first_line(error)}).") from None


def opened(item: Any) -> Image.Image:
    image = Image.open(item.open() if isinstance(item, Stored) else item, formats=FORMATS)
    if max(image.size) > SIDE:
        image.close()
        raise DataError(f"a side of at most {SIDE:,} pixels is taken, got {image.width} x {image.height}")
    return image
