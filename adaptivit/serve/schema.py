"""What OpenAPI says of requests and answers. Requests are read by hand (limits.py), so that their limits hold."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Class(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    number: int = Field(alias="class", description="Number of the class")
    name: str
    probability: float


class Image(BaseModel):
    classes: list[Class] = Field(description="The top_k classes, the most probable first")
    gmacs: float = Field(description="Billions of multiply-accumulates that this image took")
    static_gmacs: float = Field(description="What it would have taken in the static model")
    saved: float = Field(description="1 - gmacs / static_gmacs")
    mean_depth: float = Field(description="Blocks that computed a patch, mean over the patches")
    live: list[int] = Field(description="Tokens that entered each block")


class Classified(BaseModel):
    model: str
    images: list[Image] = Field(description="In the order of the request")


class Error(BaseModel):
    error: str = Field(description="One line: what was expected, what came")


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "Not JSON, or not a form"},
    401: {"model": Error, "description": "The token is missing or wrong"},
    408: {"model": Error, "description": "The request took too long to arrive"},
    413: {"model": Error, "description": "Too many bytes, pixels or images"},
    415: {"model": Error, "description": "Another content type"},
    422: {"model": Error, "description": "Not an image, or a field that cannot be met"},
    429: {"model": Error, "description": "Busy; Retry-After says when to try again"},
    503: {"model": Error, "description": "No answer within the time-out"},
}

_BUDGET = {"type": "string", "example": "-33%", "description": "What an image may cost: '-33%', '0.8 GMACs', '3 ms'"}
_TOP = {"type": "integer", "minimum": 1, "default": 3}

CLASSIFY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {
                        "images": {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1},
                        "top_k": _TOP,
                        "budget": _BUDGET,
                    },
                }
            },
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {
                        "images": {"type": "array", "items": {"type": "string", "format": "byte"}, "minItems": 1},
                        "top_k": _TOP,
                        "budget": {
                            "oneOf": [_BUDGET, {"type": "array", "items": {"type": "string", "nullable": True}}]
                        },
                    },
                }
            },
        },
    }
}

_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype", "data"],
    "properties": {
        "name": {"type": "string", "enum": ["images"]},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"type": "string", "enum": ["FP32", "BYTES"]},
        "data": {"type": "array", "items": {}},
    },
}
INFER: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["inputs"],
                    "properties": {
                        "id": {"type": "string"},
                        "inputs": {"type": "array", "items": _TENSOR, "minItems": 1, "maxItems": 1},
                        "parameters": {"type": "object", "properties": {"budget": _BUDGET}},
                    },
                }
            }
        },
    }
}
