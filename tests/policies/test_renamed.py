"""Settings in the names of version 0.1: an error with the new name, and checkpoints that are read all the same."""

from __future__ import annotations

from typing import Any

import pytest

from adaptivit.errors import UserError
from adaptivit.policies.renamed import RENAMED, upgraded
from adaptivit.policies.spec import make


@pytest.mark.parametrize(("policy", "old", "new"), [(p, old, new) for p in RENAMED for old, new in RENAMED[p].items()])
def test_an_old_name_gives_the_new_one(policy: str, old: str, new: str) -> None:
    with pytest.raises(UserError, match=rf"\b{old}\b.*\b{new}\b"):
        make(policy, {old: 1})


@pytest.mark.parametrize(
    ("policy", "stored", "now"),
    [
        ("aht", {"stages": [2], "tau": 0.5, "feature": "fc1"}, {"planner_blocks": [2], "surrogate_width": 0.5}),
        ("aht", {"threshold": 0.9, "sample": [], "learn_gate": False}, {"threshold": 0.9}),
        ("fold", {"blocks": 2, "stages": None}, {"first_block": 2, "blocks": None}),
        ("dynamicvit", {"stages": [1, 3], "leave": "fold"}, {"blocks": [1, 3], "removal": "merge"}),
        ("mod", {"first": 2}, {"first_block": 2}),
        ("tome", {"r": [1, 2]}, {"r": [1, 2]}),
    ],
)
def test_settings_of_an_old_checkpoint(policy: str, stored: dict[str, Any], now: dict[str, Any]) -> None:
    assert upgraded(policy, stored) == now
    make(policy, now)


@pytest.mark.parametrize("stored", [{"feature": "worth"}, {"halted": "zeroed"}, {"sample": [0.4, 0.9]}])
def test_an_old_checkpoint_of_another_method_is_refused(stored: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(stored))):
        upgraded("aht", stored)
