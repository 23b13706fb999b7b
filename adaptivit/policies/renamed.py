"""Settings as version 0.1 named them: errors that give today's name, and checkpoints in the old names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
_VALUES = {"fold": "merge", "worth": "merge_score", "between": "before_mlp", "layer": "block"}
# Settings of 0.1's aht with their defaults: gone, and those of the policy aht_merge.
_GONE: dict[str, Any] = {"learn_gate": True, "class_token": "stays", "halted": "frozen", "plan_weight": 0.0}
_GONE |= {"plan_against": "layer", "plan_range": "1..L"}
_MERGE: dict[str, Any] = {"feature": "fc1", "gate": "shared", "decide": "after", "supervised": None, "relative": 0.0}
_MERGE |= {"slope": "score", "start": "depth", "sample": (), "leave": "drop"}


def error_of(policy: str, name: str, fields: set[str]) -> UserError | None:
    """What to say of a setting that was renamed, moved or removed; None where there was none of that name."""
    if policy in ("aht", "aht_merge") and name in _GONE:
        return UserError(f"{policy}: the setting {name} is gone; see docs/results/cifar100.md for what it brought.")
    now = RENAMED.get(policy, {}).get(name, name if name in _MERGE and policy == "aht" else None)
    if now is None:
        return None
    if now not in fields:
        called = "" if now == name else f", called {now}"
        return UserError(f"{policy}: {name} is a setting of the policy aht_merge now{called}.")
    return UserError(f"{policy}: the setting {name} is called {now} now.")


def upgraded(policy: str, stored: Mapping[str, Any], layers: Callable[[], int]) -> tuple[str, dict[str, Any]]:
    """Policy and settings of a checkpoint of format 1 or 2 in today's names; `layers`: the depth of its backbone."""
    given = dict(stored)
    if policy not in RENAMED:
        return policy, given
    if policy == "fold" and "blocks" in given:
        given["first_block"] = given.pop("blocks")
    if policy == "aht":
        for name, usual in _GONE.items():
            if given.pop(name, usual) != usual and name != "learn_gate":
                raise UserError(f"aht: the setting {name} is gone; run this checkpoint with adaptivit 0.1.")
        given = _MERGE | {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        if (first := given.pop("spare", 0)) and given["supervised"] is None:
            given["supervised"] = tuple(range(first, layers() - 1))
        if all(given[name] == usual for name, usual in _MERGE.items() if name not in ("start", "slope")):
            given = {name: value for name, value in given.items() if name not in _MERGE}
        else:
            policy = "aht_merge"
            given["supervised"] = given["supervised"] or tuple(range(layers() - 1))
    names = RENAMED[policy]
    return policy, {names.get(k, k): _VALUES.get(v, v) if isinstance(v, str) else v for k, v in given.items()}
