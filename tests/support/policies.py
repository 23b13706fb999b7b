"""Settings that bring out every path of every policy."""

from __future__ import annotations

from typing import Any

GATE = {"gate_scale": 1.0, "gate_center": 1.0}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "static": ("static", {}),
    "static, fewer blocks": ("static", {"depth": 4}),
    "static, narrower": ("static", {"width": 0.5}),
    "aht": ("aht", {"beta": -1.5, "gamma": 2.0}),
    "aht, the plan acts": ("aht", {"beta": -1.0, "plan_weight": 0.7, "plan_range": "s..L+1"}),
    "aht, straight-through": ("aht", {"beta": -1.5, "straight_through": True}),
    "aht, folds": ("aht", {"beta": -1.5, "leave": "fold", "straight_through": True}),
    "aht, worth": (
        "aht",
        {"feature": "worth", "leave": "fold", "decide": "between", "spare": 1, "gate": "layer"}
        | {"gamma": 2.0, "beta": -1.0, "straight_through": True, "sample": (0.5, 0.9)},
    ),
    "aht, sharp": (
        "aht",
        {"feature": "worth", "leave": "fold", "decide": "between", "gamma": 20.0, "beta": -5.0, "plan_weight": 3.0}
        | {"straight_through": True, "slope": "logit", "tau": 0.5},
    ),
    "aht, few supervisors": (
        "aht",
        {"feature": "worth", "leave": "fold", "decide": "between", "spare": 1, "gate": "layer", "supervised": (1, 4)}
        | {"gamma": 2.0, "beta": 0.5, "straight_through": True},
    ),
    "aht, few supervisors after their blocks": ("aht", {"beta": 0.5, "gamma": 2.0, "supervised": (0, 3)}),
    "aht, the plan against its image": ("aht", {"beta": -1.0, "plan_weight": 2.0, "plan_against": "image"}),
    "aht, planner alone": ("aht", {"beta": -1.5, "plan_weight": 0.5, "planner_context": "none", "planner_width": 0.25}),
    "aht, class token": ("aht", {"beta": -1.5, "plan_weight": 0.5, "planner_context": "class", "feature": "class_row"}),
    "avit": ("avit", GATE),
    "avit, image ends with class": ("avit", {"gate_scale": 1.0, "gate_center": 0.0, "finish_with_class": True}),
    "avit, networks": ("avit", {"gate": "network"}),
    "avit, folds": ("avit", GATE | {"leave": "fold"}),
    "mod": ("mod", {}),
    "mod, mlp and sigmoid": ("mod", {"router": "mlp", "gate": "sigmoid", "capacity": 0.125}),
    "amod": ("amod", {}),
    "amod, multiplied": ("amod", {"multiply": True, "capacity": 0.125, "blocks": (2, 3)}),
    "dynamicvit": ("dynamicvit", {}),
    "dynamicvit, folds": ("dynamicvit", {"leave": "fold", "keep": 0.5}),
    "evit": ("evit", {}),
    "evit, no fusing": ("evit", {"fuse": False, "keep": 0.5, "stages": (0, 5)}),
    "tome": ("tome", {"r": 3}),
    "tome, plain attention": ("tome", {"r": 5, "prop_attn": False}),
    "tome, listed": ("tome", {"r": [4, 0, 60]}),
    "fold": ("fold", {"keep": 0.8}),
    "fold, received": ("fold", {"evidence": "column", "value": 0.0, "blocks": 0}),
    "fold, a budget": ("fold", {"budget": 0.7}),
    "act": ("act", {"bias": -1.0}),
    "confidence": ("confidence", {"threshold": 0.5}),
    "similarity": ("similarity", {"threshold": 2.0}),
    "similarity, token": ("similarity", {"threshold": 3.0, "of": "token", "patience": 2}),
    "pondernet": ("pondernet", GATE),
    "pondernet, sampled": ("pondernet", GATE | {"unit": "token", "sample": 3}),
}
