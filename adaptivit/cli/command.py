"""What a command is, and the flags that name a model. Nothing here imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.place import has_random_weights
from ..errors import UserError
from ..utils.coerce import check_size

if TYPE_CHECKING:
    from ..model import AdaptiveViT


@dataclass(frozen=True)
class Command:
    """A command: its docstring is its line in --help."""

    config: type  # a frozen dataclass: its fields are the flags, the strings under them their help
    run: Callable[..., None]  # imports torch inside, so that --help is instant
    policies: bool = False  # --help lists the policies and their settings
    recipes: str = ""  # --help lists the recipes, with this note on how to name one
    of_recipe: Callable[[str], Any] | None = None  # the configuration that `--recipe NAME` starts from
    of_policy: Callable[[str | None], Any] | None = None  # and `--policy` without it; `run` then gets the flags, too


@dataclass(frozen=True)
class ModelConfig:
    """Which model: a checkpoint of ours, or a backbone with a policy."""

    checkpoint: str | None = None
    """Directory of a run of `train`, or saved by save_pretrained."""
    backbone: str | None = None
    """timm name, or hf-hub:NAME, local-dir:PATH with their weights, where there is no checkpoint."""
    policy: str = "static"
    """Policy and settings for that backbone, e.g. aht:threshold=0.9 (listed below)."""
    weights: str | None = None
    """Weights for that backbone: .safetensors or .pth in timm's keys."""
    img_size: int | None = None
    """Image size in pixels; default: the backbone's."""
    budget: str | None = None
    """What an image may cost in the mean: '0.8 GMACs', -33% or '3 ms'; for a calibrated checkpoint. none: its
    settings."""
    max_macs: str | None = None
    """What any single image may cost at most: '1.0 GMACs' or -20%."""
    allow_nonfinite: bool = False
    """Take weights with NaN or infinity, to look at them."""

    def __post_init__(self) -> None:
        check_size(self.img_size)

    def verify(self) -> None:
        """Refuse flags that do not go together."""
        if (self.checkpoint is None) == (self.backbone is None):
            raise UserError("Expected either --checkpoint DIR or --backbone NAME (with --weights FILE and --policy).")
        others = self.weights is not None or self.img_size is not None or self.policy != "static"
        if self.checkpoint is not None and others:
            raise UserError("--checkpoint brings its own policy, weights and image size; leave those flags out.")

    def build(self) -> AdaptiveViT:
        """The model, at its budget."""
        from ..policies import spec

        self.verify()
        if self.checkpoint is not None:
            model = loaded(self.checkpoint, self.allow_nonfinite)
        else:
            assert self.backbone is not None
            policy, values = spec.parse(self.policy)
            say_random(self.backbone, self.weights)
            from ..factory import create

            given: Any = {"weights": self.weights, "img_size": self.img_size, "allow_nonfinite": self.allow_nonfinite}
            model = create(self.backbone, policy, **given, **values)
        if self.budget is not None:
            model.budget = self.budget
        if self.max_macs is not None:
            model.max_macs = self.max_macs
        return model


def loaded(checkpoint: str, allow_nonfinite: bool = False) -> AdaptiveViT:
    """A checkpoint in float32."""
    say_random("", checkpoint)
    from ..factory import load

    return load(checkpoint, allow_nonfinite=allow_nonfinite).float()


def say_random(backbone: str | None, weights: str | None, refused: bool = False) -> None:
    """A line on stderr where weights are random, before anything else; or an error."""
    if not has_random_weights(weights, backbone):
        return
    line = f"{weights or f'{backbone} without --weights'} has random weights: its answers mean nothing"
    if refused:
        raise UserError(f"{line}. Give trained ones, or pass --random-weights for a test.")
    print(f"note: {line}", file=sys.stderr)


def names_of(path: str | None, model: AdaptiveViT) -> list[str] | None:
    """Read class names from a file, one for each class of the model; None without a file."""
    if path is None:
        return None
    try:
        names = [line for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the class names in {path} ({error}).") from None
    if len(names) != (count := model.shape.outputs):
        raise UserError(f"class_names: expected {count} names, one a line for each class, got {len(names)} in {path}.")
    return names
