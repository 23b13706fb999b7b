"""Errors of the service, each answered with a status and one line of JSON."""

from __future__ import annotations

import logging
import uuid

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from .batcher import QueueFull

log = logging.getLogger("adaptivit.serve")
_LINES = {404: "There is nothing here.", 405: "This method is not allowed here."}


class Refused(Exception):
    """A request that is not carried out; its line names neither paths nor code."""

    def __init__(self, status: int, line: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(line)
        self.status, self.line, self.headers = status, line, headers or {}


def busy(line: str) -> Refused:
    return Refused(429, line, {"Retry-After": "1"})


def require(ok: bool, line: str, status: int = 422) -> None:
    if not ok:
        raise Refused(status, line)


def shown(value: object) -> str:
    """A value from a request, short enough for a line."""
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else kind(value)
    return text if len(text) <= 40 else text[:37] + "..."


def kind(value: object) -> str:
    """The JSON type of a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


async def response(_: Request, error: Exception) -> JSONResponse:
    """The answer to an error. A fault of the service gets a number that finds its log entry."""
    if isinstance(error, HTTPException):  # starlette's own
        line = _LINES.get(error.status_code, "Refused.")
        error = Refused(error.status_code, line, dict(error.headers or {}))
    elif isinstance(error, QueueFull):
        error = busy(str(error))
    elif isinstance(error, RequestValidationError):
        error = Refused(422, "A part of the address is not what was expected.")
    elif not isinstance(error, Refused):
        number = uuid.uuid4().hex[:12]
        log.error("incident %s", number, exc_info=error)
        error = Refused(500, f"Something went wrong here; the service's log has it as incident {number}.")
    return JSONResponse({"error": error.line}, error.status, error.headers)
