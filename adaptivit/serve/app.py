"""The HTTP service: routes over a Service, behind the Guard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from .. import __version__
from ..evaluation.record import document
from . import kserve, page
from .batcher import QueueFull
from .errors import Refused, require, response
from .guard import Guard
from .schema import ANYWHERE, IMAGES, answers, errors
from .service import Service


def make_app(
    service: Service, *, token: str | None = None, hosts: Collection[str] = (), with_page: bool = True
) -> ASGIApp:
    """The service as an ASGI application, which closes the service when it shuts down.

    token: for `Authorization: Bearer`. hosts: names that the Host header may have; empty for any.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="adaptivit",
        version=__version__,
        description="A Vision Transformer that spends work where the image needs it.",
        docs_url=None,  # those pages fetch scripts from elsewhere
        redoc_url=None,
        responses=ANYWHERE,
        lifespan=lifespan,
    )
    for kind in (Refused, QueueFull, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, response)
    _routes(app, service)
    kserve.routes(app, service)
    if with_page:
        page.routes(app, service)
    return Guard(app, service.metrics, service.limits.max_requests, token, hosts)


def _routes(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", summary="Whether the service can answer", responses=errors(503), tags=["health"])
    async def healthz() -> dict[str, Any]:
        require(service.batcher.alive, "The model's thread has ended.", 503)
        return {"status": "ok", "model": service.name}

    @app.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse, tags=["health"])
    async def metrics() -> PlainTextResponse:
        text = service.metrics.text(service.batcher.waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post(
        f"/v1/{service.task.verb}",
        summary="Answers to images, and what each one cost",
        responses=answers(service.task),
        openapi_extra=IMAGES,
        tags=[service.task.verb],
    )
    async def classify(request: Request) -> Response:
        async with service.deadline(request):
            asked = await service.asked(request)
            images = await service.tensors(request, asked.files)
            answers = await service.run(request, images, asked.budgets)
        found = [service.answered(a, asked.top_k) for a in answers]
        return JSONResponse(document(service.name, found))
