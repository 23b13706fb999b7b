"""Checks of every request before its route, headers of every answer, and their counts."""

from __future__ import annotations

import hmac
import time
from collections.abc import Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Refused, busy, require, response
from .metrics import Metrics
from .turns import Room

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_OPEN = ("/healthz", "/v2/health/live", "/v2/health/ready")  # probes carry no token
_PAGE = ("/", "/style.css", "/script.js", "/icon.svg")  # nor does a browser that opens a page
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    b"content-security-policy": _POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"permissions-policy": b"camera=(), microphone=(), geolocation=()",
    b"cache-control": b"no-store",
}


class Guard:
    """ASGI middleware: host names, bearer token, requests at once, headers and counts.

    hosts: names that the Host header may have; empty for any. On a loopback address they prevent DNS rebinding.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, most: int, token: str | None = None, hosts: Collection[str] = ()
    ) -> None:
        self.app, self.metrics, self.room, self.hosts = app, metrics, Room(most), frozenset(h.lower() for h in hosts)
        self.token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.monotonic(), 0

        async def out(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name.lower(): value for name, value in message["headers"]}
                more = [(name, value) for name, value in _HEADERS.items() if name not in given]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        client = (scope.get("client") or ("",))[0]
        self.metrics.add("requests_in_progress", 1)
        try:
            self._check(scope, client)
            with self.room.held(client, 1):
                await self.app(scope, receive, out)
        except Exception as error:
            if not status:
                await (await response(Request(scope), error))(scope, receive, out)
        finally:
            self.metrics.add("requests_in_progress", -1)
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.add("requests_total", route=route, code=status)
            self.metrics.observe("request_seconds", time.monotonic() - begun, route=route)

    def _check(self, scope: Scope, client: str) -> None:
        headers, path = {k.lower(): v for k, v in scope["headers"]}, scope["path"]
        if b"content-length" in headers and b"transfer-encoding" in headers:  # where one request ends, proxies differ
            raise Refused(400, "Expected Content-Length or Transfer-Encoding, got both.", {"Connection": "close"})
        known = not self.hosts or _host(headers.get(b"host", b"")) in self.hosts
        require(known, "This service is not called by that name; see --hosts.", 421)
        if path in _OPEN:
            return
        if self.token is not None and path not in _PAGE:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            if not hmac.compare_digest(given.strip(), self.token) or kind.lower() != b"bearer":
                line = "Expected 'Authorization: Bearer TOKEN' with this service's token."
                raise Refused(401, line, {"WWW-Authenticate": "Bearer"})
        if not self.room.fits(client, 1):
            most, one = self.room.most, self.room.one
            raise busy(f"Too many requests at once; at most {most} are under way, {one} of one client.")


def _host(header: bytes) -> str:
    """The name in a Host header, without its port."""
    text = header.decode("latin-1").strip().lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
