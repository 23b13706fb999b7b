"""What a sweep may search over: every mistake is one line, and a point is a configuration; recipe files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaptivit.errors import UserError
from adaptivit.experiments.sweep.config import SweepConfig, TrialConfig
from adaptivit.experiments.sweep.space import apply, parse, total
from adaptivit.training.config import OptimConfig, TrainConfig
from adaptivit.training.recipes import get
from tests.support.commands import refused

BASE = TrialConfig(data="photos")
LR = "optim.lr=1e-4|3e-4|1e-3"


# -- the space ------------------------------------------------------------------------------------------------------
BAD = {
    "nothing": ((), "at least one KEY=VALUES"),
    "no values": (("optim.lr",), "expected KEY=v1|v2"),
    "empty": (("optim.lr=",), "expected KEY=v1|v2"),
    "empty choice": (("optim.lr=1e-4||1e-3",), "an empty value"),
    "twice the value": (("optim.lr=1e-4|1e-4",), "names '1e-4' twice"),
    "twice the key": (("optim.lr=1e-4", "optim.lr=1e-3"), "optim.lr is given 2 times"),
    "unknown key": (("optim.lrr=1|2",), "Did you mean 'optim.lr'?"),
    "unknown setting": (("policy.thresold=0.8|0.9",), "Did you mean 'policy.threshold'?"),
    "of the run": (("out=a|b",), "belongs to the run"),
    "the split": (("val_split=0.1|0.2",), "belongs to the run"),
    "no number": (("optim.lr=fast|slow",), "optim.lr: expected a number, got 'fast'"),
    "no such word": (("loss.mass=act|actt",), "Unknown value of loss.mass"),
    "limits": (("optim.lr=1e-4|0",), "optim.lr: expected a number > 0"),
    "limits of the policy": (("policy.threshold=-1|0.5",), "threshold: expected a number > 0"),
    "range of words": (("optim.lr=a..b",), "expected two numbers"),
    "half a range": (("optim.lr=1e-4..",), "expected two numbers"),
    "range upside down": (("optim.lr=1e-3..1e-4",), "expected low < high"),
    "endless range": (("optim.lr=1..inf",), "expected low < high"),
    "log of zero": (("loss.ponder=0..1:log",), "expected low > 0"),
    "unknown option": (("optim.lr=1e-4..1e-3:exp",), "expected :log or :int"),
    "not whole": (("epochs=1..5",), "write epochs=1..5:int"),
    "whole ends": (("epochs=1.5..5:int",), "expected whole numbers"),
    "limits of a range": (("optim.drop_path=0..2",), "optim.drop_path: expected 0.0 <= value < 1.0"),
    "unknown policy": (("policy=aht|ath",), "Unknown policy 'ath'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_mistake_in_the_space_is_said_in_one_line(kind: str) -> None:
    space, expected = BAD[kind]
    with pytest.raises(UserError) as raised:
        parse(space, BASE)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_other_limits() -> None:
    for changes in ({"trials": 0}, {"max_share": 0.0}, {"max_share": 1.5}):
        with pytest.raises(UserError, match=next(iter(changes))):
            SweepConfig(BASE, (LR,), **changes)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"optim\.lr"):
        TrialConfig(data="", epochs=0, optim=OptimConfig(lr=0))
    assert TrialConfig(data="", epochs=0).epochs == 0


def test_a_point_becomes_a_configuration() -> None:
    base = replace(BASE, policy="aht:beta=-3,threshold=0.9")
    axes = parse(
        (
            "epochs=1..3:int",
            "policy.planner_blocks=3|3+6+9",
            "policy.straight_through=true|false",
            "loss.kl=target_actual",
        ),
        base,
    )
    made = apply(
        base,
        {"epochs": 2, "policy.planner_blocks": "3+6", "policy.straight_through": "false", "loss.kl": "target_actual"},
    )
    assert (made.epochs, made.loss.kl) == (2, "target_actual")
    assert (
        made.policy == "aht:beta=-3.0,threshold=0.9,planner_blocks=3+6,straight_through=false"
    )  # what was given stays
    assert total(axes, "grid", None, 20) == 12
    assert apply(BASE, {"policy": "avit", "policy.gate_center": 3.5}).policy == "avit:gate_center=3.5"
    assert apply(BASE, {"weights": "none", "optim.lr": "1e-3"}).optim.lr == 1e-3


def test_a_word_with_dots_is_no_range() -> None:
    (axis,) = parse(("weights=a..b",), BASE)
    assert axis.choices == ("a..b",)
    (axis,) = parse(("policy.r=1..5:int",), replace(BASE, policy="tome"))  # a setting that may be a number or a list
    assert axis.values == (1, 2, 3, 4, 5)


def test_a_value_may_need_another_one() -> None:
    parse(("policy.eps=0.01|1.5", "policy.threshold=1|2"), BASE)
    with pytest.raises(UserError, match="eps"):
        parse(("policy.eps=0.01|2.5", "policy.threshold=1|2"), BASE)


# -- recipe files ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[1]", "got something else"),
        ('{"recipe": 3}', "got something else"),
        ('{"recipe": {"optim.lrr": 1}}', "Did you mean 'optim.lr'?"),
        ('{"recipe": {"optim.lr": "fast"}}', "optim.lr: expected a number"),
        ('{"recipe": {"optim.lr": -1}}', "optim.lr: expected a number > 0"),
        ('{"recipe": {"policy": "aht:threshold=-1"}}', "threshold"),
    ],
)
def test_a_bad_recipe_file_is_refused(tmp_path: Path, capsys: Any, text: str | None, expected: str) -> None:
    path = tmp_path / "best.json"
    if text is not None:
        path.write_text(text)
    message = refused(capsys, "train", "--recipe", path, "--data", tmp_path)
    assert expected in message
    assert "best.json" in message


def test_a_recipe_file_may_name_a_few_fields(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text('{"recipe": {"optim.lr": 1e-3, "policy": "avit", "weights": null, "gate_init": false}}')
    assert get(str(path)) == TrainConfig(data="", policy="avit", gate_init=False, optim=OptimConfig(lr=1e-3))
