"""adaptivit: Vision Transformers that spend work where the image needs it.

    model = adaptivit.create("deit_tiny_patch16_224", policy="aht", weights="deit_tiny.safetensors")
    out = model(images)      # out.logits, out.trace.depth, out.macs

Names are imported on first use, so that `adaptivit --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

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
    "losses",
    "recipes",
    "register_policy",
    "register_task",
    "save_trace",
    "settings",
    "testing",
    "visualize",
]

if TYPE_CHECKING:  # the same names for type checkers; tests/test_public_names.py compares them
    from . import testing, visualize
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
    from .policies import spec as settings
    from .policies.base import Policy
    from .tasks import register as register_task
    from .tasks.protocol import Task
    from .training import losses, recipes

_MODULES = {"losses": "training.losses", "recipes": "training.recipes", "settings": "policies.spec"}
_MODULES |= {"testing": "testing", "visualize": "visualize"}
_HOME = {  # name: module, or module:name there
    **dict.fromkeys(("create", "load"), "factory"),
    **dict.fromkeys(("Trace", "Keep", "Drop", "Skip", "Merge"), "decision"),
    **dict.fromkeys(("save_trace", "load_trace"), "checkpoint.traces"),
    "from_pretrained": "checkpoint.hub",
    "features": "evaluation.dense_features",
    "export": "checkpoint.export",
    "AdaptiveViT": "model",
    "Output": "output",
    "Policy": "policies.base",
    "Task": "tasks.protocol",
    "UserError": "errors",
    "register_policy": "policies:register",
    "register_task": "tasks:register",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    if name in _HOME:
        module, _, attribute = _HOME[name].partition(":")
        return getattr(importlib.import_module(f".{module}", __name__), attribute or name)
    raise AttributeError(f"module 'adaptivit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
