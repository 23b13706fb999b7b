"""The settings of `adaptivit compare`, as a frozen dataclass like those of config.py. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from ...data.augment_config import AugmentConfig
from ...errors import UserError
from ...training.config import OptimConfig, TrainConfig, with_settings
from ...training.methods import parse_method
from ...utils.coerce import at_least
from ...utils.settings import command, flat, kinds

# May differ between two calls that fill one directory: more methods and seeds, another machine, timing.
_FREE = ("methods", "seeds", "out", "device", "workers", "timing_batch", "timing_repeats")


@dataclass(frozen=True)
class CompareConfig:
    """Train several methods under one recipe, evaluate them on the same images, and draw accuracy against cost.

    Example: adaptivit compare --data photos/ --backbone deit_tiny_patch16_224 --weights deit_tiny.safetensors
    --methods static aht:balanced avit --epochs 5. Without any file: --data digits --backbone digits_vit.
    """

    data: str
    """Image folder, arrays, shards or hf:PATH, as for train; `digits` for the embedded handwritten digits."""
    methods: tuple[str, ...]
    """Methods, each POLICY or POLICY:RECIPE, with KEY=VALUE after commas, e.g. aht:balanced avit
    aht:loss.cost_target=0.5 (listed below). A key is a setting of the policy or of a loss. static is always among
    them."""
    backbone: str = "deit_tiny_patch16_224"
    """timm name of the VisionTransformer; `digits_vit` for the small one of the quickstart."""
    weights: str | None = None
    """Starting weights of every method: .safetensors or .pth in timm's keys, or a checkpoint directory of ours."""
    start: Literal["weights", "static"] = "weights"
    """Every method starts from --weights; or static is trained first and every method goes on from it for as many
    epochs again, static too (the row `static, trained on`, which the others are then compared to)."""
    img_size: int | None = None
    """Image size in pixels; default: the backbone's."""
    out: str = "runs/compare"
    """Where the results go; a second call with the same settings goes on with what is missing."""

    epochs: int = 5
    """Passes over the training images for each method; 0 to adapt the weights without training."""
    batch_size: int = 128
    """Images a step, and at a time in the evaluation."""
    optim: OptimConfig = OptimConfig()
    augment: AugmentConfig = AugmentConfig()
    distill: float = 0.0
    """Weight of distillation from a frozen static model, for every method alike, static too."""
    teacher: str | None = None
    """That static model; default: the starting weights, which --start static makes the trained static model."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of training and timing: bf16 on a GPU and fp32 on a CPU by default. Accuracy is always measured in fp32."""
    val_split: float = 0.1
    """Share of the training images held out where the data has no val split."""
    seeds: tuple[int, ...] = (0,)
    """Every method once with each seed."""

    split: Literal["auto", "val", "test"] = "auto"
    """Images of the report; auto: test, else val, else what training held out."""
    limit: int | None = None
    """Only so many of them, evenly spread."""
    timing_batch: int = 32
    """Images in the batch that is timed."""
    timing_repeats: int = 10
    """Turns of the interleaved timing; 0 for no timing."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train, evaluate and time."""
    workers: int = 0
    """Data-loading processes."""

    def __post_init__(self) -> None:
        if not self.methods:
            raise UserError("methods: expected at least one method, e.g. --methods aht:balanced avit, got none.")
        if not self.seeds:
            raise UserError("seeds: expected at least one seed, got none.")
        at_least("epochs", self.epochs, 0)
        at_least("timing_repeats", self.timing_repeats, 0)
        at_least("timing_batch", self.timing_batch, 1)
        if self.limit is not None:
            at_least("limit", self.limit, 1)
        for seed in self.seeds:
            at_least("seeds", seed, 0)
        if self.start == "static" and self.epochs == 0:
            raise UserError("start: going on from a trained static model needs --epochs of at least 1, got 0.")
        for method in self.methods:
            parse_method(method, self.shared())  # a mistake in a method is an error before anything runs

    def shared(self, seed: int = 0) -> TrainConfig:
        """The recipe that all methods have in common."""
        known = kinds(TrainConfig)
        given = {name: value for name, value in flat(self).items() if name in known}
        given |= {"epochs": max(1, self.epochs), "loss.distill": self.distill, "seed": seed}
        return with_settings(TrainConfig(self.data, policy="static"), given)

    def fixed(self) -> dict[str, Any]:
        """What must be the same in every call that fills one directory."""
        return {name: value for name, value in flat(self).items() if name not in _FREE}

    def fingerprint(self) -> str:
        """A short hash of what all methods have in common."""
        return hashlib.sha256(json.dumps(self.fixed(), sort_keys=True).encode()).hexdigest()[:10]

    def command(self) -> str:
        """The command line that says the same."""
        return command("compare", self)
