"""Weights with NaN or infinity: refused on load, looked at on request, and never written as JSON that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import adaptivit
from adaptivit.errors import WeightsError
from adaptivit.serve import Service
from adaptivit.utils.text import json_text
from tests.support.commands import refused, run
from tests.support.data_sets import folder
from tests.support.models import TINY, tiny
from tests.support.serving import error, files, photo, running


def strict(text: str) -> Any:
    """JSON without NaN and infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """A static model of three classes whose head is NaN."""
    model = tiny(more={"num_classes": 3})
    model.vit.head.bias.data[1] = float("nan")
    model.save_pretrained(tmp_path / "spoilt")
    return tmp_path / "spoilt"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["vit.blocks.2.mlp.fc1.weight", "policy.beta"])
def test_refused_on_load(name: str, value: float, tmp_path: Path) -> None:
    model = tiny("aht")
    model.state_dict()[name].view(-1)[-1] = value
    model.save_pretrained(tmp_path / "saved")
    torch.save({k.removeprefix("vit."): v for k, v in model.state_dict().items()}, tmp_path / "weights.pth")
    for use in (
        lambda **more: adaptivit.load(tmp_path / "saved", **more),
        lambda **more: adaptivit.from_pretrained(tmp_path / "saved", **more),
        lambda **more: adaptivit.create(TINY, "aht", weights=tmp_path / "saved", **more),
        lambda **more: adaptivit.create(TINY, "aht", weights=tmp_path / "weights.pth", **more),
    ):
        where = name.removeprefix("vit.").replace(".", r"\.")
        with pytest.raises(WeightsError, match=rf"not finite .*in {where}, .*allow_nonfinite=True"):
            use()
        made: Any = use(allow_nonfinite=True)
        assert not made.state_dict()[name].isfinite().all()


def test_on_the_command_line_the_output_is_json(spoilt: Path, tmp_path: Path, capsys: Any) -> None:
    images = folder(tmp_path / "images", each=1)
    words = ("predict", images / "a", "--checkpoint", spoilt, "--format", "jsonl")
    assert "--allow-nonfinite" in refused(capsys, *words)
    assert run(*words, "--allow-nonfinite") == 0
    line = capsys.readouterr().out
    assert "null" in line
    strict(line)
    evaluated = ("evaluate", "--data", images, "--checkpoint", spoilt, "--json", tmp_path / "row.json")
    assert run(*evaluated, "--allow-nonfinite") == 0
    strict((tmp_path / "row.json").read_text())


def test_notes_are_json(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "saved", results={"best": [float("nan"), -float("inf")]})
    assert strict((tmp_path / "saved/config.json").read_text())["results"] == {"best": [None, None]}
    assert json_text({"a": (1.5, float("inf"))}) == '{"a": [1.5, null]}'


def test_the_service_does_not_blame_the_request(spoilt: Path) -> None:
    model = adaptivit.load(spoilt, allow_nonfinite=True)
    with running(Service(model, wait=0.0)) as found, found.client() as client:
        assert "The fault is the model's" in error(client.post("/v1/classify", files=files(photo())), 500)
