"""Settings as version 0.1 named them: errors that give today's name, and checkpoints in the old names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UserError

_REMOVAL = {"leave": "removal", "tau": "surrogate_width"}
_BLOCKS = {"stages": "blocks"}
_AHT = _REMOVAL | {
    "stages": "planner_blocks",
    "spare": "halting_blocks",
    "supervised": "halting_blocks",
    "decide": "halt_point",
    "relative": "center_per_image",
    "slope": "surrogate",
    "start": "start_at",
    "sample": "train_budget_range",
}
RENAMED = {
    "aht": _AHT,
    "aht_merge": _AHT,
    "avit": _REMOVAL,
    "act": _REMOVAL,
    "dynamicvit": _REMOVAL | _BLOCKS,
    "evit": _BLOCKS,
    "fold": _BLOCKS,
    "mod": {"first": "first_block"},
    "amod": {"first": "first_block"},
}
# Settings of 0.1's aht with their defaults: gone, and those that aht_merge has now.
_GONE: dict[str, Any] = {"learn_gate": True, "class_token": "stays", "halted": "frozen", "plan_weight": 0.0}
_GONE |= {"plan_against": "layer", "plan_range": "1..L"}
_MERGE: dict[str, Any] = {"feature": "fc1", "gate": "shared", "decide": "after", "spare": 0, "supervised": None}
_MERGE |= {"relative": 0.0, "slope": "score", "start": "depth", "sample": [], "leave": "drop"}


def error_of(policy: str, name: str, fields: set[str]) -> UserError | None:
    """The error for a setting that was renamed, moved or removed; None where there was none of that name."""
    if policy in ("aht", "aht_merge") and name in _GONE:
        return UserError(f"{policy}: the setting {name} is gone; see docs/results/cifar100.md for what it brought.")
    now = RENAMED.get(policy, {}).get(name, name if name in _MERGE and policy == "aht" else None)
    if now is None:
        return None
    if now not in fields:
        called = "" if now == name else f", called {now}"
        return UserError(f"{policy}: {name} is a setting of the policy aht_merge now{called}.")
    return UserError(f"{policy}: the setting {name} is called {now} now.")


def upgraded(policy: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a checkpoint of format 1 or 2 in today's names; UserError where they mean another policy."""
    given = dict(stored)
    if policy == "fold" and "blocks" in given:
        given["first_block"] = given.pop("blocks")
    for name, usual in (_GONE | _MERGE).items() if policy == "aht" else ():
        if (value := given.pop(name, usual)) != usual and name not in ("learn_gate", "start"):
            raise UserError(f"aht with {name}={value} is not in this version, or is aht_merge; use adaptivit 0.1.")
    merges = {name: "merge" for name in ("leave",) if given.get(name) == "fold"}
    return {RENAMED.get(policy, {}).get(name, name): value for name, value in (given | merges).items()}
