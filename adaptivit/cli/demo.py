"""A page that shows which tokens leave where, with a small model of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from .command import Command, loaded, names_of
from .serve import Listening, service_of


@dataclass(frozen=True)
class DemoConfig(Listening):
    """A page that shows which tokens leave where: drop an image, move the budget.

    Example: adaptivit demo
    """

    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT]")] = None
    """Directory of a run of `train`, or saved by save_pretrained; default: a small model of handwritten digits that
    comes with the package."""
    open: bool = False
    """Also open the page in a browser."""


def run(config: DemoConfig) -> None:
    from ..utils.hardware import device_of

    serve = service_of()
    with serve.loading(config.host, config.port):
        model = serve.demo_model() if config.checkpoint is None else loaded(config.checkpoint)
    service = serve.Service(model.to(device_of(config.device)), class_names=names_of(config.class_names, model))
    serve.run(service, config.host, config.port, token=serve.read_token(None), opened=config.open)


COMMAND = Command(DemoConfig, run)
