"""Every method at a share of static's MACs on DeiT-T: which AHT-ViT our tables show, and the settings of its peers.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from .run import Run

# AHT-ViT in every table here: change it in this line, or in the recipe that it names.
AHT = "aht_merge"
# The checkpoint that serves every budget: in training each image draws its own between these shares, and their mean is
# held in the middle.
AHT_SAMPLED = f"{AHT}:train_budget_range=0.45+0.95,loss.cost_target=0.7"

TITLES = {
    "aht": "AHT-ViT",
    "avit": "A-ViT",
    "amod": "A-MoD",
    "mod": "MoD",
    "dynamicvit": "DynamicViT",
    "evit": "EViT",
    "tome": "ToMe",
    "fold": "fold",
    "act": "ACT",
    "confidence": "confidence",
    "similarity": "similarity",
    "pondernet": "PonderNet",
}
# The settings that bring a peer to a share of DeiT-T's MACs at 224 px, what it spends on deciding included. A-MoD and
# MoD route every second block and cannot come down to 0.52.
_AT: Mapping[str, Mapping[float, str]] = {
    "evit": {
        0.83: "keep=0.867",
        0.80: "keep=0.842",
        0.75: "keep=0.797",
        0.67: "keep=0.718",
        0.60: "keep=0.637",
        0.52: "keep=0.525",
    },
    "dynamicvit": {
        0.83: "keep=0.869",
        0.80: "keep=0.846",
        0.75: "keep=0.805",
        0.67: "keep=0.732",
        0.60: "keep=0.658",
        0.52: "keep=0.561",
    },
    "amod": {
        0.83: "capacity=0.609",
        0.80: "capacity=0.553",
        0.75: "capacity=0.446",
        0.67: "capacity=0.279",
        0.60: "capacity=0.121",
    },
    "mod": {
        0.83: "capacity=0.68",
        0.80: "capacity=0.624",
        0.75: "capacity=0.522",
        0.67: "capacity=0.355",
        0.60: "capacity=0.203",
    },
    "tome": {
        0.83: "r=5+5+6+5+5+6+5+5+6+5+5+6",
        0.80: "r=6+6+6+7+6+6+6+7+6+6+6+7",
        0.75: "r=7+8+8+8+7+8+8+8+7+8+8+8",
        0.67: "r=10+10+11+10+10+11+10+10+11+10+10+11",
        0.60: "r=12+13+12+13+12+13+13+12+13+12+13+13",
        0.52: "r=15+15+15+16+15+15+15+16+15+15+15+16",
    },
}
_MATCHED = ("aht", "avit", "act", "pondernet", "confidence", "similarity")  # their settings do not fix their cost


def adding(method: str, settings: str) -> str:
    """The method with more settings."""
    return f"{method}{',' if ':' in method else ':'}{settings}" if settings else method


def saving(share: float) -> str:
    """0.67 -> -33 %."""
    return f"-{round(100 * (1 - share))} %"


def at(policy: str, share: float) -> str | None:
    """A method at a share of static's MACs on DeiT-T; nothing where it cannot get there."""
    if policy == "aht":
        return adding(AHT, f"loss.cost_target={share}")
    if policy == "fold":
        return f"fold:budget={share}"
    if policy == "avit":  # its prior's depth and a budget hold the cost
        return f"avit:loss.cost=10,loss.cost_target={share},loss.prior_depth={12 * share:.3g}"
    if policy == "act":  # scores that begin by filling up at that depth: far below, they have no slope
        return f"act:bias={-math.log(12 * share - 1):.3g},loss.cost=10,loss.cost_target={share}"
    if policy == "pondernet":  # a prior whose median is at that depth, and a gate that begins there
        prior = 1 - 0.5 ** (1 / (12 * share))
        return f"pondernet:prior={prior:.3g},gate_scale=1,gate_center={math.log(1 / prior - 1):.3g}"
    if policy in _AT:
        setting = _AT[policy].get(share)
        return None if setting is None else f"{policy}:{setting}"
    return policy


def run_at(policy: str, share: float, note: str = "", **more: Any) -> Iterable[Run]:
    """The run of a method at a share, or none."""
    method = at(policy, share)
    if method is not None:
        matched = share if policy in _MATCHED else None
        yield Run(f"{TITLES[policy]} {saving(share)}{note}", method, share=matched, **more)
