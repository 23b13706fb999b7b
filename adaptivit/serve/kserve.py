"""The Open Inference Protocol (KServe's V2), REST side.

Shapes: B images, C x H x W, L blocks.

Input `images`: FP32 [B, C, H, W], normalised as the model wants it; or BYTES [B], encoded images as base64. Outputs:
`logits` FP32 [B, classes], `macs` FP64 [B], `live` INT64 [B, L]. `parameters` may have a `budget`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from .. import __version__
from .batcher import Answer
from .errors import Refused, require, shown
from .limits import body, content_type, encoded_images, read_json, too_many_images
from .schema import ERRORS, INFER, errors
from .service import Service

_OUTPUTS: dict[str, tuple[str, Callable[[Answer], Any]]] = {
    "logits": ("FP32", lambda answer: answer.logits.tolist()),
    "macs": ("FP64", lambda answer: answer.macs),
    "live": ("INT64", lambda answer: answer.live),
}


def routes(app: FastAPI, service: Service) -> None:
    def known(name: str) -> None:
        require(name == service.name, f"Unknown model; this service has {service.name!r}.", 404)

    @app.get("/v2/health/live", tags=["health"])
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.get("/v2/health/ready", responses=errors(503), tags=["health"])
    async def all_ready() -> dict[str, bool]:
        require(service.batcher.alive, "The model's thread has ended.", 503)
        return {"ready": True}

    @app.get("/v2", tags=["V2"])
    async def server() -> dict[str, Any]:
        return {"name": "adaptivit", "version": __version__, "extensions": []}

    @app.get("/v2/models/{name}", responses=errors(404, 422), tags=["V2"])
    async def model(name: str) -> dict[str, Any]:
        known(name)
        return metadata(service)

    @app.get("/v2/models/{name}/ready", responses=errors(404, 422), tags=["V2"])
    async def model_ready(name: str) -> dict[str, Any]:
        known(name)
        return {"name": name, "ready": service.batcher.alive}

    @app.post("/v2/models/{name}/infer", responses=ERRORS, openapi_extra=INFER, tags=["V2"])
    async def infer(name: str, request: Request) -> Response:
        known(name)
        line = "Expected application/json (the binary extension is not supported)."
        require(content_type(request, "application/json") == "application/json", line, 415)
        async with service.deadline(request):
            data = await body(request, service.limits)
            images, budget, wanted, number = await service.aside(request, len(data), read, service, data)
            if isinstance(images[0], bytes):
                images = await service.tensors(request, images)
            answers = await service.run(request, images, service.budgets(budget, len(images)))
        return JSONResponse(answered(service, answers, wanted, number))


def metadata(service: Service) -> dict[str, Any]:
    model = service.model
    sizes = {"logits": [model.shape.outputs], "macs": [], "live": [model.shape.layers]}
    return {
        "name": service.name,
        "versions": ["1"],
        "platform": "adaptivit",
        "inputs": [{"name": "images", "datatype": "FP32", "shape": [-1, *_image_shape(service)]}],
        "outputs": [
            {"name": name, "datatype": kind, "shape": [-1, *sizes[name]]} for name, (kind, _) in _OUTPUTS.items()
        ],
    }


def _image_shape(service: Service) -> list[int]:
    return [service.model.backbone.in_chans, *service.model.preprocessing.size]


def read(service: Service, data: bytes) -> tuple[list[Any], Any, list[str], str | None]:
    """(images as tensors or as files, budget, names of the outputs wanted, id) of an inference request."""
    given = read_json(data, service.limits.max_images * math.prod(_image_shape(service)))
    inputs, number, parameters = given.get("inputs"), given.get("id"), given.get("parameters") or {}
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise Refused(422, "inputs: expected a list with the one tensor 'images'.")
    known = number is None or (isinstance(number, str) and len(number) <= 128 and number.isprintable())
    require(known, "id: expected a printable string of at most 128 characters.")
    require(isinstance(parameters, dict), "parameters: expected an object.")
    wanted = [_output(one) for one in _listed(given.get("outputs") or [])] or list(_OUTPUTS)
    return _images(service, inputs[0]), parameters.get("budget"), wanted, number


def _listed(outputs: object) -> list[Any]:
    return outputs if isinstance(outputs, list) else [None]


def _output(given: object) -> str:
    name = given.get("name") if isinstance(given, dict) else None
    if not isinstance(name, str) or name not in _OUTPUTS:
        raise Refused(422, f"outputs: expected objects named {', '.join(_OUTPUTS)}, got {shown(name)}.")
    return name


def _images(service: Service, tensor: dict[str, Any]) -> list[Any]:
    name, shape, kind, data = (tensor.get(key) for key in ("name", "shape", "datatype", "data"))
    require(name == "images", f"inputs: expected the name 'images', got {shown(name)}.")
    if not isinstance(shape, list) or not shape or not all(type(n) is int and n >= 1 for n in shape):
        raise Refused(422, "images: expected a shape of whole numbers >= 1.")
    if shape[0] > service.limits.max_images:
        raise too_many_images(service.limits)
    if not isinstance(data, list):
        raise Refused(422, "images: expected 'data' to be a list (the binary extension is not supported).")
    if kind == "BYTES":
        whole = len(shape) == 1 and len(data) == shape[0]
        require(whole, f"images: expected BYTES of shape [B] with B strings, got {len(data)}.")
        return encoded_images(data, service.limits)
    require(kind == "FP32", f"images: expected the datatype FP32 or BYTES, got {shown(kind)}.")
    wanted = _image_shape(service)
    require(shape[1:] == wanted, f"images: expected the shape [B, {', '.join(map(str, wanted))}].")
    return list(torch.from_numpy(_numbers(data, shape)))


def _numbers(data: list[Any], shape: list[int]) -> Any:
    """float32 of this shape, from numbers that are flat or nested."""
    size = int(np.prod(shape))
    try:
        array = np.asarray(data)
    except ValueError:  # lists of different lengths
        array = np.empty(0)
    fits = array.dtype.kind in "iuf" and array.shape in ((size,), tuple(shape))
    require(fits, f"images: expected {size} numbers, flat or nested as the shape says.")
    with np.errstate(over="ignore"):
        made = array.astype(np.float32).reshape(shape)
    require(bool(np.isfinite(made).all()), "images: expected finite numbers of 32 bits.")
    return made


def answered(service: Service, answers: list[Answer], wanted: list[str], number: str | None) -> dict[str, Any]:
    outputs = []
    for name in wanted:
        kind, value = _OUTPUTS[name]
        rows = np.array([value(answer) for answer in answers])
        outputs.append({"name": name, "datatype": kind, "shape": list(rows.shape), "data": rows.ravel().tolist()})
    made: dict[str, Any] = {"model_name": service.name, "model_version": "1", "outputs": outputs}
    return made if number is None else made | {"id": number}
