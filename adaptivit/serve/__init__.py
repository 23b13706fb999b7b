"""Answer HTTP requests with an adaptive model, and show it on a page.

    from adaptivit.serve import Service, make_app

    app = make_app(Service(adaptivit.load("runs/aht/model")))   # any ASGI server runs it

Needs the extra `serve`. Names are imported on first use: the command line reads `serve.config` without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import make_app
    from .batcher import Batcher, Job
    from .command import demo_model, run
    from .service import Service

_HOME = {"make_app": "app", "Batcher": "batcher", "Job": "batcher", "demo_model": "command", "run": "command"}
_HOME |= {"Service": "service"}

__all__ = ["Batcher", "Job", "Service", "demo_model", "make_app", "run"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
