"""Traces on disk: one .safetensors file with every decision of a forward pass, for replay elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..decision import AppliedDecision, Drop, Keep, Merge, Skip, Trace
from ..errors import UserError
from ..utils.atomic_io import write_bytes

_KINDS: dict[str, Any] = {"Keep": Keep, "Drop": Drop, "Skip": Skip, "Merge": Merge}
_FORMATS = ("adaptivit-trace-1", "adaptivit-trace-2", "adaptivit-trace-3")
# What fields of decisions were called before format 3. In format 1 a merge's `weight` is its size.
_OLD = {"share": "readout_weight", "weight": "key_weight", "own": "self_key_grad", "zeroed": "zero_on_exit"}
_OLD |= {"sitting": "skipped", "into": "target", "scale": "source_weight", "count": "tokens_left"}


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write which tokens each block computed and every decision (not the policy's own facts)."""
    tensors = {"attended": trace.attended, "updated": trace.updated}
    steps = []
    for i, step in enumerate(trace.steps):
        values = {name: value for name, value in vars(step.decision).items() if value is not None}
        plain = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
        tensors |= {f"{i}.{name}": value.contiguous() for name, value in values.items() if name not in plain}
        steps.append([step.layer, step.when, type(step.decision).__name__, plain])
    meta = {"steps": json.dumps(steps), "prefix": str(trace.num_prefix_tokens), "format": _FORMATS[-1]}
    meta["pooled"] = trace.pooled
    write_bytes(path, save({k: v.detach().cpu().clone() for k, v in tensors.items()}, metadata=meta))


def load_trace(path: str | Path) -> Trace:
    """Read what save_trace wrote."""
    if not Path(path).is_file():
        raise UserError(f"Trace file not found: {path}.")
    try:
        with safe_open(str(path), "pt") as file:
            meta = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"Not a readable trace file: {path} ({error}).") from None
    if meta.get("format") not in _FORMATS:
        raise UserError(f"Not a trace saved by adaptivit: {path}.")
    steps = []
    try:
        for i, (layer, when, kind, plain) in enumerate(json.loads(meta["steps"])):
            values = plain | {k.split(".", 1)[1]: v for k, v in tensors.items() if k.startswith(f"{i}.")}
            if kind == "Merge" and meta["format"] == _FORMATS[0]:
                values["size"] = values.pop("weight")
            values = {_OLD.get(name, name): value for name, value in values.items()}
            steps.append(AppliedDecision(layer, when, _KINDS[kind](**values)))
        pooled = meta.get("pooled", "all")
        return Trace(tensors["attended"], tensors["updated"], int(meta["prefix"]), tuple(steps), pooled=pooled)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"Damaged trace file: {path} ({error!r}).") from None
