"""A connection that cannot be held for nothing: uvicorn's, with a time-out for whatever it is waiting for.

uvicorn itself waits without end for the head of a first request, for one that comes byte by byte, and for a client to
read its answer. A body that does not come is the routes' affair (Service.within).
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
        self._late: asyncio.TimerHandle | None = None  # for a request, or for its answer to be read
        self._full: asyncio.TimerHandle | None = None  # for room to write

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._written()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()  # a request is under way

    def on_response_complete(self) -> None:
        self._stop()
        self._wait()  # for the answer to be read, and for the next request
        super().on_response_complete()
        if not self.cycle.response_complete:
            self._stop()  # that was here already

    def pause_writing(self) -> None:
        super().pause_writing()
        self._full = self.loop.call_later(self.limits.timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._written()
        super().resume_writing()

    def _written(self) -> None:
        if self._full is not None:
            self._full.cancel()
            self._full = None

    def _wait(self) -> None:
        self._late = self.loop.call_later(self.limits.timeout, self.transport.abort)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def limited(limits: Limits) -> type[Connection]:
    """The protocol for uvicorn.Config."""
    return type("Connection", (Connection,), {"limits": limits})
