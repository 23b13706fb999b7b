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
from . import kserve, page
from .errors import Refused, response
from .guard import Guard
from .schema import CLASSIFY, ERRORS, INFER, Classified
from .service import Service


def make_app(
    service: Service, *, token: str | None = None, hosts: Collection[str] = (), with_page: bool = True
) -> ASGIApp:
    """The service as an ASGI application. It closes the service when it shuts down.

    token: what `Authorization: Bearer` must carry. hosts: names that requests may call it by; empty for any.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="adaptivit",
        version=__version__,
        description="Image classification by a Vision Transformer that spends work where the image needs it.",
        docs_url=None,  # those pages fetch scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    for kind in (Refused, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, response)
    _health(app, service)
    _classify(app, service)
    _kserve(app, service)
    if with_page:
        page.routes(app, service)
    return Guard(app, service.metrics, service.limits.max_requests, token, hosts)


def _health(app: FastAPI, service: Service) -> None:
    def ready() -> None:
        if not service.batcher.alive:
            raise Refused(503, "The model's thread has ended.")

    @app.get("/healthz", summary="Whether the service can answer", tags=["health"])
    async def healthz() -> dict[str, Any]:
        ready()
        return {"status": "ok", "model": service.name}

    @app.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse, tags=["health"])
    async def metrics() -> PlainTextResponse:
        text = service.metrics.text(service.batcher.waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v2/health/live", tags=["health"])
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.get("/v2/health/ready", tags=["health"])
    async def all_ready() -> dict[str, bool]:
        ready()
        return {"ready": True}


def _classify(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/classify",
        summary="Classes of images, and what each one cost",
        response_model=Classified,
        responses=ERRORS,
        openapi_extra=CLASSIFY,
        tags=["classify"],
    )
    async def classify(request: Request) -> Response:
        async def answer() -> Response:
            asked = await service.asked(request)
            images = await service.aside(service.tensors, asked.files)
            answers = await service.run(images, asked.budgets)
            found = [service.answered(a, asked.top_k) for a in answers]
            return JSONResponse({"model": service.name, "images": found})

        return await service.within(request, answer)


def _kserve(app: FastAPI, service: Service) -> None:
    def known(name: str) -> None:
        if name != service.name:
            raise Refused(404, f"Unknown model; this service has {service.name!r}.")

    @app.get("/v2", tags=["V2"])
    async def server() -> dict[str, Any]:
        return {"name": "adaptivit", "version": __version__, "extensions": []}

    @app.get("/v2/models/{name}", tags=["V2"])
    async def model(name: str) -> dict[str, Any]:
        known(name)
        return kserve.metadata(service)

    @app.get("/v2/models/{name}/ready", tags=["V2"])
    async def model_ready(name: str) -> dict[str, Any]:
        known(name)
        return {"name": name, "ready": service.batcher.alive}

    @app.post("/v2/models/{name}/infer", responses=ERRORS, openapi_extra=INFER, tags=["V2"])
    async def infer(name: str, request: Request) -> Response:
        known(name)

        async def answer() -> Response:
            kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise Refused(415, "Expected application/json (the binary extension is not supported).")
            data = await service.body(request)
            images, budget, wanted, number = await service.aside(kserve.read, service, data)
            answers = await service.run(images, service.budgets(budget, len(images)))
            return JSONResponse(kserve.answered(service, answers, wanted, number))

        return await service.within(request, answer)
