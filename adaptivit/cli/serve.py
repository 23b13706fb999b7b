"""Answer HTTP requests with a checkpoint, batch by batch of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from ..errors import UserError
from ..serve.config import Limits
from ..utils.coerce import at_least, require
from .command import Command, ModelConfig, names_of, say_random


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
    """Directory of a run of `train`, or saved by save_pretrained; or leave it out and name a --backbone with a
    --policy."""
    name: str = "adaptivit"
    """The model's name in /v2/models/NAME."""
    hosts: tuple[str, ...] = ()
    """On a loopback address: further names that the Host header may have (a proxy's)."""
    token_file: str | None = None
    """File with a bearer token that requests must carry; or set ADAPTIVIT_TOKEN. Default: none is asked for."""
    random_weights: bool = False
    """Serve though the weights are random, for a test."""
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

    def verify(self) -> None:
        super().verify()
        if not self.random_weights:
            say_random(self.backbone, self.checkpoint or self.weights, refused=True)


def run(config: ServeConfig) -> None:
    from ..utils.hardware import device_of

    serve = service_of()
    token = serve.read_token(config.token_file)
    with serve.loading(config.host, config.port):
        model = config.build()
    service = serve.Service(
        model.to(device_of(config.device)),
        limits=config.limits,
        name=config.name,
        class_names=names_of(config.class_names, model),
        batch_tokens=config.batch_tokens,
        batch_images=config.batch_images,
        wait=config.wait_ms / 1e3,
    )
    serve.run(service, config.host, config.port, token=token, hosts=config.hosts, page=config.page)


def service_of() -> Any:
    """adaptivit.serve.run, which needs the extra `serve`."""
    try:
        from ..serve import command
    except ModuleNotFoundError as error:
        needed = ("fastapi", "uvicorn", "starlette", "pydantic", "python_multipart")
        if (error.name or "").partition(".")[0] not in needed:
            raise
        raise UserError("Serving needs FastAPI and uvicorn: pip install 'adaptivit[serve]'.") from None
    return command


COMMAND = Command(ServeConfig, run, policies=True)
