"""Damaged checkpoints: a model that runs, or an error of ours in one line; never anything else."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptivit
from tests.support.models import pictures, tiny

KEPT = settings(
    max_examples=80, deadline=5000, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
NAMED = {"ff": b"\xff" * 8, "deep": b"[" * 3000}
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 10**9, 10**30, 1e308, 0.5, "", "static", "aht", "10", [], {}, [[]], [1, 2], {"a": 1}]),
    st.text(max_size=8),
    st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=2), max_leaves=40),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny("aht", beta=-1.0)
    model.calibrate(pictures(16), "-20%")
    place = tmp_path_factory.mktemp("fuzz") / "model"
    model.save_pretrained(place)
    return place


def paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each part of a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [above, *(path for key, part in inside for path in paths(part, (*above, key)))]


def loads(place: Path) -> None:
    try:
        model = adaptivit.load(place)
        with torch.inference_mode():
            size = model.preprocessing.size
            assert model(torch.zeros(1, 3, *size), budget="none").logits.shape[0] == 1
    except adaptivit.UserError as error:
        line = str(error)
    else:
        return
    assert line
    assert "\n" not in line, line
    assert "Traceback" not in line


@KEPT
@given(data=st.data())
def test_a_damaged_config_is_read_or_refused(saved: Path, data: st.DataObject) -> None:
    text = (saved / "config.json").read_text()
    config = copy.deepcopy(json.loads(text))
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from([p for p in paths(config) if p]))
        part = config
        for key in path[:-1]:
            part = part[key]
        if data.draw(st.booleans()) and isinstance(part, dict):
            del part[path[-1]]
        else:
            part[path[-1]] = data.draw(ODD)
    try:
        (saved / "config.json").write_text(json.dumps(config))
        loads(saved)
    finally:
        (saved / "config.json").write_text(text)


@KEPT
@given(data=st.data())
def test_damaged_bytes_are_read_or_refused(saved: Path, data: st.DataObject) -> None:
    file = saved / data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    whole = file.read_bytes()
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 200), st.integers(0, len(changed))))
        length = data.draw(st.sampled_from([0, 1, 8, len(changed)]))
        changed[at : at + length] = data.draw(st.binary(max_size=9) | st.sampled_from(["ff", "deep"]).map(NAMED.get))
    try:
        file.write_bytes(changed)
        loads(saved)
    finally:
        file.write_bytes(whole)
