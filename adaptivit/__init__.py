"""adaptivit: Vision Transformers that spend work where the image needs it.

    model = adaptivit.create("deit_tiny_patch16_224", policy="aht", weights="deit_tiny.safetensors")
    out = model(images)      # out.logits, out.trace.depth, out.macs

Names are imported on first use, so that `adaptivit --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "create": "factory",
    "load": "factory",
    "from_pretrained": "checkpoint.hub",
    "features": "evaluation.dense_features",
    "export": "checkpoint.export",
    "AdaptiveViT": "model",
    "Output": "output",
    "Trace": "decision",
    "Keep": "decision",
    "Drop": "decision",
    "Skip": "decision",
    "Merge": "decision",
    "Policy": "policies.base",
    "Task": "tasks.protocol",
    "save_trace": "checkpoint.traces",
    "load_trace": "checkpoint.traces",
    "UserError": "errors",
}

_MODULES = {
    "losses": "training.losses",
    "recipes": "training.recipes",
    "settings": "policies.spec",
    "testing": "testing",
    "visualize": "visualize",
}

__all__ = [
    "AdaptiveViT",
    "Drop",
    "Keep",
    "Merge",
    "Output",
    "Policy",
    "Skip",
    "Task",
    "Trace",
    "UserError",
    "__version__",
    "create",
    "export",
    "features",
    "from_pretrained",
    "load",
    "load_trace",
    "register_policy",
    "register_task",
    "save_trace",
]

if TYPE_CHECKING:
    from .checkpoint.export import export
    from .checkpoint.hub import from_pretrained
    from .checkpoint.traces import load_trace, save_trace
    from .decision import Drop, Keep, Merge, Skip, Trace
    from .errors import UserError
    from .evaluation.dense_features import features
    from .factory import create, load
    from .model import AdaptiveViT
    from .output import Output
    from .policies import register as register_policy
    from .policies.base import Policy
    from .tasks import register as register_task
    from .tasks.protocol import Task


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    if name in ("register_policy", "register_task"):
        return importlib.import_module(".policies" if name == "register_policy" else ".tasks", __name__).register
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module 'adaptivit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
