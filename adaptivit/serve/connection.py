"""uvicorn's connection with a time-out for each wait.

uvicorn itself waits without end for the head of a first request, for one that comes byte by byte, and for a client to
read its answer. Service.deadline limits the wait for a body.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .config import Limits


class Connection(H11Protocol):
    limits = Limits()

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # "request": until one has arrived, or its answer is read; "write": until there is room to write
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
        else:
            self._start("request")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("request")
        self._stop("write")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._stop_if_under_way()

    def on_response_complete(self) -> None:
        self._start("request")  # for the answer to be read, and for the next request
        super().on_response_complete()
        self._stop_if_under_way()  # the next one was already here

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("write")

    def resume_writing(self) -> None:
        self._stop("write")
        super().resume_writing()

    def _stop_if_under_way(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop("request")

    def _start(self, name: str) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(self.limits.timeout, self.transport.abort)

    def _stop(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()


def limited(limits: Limits) -> type[Connection]:
    """The protocol for uvicorn.Config."""
    return type("Connection", (Connection,), {"limits": limits})
