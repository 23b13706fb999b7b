"""uvicorn's connection with a time-out for each wait, and answers for clients that have finished sending.

uvicorn itself waits without end for the head of a first request, for one that comes byte by byte, and for a client to
read its answer. Service.deadline limits the wait for a body. uvicorn also drops requests whose sender has closed its
side, and logs a line for each that is no HTTP; here the first are answered and the second counted.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .config import Limits, share
from .metrics import Metrics

_log = logging.getLogger("adaptivit.serve.connection")
_log.setLevel(logging.ERROR)  # its warnings are those of single requests


class Connection(H11Protocol):
    limits = Limits()
    metrics = Metrics()

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.logger = _log
        self._half_closed = False
        # "request": until one has arrived, or its answer is read; "write": until there is room to write
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        clients = [(getattr(other, "client", None) or ("",))[0] for other in self.connections]
        own = clients.count((self.client or ("",))[0])
        if len(self.connections) > self.limits.max_connections or own > share(self.limits.max_connections):
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

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answers to requests that have arrived as a whole."""
        self._half_closed = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        return self._half_closed

    def send_400_response(self, msg: str) -> None:
        self.metrics.add("requests_total", route="malformed", code=400)
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        self._start("request")  # for the answer to be read, and for the next request
        super().on_response_complete()
        self._stop_if_under_way()  # the next one was already here
        if self._half_closed and (self.cycle.response_complete or self.cycle.more_body):
            self.transport.close()

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


def limited(limits: Limits, metrics: Metrics) -> type[Connection]:
    """The protocol for uvicorn.Config."""
    return type("Connection", (Connection,), {"limits": limits, "metrics": metrics})
