"""Requests and answers in OpenAPI. Requests are parsed by hand (limits.py), so that their limits hold."""

from __future__ import annotations

from typing import Any

from ..evaluation.record import schema
from ..tasks.protocol import Task


def _array(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


def _content(**schemas: dict[str, Any]) -> dict[str, Any]:
    kinds = {"form": "multipart/form-data", "json": "application/json"}
    return {"content": {kinds[name]: {"schema": schema} for name, schema in schemas.items()}}


def _body(**schemas: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, **_content(**schemas)}}


_STRING = {"type": "string"}
_BUDGET = _STRING | {"example": "-33%", "description": "What an image may cost: '-33%', '0.8 GMACs', '3 ms'"}
_BUDGETS = {"oneOf": [_BUDGET, _array(_STRING | {"nullable": True})]}
_TOP = {"type": "integer", "minimum": 1, "default": 3}
_TENSOR = _object(
    *("name", "shape", "datatype", "data"),
    name=_STRING | {"enum": ["images"]},
    shape=_array({"type": "integer"}),
    datatype=_STRING | {"enum": ["FP32", "BYTES"]},
    data=_array({}),
)

IMAGES = _body(
    form=_object("images", images=_array(_STRING | {"format": "binary"}, minItems=1), top_k=_TOP, budget=_BUDGET),
    json=_object("images", images=_array(_STRING | {"format": "byte"}, minItems=1), top_k=_TOP, budget=_BUDGETS),
)
INFER = _body(
    json=_object(
        "inputs",
        id=_STRING,
        inputs=_array(_TENSOR, minItems=1, maxItems=1),
        parameters={"type": "object", "properties": {"budget": _BUDGET}},
    )
)

_ERROR = _object("error", error=_STRING | {"description": "One line: what was expected, what came"})
_MEANING = {
    400: "Not JSON, not a form, or two lengths of one body",
    401: "The token is missing or wrong",
    404: "There is no such thing",
    408: "The request took too long to arrive",
    413: "Too many bytes, pixels or images",
    415: "Another content type",
    421: "Another name in the Host header than the service is called by",
    422: "Not an image, or a field that cannot be met",
    429: "Busy; Retry-After says when to try again",
    500: "A fault of the service; the number finds its log entry",
    503: "No answer within the time-out, or the model's thread has ended",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses with these statuses."""
    return {status: {"description": _MEANING[status], **_content(json=_ERROR)} for status in statuses}


ANYWHERE = errors(400, 401, 421, 429, 500)
ERRORS = errors(404, 408, 413, 415, 422, 503)  # of routes that take a body


def answers(task: Task) -> dict[int | str, dict[str, Any]]:
    """The responses of the route that answers images: the task's answer and the costs of each."""
    return ERRORS | {200: {"description": f"The {task.noun} and the cost of each image", **_content(json=schema(task))}}
