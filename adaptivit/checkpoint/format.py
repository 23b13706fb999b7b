"""Checkpoints: a directory with model.safetensors, config.json and README.md. Nothing executes on load."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save as to_bytes

from .. import __version__
from ..backbones.build import describe_backbone
from ..errors import UserError, WeightsError
from ..model import AdaptiveViT
from ..utils.atomic_io import new_directory, write_bytes, write_text
from ..utils.coerce import require
from ..utils.text import json_text
from . import model_card
from .config import FORMAT, OWN, read_config
from .place import LARGEST, checkpoint_at, digest_of
from .weights import State, read_shapes, read_weights, tensors

FILES = ("model.safetensors", "config.json", "README.md", model_card.PICTURE)


def save(model: AdaptiveViT, directory: str | Path, extra: dict[str, Any], images: Any = None, name: str = "") -> None:
    """Write a checkpoint in one step; its card shows halting maps of `images` and calls it `name`."""
    if model.policy_name == "replay":
        raise UserError("A replay belongs to one batch and is not a checkpoint; save the trace with save_trace.")
    if odd := sorted(OWN & set(extra)):
        raise UserError(f"save_pretrained: {odd[0]!r} is a field of the model itself; give the note another name.")
    if wrong := class_name_mismatch(model):
        raise UserError(f"save_pretrained: class_names has {wrong}.")
    place = Path(directory)
    weights = to_bytes({k: v.cpu().clone() for k, v in tensors(model).items()})
    digest = hashlib.sha256(weights).hexdigest()
    config = {
        "format": FORMAT,
        "adaptivit": __version__,
        "backbone": describe_backbone(model.backbone, model.backbone_name),
        "policy": model.policy_name,
        "settings": model.settings,
        "task": model.task,
        "preprocessing": model.preprocessing.to_config(),
        "class_names": model.class_names,
        "whole": None if model.whole is None else asdict(model.whole),
        "weights": {"sha256": digest},
        "calibration": None if model.calibration is None else model.calibration.to_config(model.budget),
        "max_macs": model.max_macs,
    }
    try:
        config |= (model.notes if model.noted == identity(model, digest) else {}) | extra
        text = json_text(config, indent=2) + "\n"
        require(len(text.encode()) <= LARGEST, "config.json", f"at most {LARGEST >> 20} MiB", len(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"config.json cannot hold what was given: {error}.") from None
    picture = None if images is None else model_card.maps(model, images)
    with new_directory(place) as new:
        for other in _others(place):
            (shutil.copytree if other.is_dir() else shutil.copy2)(other, new / other.name)
        write_bytes(new / "model.safetensors", weights)
        write_text(new / "config.json", text)
        if picture is not None:
            write_bytes(new / model_card.PICTURE, picture)
        if not (new / "README.md").exists():
            write_text(new / "README.md", model_card.text(json.loads(text), name, images))


def _others(place: Path) -> list[Path]:
    """Files beside a checkpoint, which stay there; a directory that is no checkpoint is not replaced."""
    if place.exists() and not place.is_dir():
        raise UserError(f"Cannot write {place}: a checkpoint is a directory, and this is a file.")
    inside = sorted(place.iterdir()) if place.is_dir() else []
    others = [p for p in inside if p.name not in FILES]
    if others and '"adaptivit"' not in _text(place / "config.json"):
        raise UserError(
            f"{place} holds other things than a checkpoint ({others[0].name}); nothing was written. "
            "Choose a new or empty directory."
        )
    own = place / "README.md"
    return [*others, own] if own.is_file() and model_card.MARK not in _text(own) else others


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def class_name_mismatch(model: AdaptiveViT) -> str:
    """In words how many class names there are for how many outputs, where these differ."""
    names, classes = model.class_names, model.shape.classes
    wrong = model.shape.num_classifiers and names and len(names) != classes
    return f"{len(names or [])} names for {classes} classes" if wrong else ""


def identity(model: AdaptiveViT, digest: str) -> str:
    """What results and other notes hold for: these weights under these settings."""
    return digest + json.dumps([model.policy_name, model.settings], sort_keys=True)


@dataclass(frozen=True)
class Stored:
    """A checkpoint directory that was read."""

    place: Path
    config: dict[str, Any]
    shapes: State  # of the weights, on the device "meta": nothing has been read
    allow_nonfinite: bool

    @property
    def source(self) -> str:
        return str(self.place / "model.safetensors")

    @functools.cached_property
    def state(self) -> State:
        return read_weights(self.source, self.allow_nonfinite)

    @functools.cached_property
    def digest(self) -> str:
        """Of model.safetensors."""
        return digest_of(self.place / "model.safetensors")

    @property
    def notes(self) -> dict[str, Any]:
        return {k: v for k, v in self.config.items() if k not in OWN}

    def policy_state(self) -> State:
        """The policy's own weights, under the policy's own keys."""
        return {k.removeprefix("policy."): v for k, v in self.state.items() if k.startswith("policy.")}

    def check_digest(self) -> None:
        """After shapes and names were checked, whose errors tell more."""
        wanted = self.config["weights"]["sha256"]
        if self.digest != wanted:
            raise WeightsError(
                f"Damaged checkpoint: {self.source} is not the file that config.json beside it was saved with "
                f"(sha256 {self.digest[:12]}..., expected {wanted[:12]}...). Copy both from one checkpoint; weights "
                f"alone load by create(..., weights='{self.source}')."
            )


def read(directory: str | Path, allow_nonfinite: bool = False) -> Stored:
    """A checkpoint directory; errors are one line."""
    place = checkpoint_at(directory)
    config = read_config(place)
    return Stored(place, config, read_shapes(place / "model.safetensors"), allow_nonfinite)
