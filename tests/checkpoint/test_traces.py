"""Traces of the formats before: their decisions had other names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import adaptivit
from tests.support.models import pictures, tiny

NAMES = {"readout_weight": "share", "key_weight": "weight", "self_key_grad": "own", "zero_on_exit": "zeroed"}
NAMES |= {"skipped": "sitting", "target": "into", "source_weight": "scale", "tokens_left": "count"}


@torch.no_grad()
@pytest.mark.parametrize(("policy", "version"), [("aht", 1), ("evit", 2), ("tome", 2), ("tome", 1), ("amod", 2)])
def test_a_trace_of_an_older_format_replays(policy: str, version: int, tmp_path: Path) -> None:
    path, model = tmp_path / "trace.safetensors", tiny(policy)
    output = model(pictures(), layout="masked")
    adaptivit.save_trace(output.trace, path)
    (length,) = torch.frombuffer(bytearray(path.read_bytes()[:8]), dtype=torch.int64).tolist()
    meta = json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]
    assert meta["format"] == "adaptivit-trace-3"
    steps, older = json.loads(meta["steps"]), {}
    for name, value in load_file(path).items():
        step, _, field = name.rpartition(".")
        size = version == 1 and field == "size" and steps[int(step)][2] == "Merge"
        older[f"{step}.{'weight' if size else NAMES.get(field, field)}" if step else name] = value
    plain = [[layer, when, kind, {NAMES.get(k, k): v for k, v in p.items()}] for layer, when, kind, p in steps]
    save_file(older, path, {**meta, "format": f"adaptivit-trace-{version}", "steps": json.dumps(plain)})
    again = adaptivit.create(model.vit, "replay", trace=str(path))(pictures(), layout="masked")
    assert torch.equal(output.logits, again.logits)
    assert torch.equal(output.trace.attended, again.trace.attended)
