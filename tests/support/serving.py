"""A service on a socket of its own, in a thread, for the tests of serve and demo."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import uvicorn
from PIL import Image

from adaptivit.serve import Service, make_app
from adaptivit.serve.command import _settings


@dataclass
class Running:
    service: Service
    address: str
    server: uvicorn.Server
    thread: threading.Thread
    port: int

    def client(self) -> httpx.Client:
        """One that waits for an answer as long as a busy machine may take."""
        return httpx.Client(base_url=self.address, timeout=60)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(service: Service, **given: Any) -> Iterator[Running]:
    """The service over real HTTP."""
    place = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(_settings(make_app(service, **given), service))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
    thread.start()
    port = place.getsockname()[1]
    found = Running(service, f"http://127.0.0.1:{port}", server, thread, port)
    try:
        yield found
    finally:
        found.stop()


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for a condition, however busy the machine is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never"
        time.sleep(0.005)


def photo(seed: int = 0, size: tuple[int, int] = (32, 32), kind: str = "PNG") -> bytes:
    """An encoded picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def files(*pictures: bytes) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("images", (f"{i}.png", data, "image/png")) for i, data in enumerate(pictures)]


def error(answer: httpx.Response, status: int) -> str:
    """The one line of a refusal, which says nothing of paths or code."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    reply = answer.json()
    assert list(reply) == ["error"]
    line: str = reply["error"]
    assert "\n" not in line
    assert not any(word in line for word in ("Traceback", "/work", "site-packages", ".py", "adaptivit/"))
    return line
