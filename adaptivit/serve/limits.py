"""Bodies, JSON, base64 and images of requests, checked against limits before they cost anything."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import AsyncIterator
from typing import Any

from PIL import Image

from ..data.dataset import rgb
from .config import Limits
from .errors import Refused, kind, require, shown

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_DRAIN = 4  # limits' worth of a body that is too large are read and dropped, so that its sender gets the answer


async def body(stream: AsyncIterator[bytes], declared: str | None, limits: Limits) -> bytes:
    """All of a request's body, read piece by piece and no further than the limit, whatever length was declared."""
    parts: list[bytes] = []
    size = 0
    too_large = declared is not None and declared.isdecimal() and int(declared[:18]) > limits.bytes
    async for part in stream:
        size += len(part)
        if size > limits.bytes and not too_large:
            too_large, size = True, len(part)
        if too_large:
            parts.clear()
            if size > _DRAIN * limits.bytes + 1_000_000:
                break
        else:
            parts.append(part)
    if too_large:
        line = f"The request is too large: at most {limits.max_upload:g} MB are taken."
        raise Refused(413, line, {"Connection": "close"})
    return b"".join(parts)


def read_json(data: bytes) -> dict[str, Any]:
    """A JSON object. NaN and Infinity are no JSON."""

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no JSON number")

    try:
        value = json.loads(data.decode(), parse_constant=constant)
    except (ValueError, RecursionError) as error:
        where = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise Refused(400, f"The body is not JSON{where}.") from None
    if not isinstance(value, dict):
        raise Refused(422, f"Expected a JSON object, got {kind(value)}.")
    return value


def decoded(text: object, what: str) -> bytes:
    """The bytes of a base64 string, also of a data: URL."""
    if not isinstance(text, str):
        raise Refused(422, f"{what}: expected a base64 string, got {kind(text)}.")
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode("".join(text.split()), validate=True)  # many tools break it into lines
    except (binascii.Error, ValueError):
        raise Refused(422, f"{what}: this is not base64.") from None


def picture(data: bytes, what: str, limits: Limits) -> Image.Image:
    """An upright RGB image. Its size is read from its header before a pixel is decoded."""
    require(bool(data), f"{what}: the file is empty.")
    line = f"{what}: the image has too many pixels; at most {limits.max_pixels:g} million are taken."

    def check(image: Image.Image) -> Image.Image:
        require(image.width * image.height <= limits.pixels, line, 413)
        return image

    try:
        return check(rgb(check(Image.open(io.BytesIO(data), formats=FORMATS))))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Refused(413, line) from None
    except Refused:
        raise
    except Exception:  # decoders of damaged bytes raise anything: SyntaxError, struct.error, OSError ...
        raise Refused(422, f"{what}: cannot be read as an image ({', '.join(FORMATS)}).") from None


def too_many_images(limits: Limits) -> Refused:
    return Refused(413, f"Too many images: at most {limits.max_images} a request are taken.")


def whole_number(value: object, what: str, least: int, most: int) -> int:
    """A number from JSON or from a form field."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 10:
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        raise Refused(422, f"{what}: expected a whole number in {least}..{most}, got {shown(value)}.")
    return value
