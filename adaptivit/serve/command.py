"""The service on a socket, until a signal stops it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import warnings
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image
from rich.console import Console

from ..errors import UserError
from ..factory import load
from ..model import AdaptiveViT
from .app import make_app
from .config import TOKEN
from .connection import limited
from .guard import LOOPBACK
from .service import Service


def demo_model() -> AdaptiveViT:
    """The small model of handwritten digits that comes with the package (docs/guide/quickstart.md)."""
    return load(Path(__file__).parent / "model").float()  # stored in half precision


def run(
    service: Service,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    token: str | None = None,
    hosts: tuple[str, ...] = (),
    page: bool = True,
    opened: bool = False,
) -> None:
    """Answer requests until SIGINT or SIGTERM, then finish those that were accepted."""
    try:
        place = _listen(host, port)
    except BaseException:
        service.close()
        raise
    local = host in LOOPBACK
    Image.MAX_IMAGE_PIXELS = service.limits.pixels  # PIL's own check, as well
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the service refuses those
    app = make_app(service, token=token, hosts=(*LOOPBACK, *hosts) if local else (), with_page=page)
    server = uvicorn.Server(_settings(app, service))
    address = f"http://{f'[{host}]' if ':' in host else host}:{place.getsockname()[1]}/"
    print(f"{service.name}: {service.model.policy_name} on {service.batcher.device}, answers at {address}", flush=True)
    if not local and token is None:
        print(f"note: others on the network can reach this service; set {TOKEN} to ask for a token", file=sys.stderr)
    if opened:
        webbrowser.open(address)
    stopped: list[int] = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn hands them back to these when it has finished
            signal.signal(number, lambda number, _: stopped.append(number))
    server.run(sockets=[place])
    print(f"stopped after {service.metrics.get('images_total'):.0f} images")


def _settings(app: Any, service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited(service.limits, service.metrics),
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=int(service.limits.timeout) + 5,
    )


@contextlib.contextmanager
def loading(host: str, port: int) -> Iterator[None]:
    """A status line. A taken port is an error before the model is read, which takes a while."""
    _listen(host, port).close()
    with Console(stderr=True).status("loading the model"):
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        hint = " Choose another --port, or 0 for any free one." if error.errno == errno.EADDRINUSE else ""
        raise UserError(f"Cannot listen on {host}, port {port}: {why}.{hint}") from None


def read_token(path: str | None) -> str | None:
    """The bearer token of a file or of the environment, since others can see a command line."""
    where = TOKEN if path is None else path
    try:
        text = os.environ.get(TOKEN) if path is None else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the token in {path} ({error}).") from None
    if text is None:
        return None
    token = text.strip()
    if not token or not token.isascii() or any(c.isspace() for c in token):
        raise UserError(f"{where}: expected a token of ASCII characters without spaces.")
    return token
