"""Bodies, forms, JSON, base64 and images of requests, checked against limits before they cost anything."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import python_multipart  # noqa: F401  starlette reads forms by it, and would miss it only then
from PIL import Image
from pydantic_core import from_json
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from ..data.image_files import SIDE, rgb
from .config import Limits
from .errors import Refused, kind, require, shown

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_DRAIN = 4  # limits' worth of a body that is too large are read and dropped, so that its sender gets the answer
_FIELDS = 16  # of a form, beside its files
_JSON = 1000  # fields, and values beside a tensor's numbers
_SCAN, _SCANS = b"\xff\xda", 10  # of a JPEG: each is a pass over all pixels, however short; 10 are usual


def content_type(request: Request, default: str = "") -> str:
    return request.headers.get("content-type", default).partition(";")[0].strip().lower()


async def body(request: Request, limits: Limits) -> bytes:
    """The body, read piece by piece and kept no further than the limit, whatever length was declared."""
    declared = request.headers.get("content-length", "")
    too_large = declared.isdecimal() and int(declared[:18]) > limits.bytes
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            too_large = too_large or size > limits.bytes
            if not too_large:
                parts.append(part)
            elif size > _DRAIN * limits.bytes + 1_000_000:
                break
    except ClientDisconnect:
        raise Refused(400, "The request ended before its body did.") from None
    if too_large:
        line = f"The request is too large: at most {limits.max_upload:g} MB are taken."
        raise Refused(413, line, {"Connection": "close"})
    request.state.read = True
    return b"".join(parts)


async def form(request: Request, limits: Limits) -> tuple[list[bytes], dict[str, str]]:
    """Files named `images` or `image`, and fields, of a multipart form."""
    data = await body(request, limits)

    async def once() -> AsyncIterator[bytes]:
        yield data

    most = limits.max_images
    parser = MultiPartParser(request.headers, once(), max_files=most, max_fields=_FIELDS, max_part_size=10_000)  # type: ignore[arg-type]
    try:
        found = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        if "Too many files" in str(error):
            raise too_many_images(limits) from None
        raise Refused(400, "The body is not a multipart form with a boundary.") from None
    files: list[bytes] = []
    fields: dict[str, str] = {}
    try:
        for key, value in found.multi_items():
            named = key in ("images", "image")
            if isinstance(value, UploadFile):
                require(named, f"Expected files in the field 'images', got {shown(key)}.")
                files.append(await value.read())
            else:
                require(not named, f"{key}: expected a file, got a text field.")
                fields[key] = value
    finally:
        await found.close()
    return files, fields


def read_json(data: bytes, numbers: int = 0) -> dict[str, Any]:
    """A JSON object of so many numbers and a few fields, since reading many holds all threads up."""
    fields, values = data.count(b":"), data.count(b",")
    require(fields <= _JSON and values <= _JSON + numbers, "The JSON has too many values.", 413)
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        where = re.search(r" at line \d+ column \d+", str(error))
        raise Refused(400, f"The body is not JSON{where[0] if where else ''}.") from None
    if not isinstance(value, dict):
        raise Refused(422, f"Expected a JSON object, got {kind(value)}.")
    return value


def encoded_images(given: object, limits: Limits) -> list[bytes]:
    """The bytes of base64 strings, also of data: URLs."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts:
        raise Refused(422, "images: expected a list of at least one base64 string.")
    if len(texts) > limits.max_images:
        raise too_many_images(limits)
    return [_decoded(text, f"image {i}") for i, text in enumerate(texts, 1)]


def _decoded(text: object, what: str) -> bytes:
    if not isinstance(text, str):
        raise Refused(422, f"{what}: expected a base64 string, got {kind(text)}.")
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode("".join(text.split()), validate=True)  # many tools break it into lines
    except (binascii.Error, ValueError):
        raise Refused(422, f"{what}: this is not base64.") from None


def opened(data: bytes, what: str, limits: Limits) -> Image.Image:
    """An image whose header alone has been read."""
    require(bool(data), f"{what}: the file is empty.")
    with _reading(what, limits):
        return _checked(Image.open(io.BytesIO(data), formats=FORMATS), what, limits)


def pixels_of(data: bytes, what: str, limits: Limits) -> int:
    """Pixels to decode, by the header; a JPEG's count again for every ten scans."""
    with opened(data, what, limits) as image:
        scans = data.count(_SCAN) if image.format == "JPEG" else 1
        return image.width * image.height * max(1, -(-scans // _SCANS))


def picture(data: bytes, what: str, limits: Limits) -> Image.Image:
    """An upright RGB image. Its size is read from its header before a pixel is decoded."""
    with opened(data, what, limits) as image, _reading(what, limits):
        return _checked(rgb(image), what, limits)


def _checked(image: Image.Image, what: str, limits: Limits) -> Image.Image:
    require(max(image.size) <= SIDE, f"{what}: a side of at most {SIDE:,} pixels is taken.", 413)
    require(image.width * image.height <= limits.pixels, _too_many_pixels(what, limits), 413)
    return image


def _too_many_pixels(what: str, limits: Limits) -> str:
    return f"{what}: the image has too many pixels; at most {limits.max_pixels:g} million are taken."


@contextmanager
def _reading(what: str, limits: Limits) -> Iterator[None]:
    """Errors of decoders as refusals."""
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Refused(413, _too_many_pixels(what, limits)) from None
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
