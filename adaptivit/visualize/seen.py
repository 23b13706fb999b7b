"""What a model did with images, patch by patch, as plain arrays: all that pictures, charts and the report read.

Shapes: B images, L blocks, P = gh x gw patches in row order, S places where patches were scored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
METHODS = {
    "aht": "AHT-ViT",
    "avit": "A-ViT",
    "mod": "MoD",
    "amod": "A-MoD",
    "dynamicvit": "DynamicViT",
    "evit": "EViT",
    "tome": "ToMe",
    "act": "ACT",
    "pondernet": "PonderNet",
}


@dataclass(frozen=True)
class Scores:
    """What a policy judged patches by."""

    name: str
    values: Array  # [S, B, P], NaN where a patch was not scored (any more)
    blocks: list[int]  # [S] the first block, counted from 0, that a patch which goes for its score misses
    stops: bool  # the higher, the sooner a patch goes (halting scores); else the longer it stays


@dataclass(frozen=True)
class Plans:
    """AHT-ViT's planned depths."""

    values: Array  # [S, B, P]
    live: Array  # [S, B, P] bool: was live at that stage, so that the plan counts
    stages: list[int]  # [S] blocks, counted from 1
    halt: Array  # [B, P] the block, counted from 1, after which each patch really halted


@dataclass
class Seen:
    """The images and what was done with them."""

    model: str
    policy: str
    layers: int
    grid: tuple[int, int]
    prefix: int
    names: list[str]  # [B] of the images
    attended: Array  # [L, B, P] bool: took part in the block
    live: Array  # [L, B] tokens in each block's attention, prefix tokens included
    groups: Array | None  # [L, B, P] after each block: the patch that this one has become part of, -1 for none
    skips: bool  # patches sit out single blocks and come back
    predicted: Array  # [B]
    confidence: Array  # [B] probability of the predicted class
    macs: Array  # [B]
    static_macs: float
    labels: Array | None = None  # [B]
    class_names: list[str] | None = None
    scores: Scores | None = None
    plans: Plans | None = None
    unreadable: int = 0
    budget: str | None = None  # at which it ran, where it was not at the policy's settings
    source: Any = field(default=None, repr=False)  # of the pictures themselves

    def __len__(self) -> int:
        return len(self.names)

    @property
    def method(self) -> str:
        """The policy as its paper calls it."""
        return METHODS.get(self.policy, self.policy)

    @cached_property
    def depth(self) -> Array:
        """[B, P] blocks that computed each patch."""
        return self.attended.sum(0)

    @cached_property
    def mean_depth(self) -> Array:
        """[B]"""
        return self.depth.mean(-1)

    @property
    def correct(self) -> Array | None:
        """[B] bool, where there are labels."""
        return None if self.labels is None else self.predicted == self.labels

    @property
    def equal(self) -> bool:
        """Every image goes equally deep: a policy of fixed counts."""
        return bool(np.ptp(self.mean_depth) < 1e-9)

    def pixels(self, index: int) -> Array:
        """[H, W, 3] uint8: the image as the model saw it, cropped and resized."""
        return self.source.pixels(index)

    def tensor(self, index: int) -> Tensor:
        """[3, H, W] normalised."""
        return self.source.tensor(index)

    def class_name(self, number: int) -> str:
        names = self.class_names
        return names[number] if names is not None and 0 <= number < len(names) else f"class {number}"

    @cached_property
    def titles(self) -> list[str]:
        """[B] what images are called in pictures: the name of the file, with its folder where names repeat."""
        short = [Path(n).stem for n in self.names]
        if len(set(short)) == len(short):
            return short
        return ["/".join(Path(n).with_suffix("").parts[-2:]) for n in self.names]
