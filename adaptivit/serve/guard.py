"""What holds for every request before a route sees it, and for every answer after: who may ask, how many at once,
which headers."""

from __future__ import annotations

import hmac
import json
import logging
import time
import uuid
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .limits import Refused, busy
from .metrics import Metrics

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_OPEN = ("/healthz", "/v2/health/live", "/v2/health/ready")  # probes carry no token
_PAGE = ("/", "/style.css", "/script.js", "/icon.svg")  # nor does a browser that opens a page
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
log = logging.getLogger("adaptivit.serve")


class Guard:
    """ASGI middleware. `hosts` are the names that a request may call this service by; empty for any: on a loopback
    address it keeps out pages of other sites that have their name point there (DNS rebinding)."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, most: int, token: str | None = None, hosts: Collection[str] = ()
    ) -> None:
        self.app, self.metrics, self.most, self.hosts = app, metrics, most, frozenset(h.lower() for h in hosts)
        self.token = None if token is None else token.encode()
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.monotonic(), 0

        async def out(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                known = {name.lower() for name, _ in message["headers"]}
                more = [(k.lower().encode(), v.encode()) for k, v in _HEADERS.items()]
                message["headers"] = [*message["headers"], *(h for h in more if h[0] not in known)]
            await send(message)

        self.under_way += 1
        self.metrics.add("requests_in_progress", 1)
        try:
            await self._handle(scope, receive, out)
        except Refused as refused:
            await answer(out, refused.status, refused.line, refused.headers)
        except Exception as error:
            if not status:
                await answer(out, 500, incident(error), {})
        finally:
            self.under_way -= 1
            self.metrics.add("requests_in_progress", -1)
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.add("requests_total", route=route, code=status)
            self.metrics.observe("request_seconds", time.monotonic() - begun, route=route)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {k.lower(): v for k, v in scope["headers"]}
        if self.hosts and _host(headers.get(b"host", b"")) not in self.hosts:
            raise Refused(421, "This service is not called by that name; see --hosts.")
        path = scope["path"]
        if path not in _OPEN:
            if self.token is not None and path not in _PAGE and not self._known(headers.get(b"authorization", b"")):
                line = "Expected 'Authorization: Bearer TOKEN' with this service's token."
                raise Refused(401, line, {"WWW-Authenticate": "Bearer"})
            if self.under_way > self.most:
                raise busy(f"Too many requests at once; at most {self.most} are under way.")
        await self.app(scope, receive, send)

    def _known(self, header: bytes) -> bool:
        kind, _, given = header.partition(b" ")
        assert self.token is not None
        return hmac.compare_digest(given.strip(), self.token) and kind.lower() == b"bearer"


def incident(error: Exception) -> str:
    """A fault of ours: the log gets all of it, the answer a number to find it by."""
    number = uuid.uuid4().hex[:12]
    log.error("incident %s", number, exc_info=error)
    return f"Something went wrong here; the service's log has it as incident {number}."


def _host(header: bytes) -> str:
    """The name in a Host header, without its port."""
    text = header.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


async def answer(send: Any, status: int, line: str, headers: dict[str, str]) -> None:
    """One line of JSON."""
    body = json.dumps({"error": line}).encode() + b"\n"
    more = {"content-type": "application/json", "content-length": str(len(body))} | headers
    start = [(k.lower().encode(), v.encode()) for k, v in more.items()]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})
