"""The JSON of an image's answer and its cost: what `predict` writes and the service returns."""

from __future__ import annotations

from typing import Any

from ..tasks.protocol import Task

_COSTS: dict[str, dict[str, Any]] = {
    "gmacs": {"type": "number", "description": "Billions of multiply-accumulates of this image"},
    "static_gmacs": {"type": "number", "description": "The same in the static model"},
    "saved": {"type": "number", "description": "1 - gmacs / static_gmacs"},
    "mean_depth": {"type": "number", "description": "Blocks that computed a patch, mean over the patches"},
    "live": {"type": "array", "items": {"type": "integer"}, "description": "Tokens that entered each block"},
}


def record(
    answer: dict[str, Any], gmacs: float, static_gmacs: float, mean_depth: float, live: list[int]
) -> dict[str, Any]:
    """One image; answer: as Task.answer gives it."""
    costs = {"gmacs": gmacs, "static_gmacs": static_gmacs, "saved": 1 - gmacs / static_gmacs}
    return {**answer, **costs, "mean_depth": mean_depth, "live": live}


def document(model: str, images: list[dict[str, Any]]) -> dict[str, Any]:
    """Several images."""
    return {"model": model, "images": images}


def schema(task: Task) -> dict[str, Any]:
    """JSON Schema of a document."""
    image = dict(task.schema) | _COSTS
    one = {"type": "object", "required": list(image), "properties": image}
    images = {"type": "array", "items": one, "description": "In the order of the request"}
    properties = {"model": {"type": "string"}, "images": images}
    return {"type": "object", "required": list(properties), "properties": properties}
