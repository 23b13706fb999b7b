"""The settings of `adaptivit serve` and `adaptivit demo`. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ..evaluation.model_config import ModelConfig
from ..utils.coerce import at_least, positive, require

TOKEN = "ADAPTIVIT_TOKEN"  # the environment variable that may hold the bearer token


@dataclass(frozen=True)
class Limits:
    """Limits on requests. What exceeds one is refused with one line."""

    max_upload: float = 16.0
    """Megabytes of a request's body, however it is sent."""
    max_pixels: float = 32.0
    """Megapixels of an image, read from its header before anything is decoded."""
    max_images: int = 32
    """Images a request."""
    max_queue: int = 256
    """Images that wait for the model; with more, requests are answered with 429 and Retry-After."""
    max_requests: int = 64
    """Requests under way at once; with more, 429."""
    max_connections: int = 512
    """Connections open at once; more are closed."""
    timeout: float = 30.0
    """Seconds for a request, its upload included; for its head to arrive, and for its answer to be fetched."""

    def __post_init__(self) -> None:
        for name in ("max_upload", "max_pixels", "timeout"):
            positive(name, getattr(self, name))
        for name in ("max_images", "max_queue", "max_requests", "max_connections"):
            at_least(name, getattr(self, name), 1)
        room = f"room for at least one request of {self.max_images} images (--max-images)"
        require(self.max_queue >= self.max_images, "max_queue", room, self.max_queue)

    @property
    def bytes(self) -> int:
        return int(self.max_upload * 1e6)

    @property
    def pixels(self) -> int:
        return int(self.max_pixels * 1e6)


@dataclass(frozen=True)
class Listening:
    """Where a service listens, and where its model runs."""

    class_names: str | None = None
    """Text file with one class name a line; default: the checkpoint's."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of this machine's, which others can reach."""
    port: int = 8000
    """Port to listen on; 0 for any free one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "port", "0..65535", self.port)


@dataclass(frozen=True)
class ServeConfig(ModelConfig, Listening):
    """Answer HTTP requests with a checkpoint: classes, probabilities and what each image cost.

    Example: adaptivit serve runs/aht/model --budget -33%
    """

    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT]")] = None
    """Directory saved by `train` or save_pretrained; or leave it out and name a --backbone with a --policy."""
    name: str = "adaptivit"
    """The model's name in /v2/models/NAME."""
    hosts: tuple[str, ...] = ()
    """On a loopback address: further names that the Host header may have (a proxy's)."""
    token_file: str | None = None
    """File with a bearer token that requests must carry; or set ADAPTIVIT_TOKEN. Default: none is asked for."""
    page: bool = True
    """Serve the demo page at /."""

    batch_tokens: int | None = None
    """Tokens (in the mean block) that a batch is filled with; default: those of 16 static images, on a GPU of 256."""
    batch_images: int | None = None
    """Images of a batch at most; default: four times as many as static ones would fill it."""
    wait_ms: float = 2.0
    """How long a batch that is not full waits for more."""
    limits: Annotated[Limits, tyro.conf.arg(name="")] = Limits()

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        Listening.__post_init__(self)
        for name in ("batch_tokens", "batch_images"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        at_least("wait_ms", self.wait_ms, 0)
        good = bool(self.name) and all(c.isalnum() or c in "._-" for c in self.name)
        require(good, "name", "letters, digits, '.', '_' and '-'", self.name)


@dataclass(frozen=True)
class DemoConfig(Listening):
    """A page that shows which tokens leave where: drop an image, move the budget.

    Example: adaptivit demo
    """

    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT]")] = None
    """Directory saved by `train` or save_pretrained; default: a small model of handwritten digits that comes with the
    package."""
    open: bool = False
    """Also open the page in a browser."""
