"""Policies from outside the package: by an entry point of an installed package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

import adaptivit
from adaptivit.errors import UserError
from adaptivit.policies import get, names, registry
from tests.support.models import pictures, tiny

MODULE = """
from dataclasses import dataclass
import torch
import adaptivit

@dataclass(frozen=True)
class HalfSettings:
    layer: int = 2

@adaptivit.register_policy("half", HalfSettings, title="Half", colour="#123456")
class Half(adaptivit.Policy):
    def after(self, ctx, state):
        leaving = torch.arange(ctx.present.shape[1]) > 8
        return adaptivit.Drop(leaving.expand_as(ctx.present)) if ctx.layer + 1 == self.settings.layer else None
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution on the path with three entry points: a policy, one that registers none, one that fails."""
    for name, text in {"half_vit": MODULE, "empty_vit": "", "broken_vit": "import nothing_of_that_name"}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    info = tmp_path / "half_vit-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half-vit\nVersion: 1.0\n")
    lines = ("half = half_vit", "empty = empty_vit", "broken = broken_vit")
    (info / "entry_points.txt").write_text("[adaptivit.policies]\n" + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry.PLUGINS, "registered", {})
    importlib.invalidate_caches()
    return tmp_path


@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_loaded_when_its_policy_is_asked_for() -> None:
    assert {"half", "aht"} <= set(names())
    assert "half_vit" not in sys.modules
    with torch.no_grad():
        assert tiny("half", layer=3)(pictures()).trace.live[:, 0].tolist() == [17, 17, 17, 9, 9, 9]
    assert (get("half").title, get("half").colour) == ("Half", "#123456")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "message"), [("empty", "registered no policy 'empty'"), ("broken", "cannot be")])
def test_an_entry_point_that_does_not_work_is_named(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        adaptivit.create("test_vit", name)
