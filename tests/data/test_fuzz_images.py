"""Damaged image files: an upright RGB image or one line, from every reader of images; never anything else."""

from __future__ import annotations

import io
from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image, features

from adaptivit.backbones.preprocessing import Preprocessing
from adaptivit.data.image_files import open_image
from adaptivit.errors import DataError
from adaptivit.serve.config import Limits
from adaptivit.serve.errors import Refused
from adaptivit.serve.limits import picture, pixels_of
from tests.support.serving import photo

KINDS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", *(["AVIF"] if features.check("avif") else [])]
FILES = {kind: photo(3, (24, 17), kind) for kind in KINDS}
LIMITS = Limits(max_pixels=1.0)


@st.composite
def damaged(draw: Any) -> bytes:
    """A file with some bytes changed, doubled or cut out; mostly near its head, where the structure is."""
    data = bytearray(FILES[draw(st.sampled_from(KINDS))])
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.one_of(st.integers(0, min(64, len(data))), st.integers(0, len(data))))
        length = draw(st.sampled_from([0, 1, 2, 4, 40]))
        data[at : at + length] = draw(st.binary(max_size=8) | st.sampled_from([b"\xff" * 4, b"\0" * 4]))
    return bytes(data)


def strip(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, "PNG")
    return out.getvalue()


def read(function: Any, *given: Any) -> tuple[Image.Image | None, str]:
    """(image, or the one line that refuses it)"""
    try:
        return function(*given), ""
    except (Refused, DataError) as error:
        return None, str(error)


@settings(max_examples=300, deadline=2000, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@example(strip(60_000, 1))
@example(strip(1, 16_000))
@given(damaged())
def test_a_damaged_image_is_an_image_or_one_line(data: bytes) -> None:
    image, line = read(picture, data, "image 1", LIMITS)
    assert (image is None) == line.startswith("image 1: ")
    assert "\n" not in line
    if image is not None:
        assert image.mode == "RGB"
        assert image.width * image.height <= pixels_of(data, "image 1", LIMITS) <= LIMITS.pixels
        made = Preprocessing(size=(32, 32)).evaluation()(image)
        assert made.shape == (3, 32, 32)
        assert bool(torch.isfinite(made).all())
    if "too many pixels" not in line:
        image, line = read(open_image, io.BytesIO(data))
        assert (image is None) == line.startswith("Cannot read the image")
        assert "\n" not in line
        assert image is None or image.mode == "RGB"
