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
    "from_pretrained": "hub",
    "features": "dense",
    "export": "exporting",
    "AdaptiveViT": "model",
    "Output": "output",
    "Trace": "decision",
    "Keep": "decision",
    "Drop": "decision",
    "Skip": "decision",
    "Merge": "decision",
    "Policy": "policies.base",
    "save_trace": "trace_file",
    "load_trace": "trace_file",
    "UserError": "errors",
}

__all__ = [
    "AdaptiveViT",
    "Drop",
    "Keep",
    "Merge",
    "Output",
    "Policy",
    "Skip",
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
    "save_trace",
]

if TYPE_CHECKING:
    from .checkpoint.hub import from_pretrained
    from .checkpoint.traces import load_trace, save_trace
    from .create import create, load
    from .decision import Drop, Keep, Merge, Skip, Trace
    from .errors import UserError
    from .evaluation.dense_features import features
    from .execution.export import export
    from .model import AdaptiveViT
    from .output import Output
    from .policies import register as register_policy
    from .policies.base import Policy


def __getattr__(name: str) -> Any:
    if name in ("objectives", "recipes", "settings", "testing", "visualize"):
        return importlib.import_module(f".{name}", __name__)
    if name == "register_policy":
        return importlib.import_module(".policies", __name__).register
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module 'adaptivit' has no attribute {name!r}")
