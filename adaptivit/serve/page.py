"""The page at /: its files, its examples, and its requests.

Shapes: C x H x W an image, L blocks, P patches.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from PIL import Image
from torch import Tensor

from .. import policies
from ..budget.curve import Budget
from ..factory import create
from ..model import AdaptiveViT
from ..utils.hardware import device_name
from ..utils.plotting import COLOURS, image_bytes
from ..visualize.html import STYLE, data_uri
from .errors import require
from .limits import form
from .service import Service

_HERE = Path(__file__).parent / "page"
_FILES = {"/": "index.html", "/style.css": "style.css", "/script.js": "script.js", "/icon.svg": "icon.svg"}
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_TURNS = 4  # of a measurement; the fastest counts
_SECONDS = 0.2  # that a turn may take
_NAMED = 12  # classes that the page names, at most
_COPIES = 32  # of an image, timed together, where there is time


def routes(app: FastAPI, service: Service) -> None:
    for path, name in _FILES.items():
        app.get(path, include_in_schema=False)(_file(name))
    clock = Clock(service.model)
    examples(service)  # made before the first request

    @app.get("/demo/info", include_in_schema=False)
    async def info() -> dict[str, Any]:
        return about(service)

    @app.get("/demo/examples/{number}", include_in_schema=False)
    async def example(number: int) -> Response:
        found = examples(service)
        require(0 <= number < len(found), "There is no such example.", 404)
        return Response(found[number][1], media_type="image/png", headers={"Cache-Control": "private, max-age=3600"})

    @app.post("/demo/look", include_in_schema=False)
    async def look(request: Request) -> Response:
        async with service.deadline(request):
            files, fields = await form(request, service.limits)
            require(len(files) == 1, f"Expected one image, got {len(files)}.")
            (budget,) = service.budgets(fields.get("budget"), 1)
            (image,) = await service.tensors(request, files)
            return JSONResponse(await _looked(service, clock, request, image, budget, fields))


def _file(name: str) -> Callable[[], Any]:
    data, kind = (_HERE / name).read_bytes(), _KINDS[Path(name).suffix]
    if name == "style.css":
        data = STYLE.encode() + data  # shared by all pages and reports

    async def get() -> Response:
        return Response(data, media_type=f"{kind}; charset=utf-8", headers={"Cache-Control": "no-cache"})

    return get


def about(service: Service) -> dict[str, Any]:
    """The model and the range of its budget, for the page."""
    model, curve = service.model, service.model.calibration
    dial = None
    if curve is not None:
        shares = [point.macs / curve.static for point in curve.points]
        own = _opening(model) / curve.static
        most = max(0, int(100 * (1 - shares[-1])))
        dial = {"most": most, "start": min(most, max(0, round(100 * (1 - own)))), "continuous": curve.continuous}
    patch = model.backbone.patch_size
    high, wide = (-(-side // p) for side, p in zip(model.preprocessing.size, patch, strict=True))
    colours = [COLOURS(depth / model.shape.layers) for depth in range(model.shape.layers + 1)]
    return {
        "model": model.backbone_name or service.name,
        "method": policies.get(model.policy_name).title,
        "policy": model.policy_name,
        "layers": model.shape.layers,
        "tokens": model.shape.tokens,
        "grid": [high, wide],
        "size": list(model.preprocessing.size),
        "knows": _knows(service),
        "dial": dial,
        "examples": [name for name, _ in examples(service)],
        "colours": [[round(255 * c) for c in colour[:3]] for colour in colours],
        "megabytes": service.limits.max_upload,
    }


def _opening(model: AdaptiveViT) -> float:
    """MACs of the model's budget, or of its settings where it has none."""
    curve, budget = model.calibration, model.budget_state.budget
    assert curve is not None
    if budget is None or budget.free:
        return curve.settings.macs
    return curve.wanted(budget, device_name(next(model.parameters()).device))


def _knows(service: Service) -> str:
    """The model's classes, in words."""
    count, names = service.model.shape.outputs, service.names
    if not names:
        return f"{count:,} {service.task.noun}, which have no names here"
    return f"{count:,} {service.task.noun}: " + (", ".join(names) if count <= _NAMED else f"{', '.join(names[:3])} …")


async def _looked(
    service: Service, clock: Clock, request: Request, image: Tensor, budget: Budget | None, wanted: Collection[str]
) -> dict[str, Any]:
    (answer,) = await service.run(request, [image], [budget], trace=True)
    assert answer.attended is not None
    made = service.answered(answer, min(5, service.model.shape.outputs))
    made["caption"] = service.task.caption(made)
    made["attended"] = ["".join("1" if on else "0" for on in row) for row in answer.attended.tolist()]
    if "time" in wanted:
        # one turn at a time, so that others are answered in between
        turns = [await asyncio.wrap_future(service.batcher.call(clock.turn, image, budget)) for _ in range(_TURNS)]
        static, own = (1e3 * min(column) / clock.copies for column in zip(*turns, strict=True))
        made |= {"ms": own, "static_ms": static, "copies": clock.copies}
    if "picture" in wanted:
        made["picture"] = await service.aside(request, image.numel(), seen, service.model, image)
    return made


class Clock:
    """Times an image against the static model, on some copies of it at once. Only the model's thread may call it."""

    def __init__(self, model: AdaptiveViT) -> None:
        self.model, self.copies = model, 0
        self.static = create(model.vit, "static")

    def turn(self, image: Tensor, budget: Budget | None) -> tuple[float, float]:
        """Seconds of the copies, static and at this budget."""
        weight = next(self.model.parameters())
        one = image[None].to(weight.device, weight.dtype)
        if not self.copies:
            seconds = min(self._timed(lambda: self.static(one)) for _ in range(4))
            self.copies = 2 ** int(math.log2(min(_COPIES, max(1.0, _SECONDS / (2 * seconds)))))
        batch, text = one.expand(self.copies, -1, -1, -1).contiguous(), None if budget is None else budget.text
        return self._timed(lambda: self.static(batch)), self._timed(lambda: self.model(batch, budget=text))

    def _timed(self, run: Callable[[], Any]) -> float:
        begun = time.perf_counter()
        run()
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun


def seen(model: AdaptiveViT, image: Tensor) -> str:
    """An image as the model sees it, as a data: URL."""
    return data_uri(_png(model.preprocessing.to_pixels(image[None])[0]))


def _png(picture: Tensor) -> bytes:
    """[H, W, C] in 0..1 as PNG."""
    return image_bytes(Image.fromarray((picture * 255).round().to(torch.uint8).squeeze(-1).numpy()))


def examples(service: Service) -> tuple[tuple[str, bytes], ...]:
    """(name, PNG) of the first pictures: test digits for a model of digits, else scikit-learn's photographs."""
    return _digits() if service.names == [str(i) for i in range(10)] else _photographs()


@functools.cache
def _digits() -> tuple[tuple[str, bytes], ...]:
    """The first of each digit in the test split of `--data digits`."""
    from ..data import digits

    found = digits.Digits.load()
    labels = found.test_y.tolist()
    pictures = digits.draw(found.test_x, torch.Generator().manual_seed(1), distort=False).permute(0, 2, 3, 1)
    return tuple((f"a {digit}", _png(pictures[labels.index(digit)])) for digit in range(10))


@functools.cache
def _photographs() -> tuple[tuple[str, bytes], ...]:
    from sklearn.datasets import load_sample_images

    found = load_sample_images()
    pictures = torch.from_numpy(np.stack(found.images)) / 255
    return tuple((Path(name).stem, _png(picture)) for name, picture in zip(found.filenames, pictures, strict=True))
