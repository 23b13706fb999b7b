"""Settings that bring out every path of every policy."""

from __future__ import annotations

from typing import Any

GATE = {"gate_scale": 1.0, "gate_center": 1.0}
# aht_merge with the paper's gate and feature, for 6 blocks
PAPERS: dict[str, Any] = {"feature": "fc1", "center_per_image": 0.0, "gate": "shared", "gamma": 1.0}
PAPERS |= {"halt_point": "after", "halting_blocks": (0, 1, 2, 3, 4), "surrogate": "score", "surrogate_width": 0.25}
PAPERS |= {"straight_through": False, "start_at": "depth"}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "static": ("static", {}),
    "static, fewer blocks": ("static", {"depth": 4}),
    "static, narrower": ("static", {"width": 0.5}),
    "aht": ("aht", {"beta": -1.5, "gamma": 2.0}),
    "aht, straight-through": ("aht", {"beta": -1.5, "straight_through": True}),
    "aht, planner alone": ("aht", {"beta": -1.5, "planner_context": "none", "planner_width": 0.25}),
    "aht, class token": ("aht", {"beta": -1.5, "planner_context": "class"}),
    "aht_merge": ("aht_merge", {"gamma": 2.0, "beta": 0.5}),
    "aht_merge, sharp": ("aht_merge", {"gate": "shared", "gamma": 20.0, "beta": -3.0, "center_per_image": 0.5}),
    "aht_merge, by fc1": ("aht_merge", PAPERS | {"beta": -1.5, "straight_through": True}),
    "aht_merge, a score of the image": (
        "aht_merge",
        {"gamma": 2.0, "beta": -1.0, "center_per_image": 0.0, "surrogate": "score", "train_budget_range": (0.5, 0.9)},
    ),
    "aht_merge, few blocks": ("aht_merge", {"gamma": 2.0, "beta": 1.5, "halting_blocks": (1, 4)}),
    "aht_merge, few blocks, drops": (
        "aht_merge",
        PAPERS | {"feature": "class_row", "beta": 0.5, "gamma": 2.0, "halting_blocks": (0, 3), "removal": "drop"},
    ),
    "avit": ("avit", GATE),
    "avit, image ends with class": ("avit", {"gate_scale": 1.0, "gate_center": 0.0, "finish_with_class": True}),
    "avit, networks": ("avit", {"gate": "network"}),
    "avit, folds": ("avit", GATE | {"removal": "merge"}),
    "mod": ("mod", {}),
    "mod, mlp and sigmoid": ("mod", {"router": "mlp", "gate": "sigmoid", "capacity": 0.125}),
    "amod": ("amod", {}),
    "amod, multiplied": ("amod", {"multiply": True, "capacity": 0.125, "blocks": (2, 3)}),
    "dynamicvit": ("dynamicvit", {}),
    "dynamicvit, folds": ("dynamicvit", {"removal": "merge", "keep": 0.5}),
    "spvit": ("spvit", {}),
    "spvit, counted": ("spvit", {"select": "count", "keep": (1.0, 0.5, 0.2)}),
    "spvit, few": ("spvit", {"select": "count", "keep": (0.1, 0.1), "blocks": (0, 5)}),
    "evit": ("evit", {}),
    "evit, no fusing": ("evit", {"fuse": False, "keep": 0.5, "blocks": (0, 5)}),
    "patch_slimming": ("patch_slimming", {"counts": (16, 12, 12, 7, 1)}),
    "tome": ("tome", {"r": 3}),
    "tome, plain attention": ("tome", {"r": 5, "prop_attn": False}),
    "tome, listed": ("tome", {"r": [4, 0, 60]}),
    "fold": ("fold", {"keep": 0.8}),
    "fold, received": ("fold", {"evidence": "column", "value": 0.0, "first_block": 0}),
    "fold, a budget": ("fold", {"budget": 0.7}),
    "act": ("act", {"bias": -1.0}),
    "act, spatial": ("act", {"bias": -1.0, "unit": "token", "gate": "block"}),
    "confidence": ("confidence", {"threshold": 0.5}),
    "confidence, entropy of own heads": ("confidence", {"threshold": 0.3, "criterion": "entropy", "heads": "own"}),
    "similarity": ("similarity", {"threshold": 2.0}),
    "similarity, LPIPS": ("similarity", {"threshold": 0.5, "measure": "lpips"}),
    "similarity, token": ("similarity", {"threshold": 3.0, "of": "token", "patience": 2}),
    "pondernet": ("pondernet", GATE),
    "pondernet, sampled": ("pondernet", GATE | {"unit": "token", "sample": 3}),
}
