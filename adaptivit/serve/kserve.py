"""The Open Inference Protocol (KServe's V2), REST side.

Shapes: B images, C x H x W, L blocks.

Input `images`: FP32 [B, C, H, W], normalised as the model wants it; or BYTES [B], encoded images as base64. Outputs:
`logits` FP32 [B, classes], `macs` FP64 [B], `live` INT64 [B, L]. `parameters` may have a `budget`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from . import limits as checks
from .batcher import Answer
from .limits import Refused
from .service import Service

_OUTPUTS = {"logits": "FP32", "macs": "FP64", "live": "INT64"}


def server() -> dict[str, Any]:
    return {"name": "adaptivit", "version": __version__, "extensions": []}


def metadata(service: Service) -> dict[str, Any]:
    model, (high, wide) = service.model, service.model.preprocessing.size
    sizes = {"logits": model.vit.num_classes, "live": model.shape.layers}
    return {
        "name": service.name,
        "versions": ["1"],
        "platform": "adaptivit",
        "inputs": [{"name": "images", "datatype": "FP32", "shape": [-1, model.vit.in_chans, high, wide]}],
        "outputs": [
            {"name": name, "datatype": kind, "shape": [-1, sizes[name]] if name in sizes else [-1]}
            for name, kind in _OUTPUTS.items()
        ],
    }


def read(service: Service, data: bytes) -> tuple[list[Tensor], Any, list[str], str | None]:
    """(images, budget, names of the outputs wanted, id) of an inference request."""
    given = checks.read_json(data)
    inputs = given.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise Refused(422, "inputs: expected a list with the one tensor 'images'.")
    number = given.get("id")
    if number is not None and not (isinstance(number, str) and len(number) <= 128 and number.isprintable()):
        raise Refused(422, "id: expected a printable string of at most 128 characters.")
    parameters = given.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise Refused(422, "parameters: expected an object.")
    return _images(service, inputs[0]), parameters.get("budget"), _wanted(given.get("outputs")), number


def _wanted(given: object) -> list[str]:
    if given is None or given == []:
        return list(_OUTPUTS)
    names = [one.get("name") if isinstance(one, dict) else None for one in given] if isinstance(given, list) else [None]
    for name in names:
        if not isinstance(name, str) or name not in _OUTPUTS:
            raise Refused(422, f"outputs: expected objects named {', '.join(_OUTPUTS)}, got {checks.shown(name)}.")
    return [str(name) for name in names]


def _images(service: Service, tensor: dict[str, Any]) -> list[Tensor]:
    name, shape, kind, data = (tensor.get(key) for key in ("name", "shape", "datatype", "data"))
    if name != "images":
        raise Refused(422, f"inputs: expected the name 'images', got {checks.shown(name)}.")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 1 for n in shape) or not shape:
        raise Refused(422, "images: expected a shape of whole numbers >= 1.")
    if shape[0] > service.limits.max_images:
        raise Refused(413, f"Too many images: at most {service.limits.max_images} a request are taken.")
    if not isinstance(data, list):
        raise Refused(422, "images: expected 'data' to be a list (the binary extension is not supported).")
    if kind == "BYTES":
        if len(shape) != 1 or len(data) != shape[0]:
            raise Refused(422, f"images: expected BYTES of shape [B] with B strings, got {len(data)}.")
        return service.tensors([checks.decoded(text, f"image {i}") for i, text in enumerate(data, 1)])
    if kind != "FP32":
        raise Refused(422, f"images: expected the datatype FP32 or BYTES, got {checks.shown(kind)}.")
    wanted = [service.model.vit.in_chans, *service.model.preprocessing.size]
    if shape[1:] != wanted:
        raise Refused(422, f"images: expected the shape [B, {', '.join(map(str, wanted))}].")
    return list(torch.from_numpy(_numbers(data, shape)))


def _numbers(data: list[Any], shape: list[int]) -> Any:
    try:
        array = np.asarray(data)
    except ValueError:  # lists of different lengths
        array = np.empty(0)
    if (
        array.dtype.kind not in "iuf"
        or array.size != np.prod(shape)
        or array.shape not in ((array.size,), tuple(shape))
    ):
        raise Refused(422, f"images: expected {int(np.prod(shape))} numbers, flat or nested as the shape says.")
    with np.errstate(over="ignore"):
        made = array.astype(np.float32).reshape(shape)
    if not np.isfinite(made).all():
        raise Refused(422, "images: expected finite numbers of 32 bits.")
    return made


def answered(service: Service, answers: list[Answer], wanted: list[str], number: str | None) -> dict[str, Any]:
    rows: dict[str, list[Any]] = {
        "logits": [a.logits.tolist() for a in answers],
        "macs": [a.macs for a in answers],
        "live": [a.live for a in answers],
    }
    outputs = []
    for name in wanted:
        nested = isinstance(rows[name][0], list)
        shape = [len(answers), len(rows[name][0])] if nested else [len(answers)]
        flat = [x for row in rows[name] for x in row] if nested else rows[name]
        outputs.append({"name": name, "datatype": _OUTPUTS[name], "shape": shape, "data": flat})
    made: dict[str, Any] = {"model_name": service.name, "model_version": "1", "outputs": outputs}
    return made if number is None else made | {"id": number}
