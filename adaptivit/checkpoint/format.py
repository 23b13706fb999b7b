"""Checkpoints: a directory with model.safetensors, config.json and README.md. Nothing executes on load."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import typing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from safetensors.torch import save as to_bytes

from .. import __version__, tasks
from ..backbones import family_named
from ..backbones.build import describe_backbone
from ..backbones.preprocessing import Preprocessing, Side
from ..budget.curve import Calibration
from ..cost import Shape
from ..errors import UserError, WeightsError
from ..model import AdaptiveViT
from ..policies.renamed import upgraded
from ..utils.atomic_io import new_directory, write_bytes, write_text
from ..utils.coerce import Count, Name, convert, require, up_to
from ..utils.text import json_text
from . import model_card
from .place import LARGEST, checkpoint_at, read_object
from .weights import State, digest_of, read_shapes, read_weights, tensors

FORMAT = 3  # 1 had no digest of the weights, 1 and 2 other names of policies' settings
FILES = ("model.safetensors", "config.json", "README.md", model_card.PICTURE)


class _Changes(TypedDict, total=False):
    num_classes: Annotated[int, up_to(10**7, 0)]
    img_size: tuple[Side, Side]


class _BackboneNeeds(TypedDict):
    changes: _Changes  # nothing else may get into what builds the backbone: `pretrained` would start a download


class _Backbone(_BackboneNeeds, total=False):
    name: Name | None
    family: Name
    kwargs: dict[str, Any]  # checked by its family


class _Digest(TypedDict):
    sha256: Name


class _Needs(TypedDict):
    format: Count
    backbone: _Backbone
    policy: Name
    settings: dict[str, Any]  # checked by its policy
    preprocessing: Preprocessing


class Config(_Needs, total=False):
    """config.json about the model itself; what else it has are notes (results, ...)."""

    adaptivit: Name
    weights: _Digest | None
    task: Name | None
    class_names: list[str] | None
    whole: Shape | None
    calibration: Calibration | None
    max_macs: Name | None


_OWN = set(typing.get_type_hints(Config))


def save(model: AdaptiveViT, directory: str | Path, extra: dict[str, Any], images: Any = None, name: str = "") -> None:
    """Write a checkpoint in one step; its card shows halting maps of `images` and calls it `name`."""
    if model.policy_name == "replay":
        raise UserError("A replay belongs to one batch and is not a checkpoint; save the trace with save_trace.")
    if odd := sorted(_OWN & set(extra)):
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
        return {k: v for k, v in self.config.items() if k not in _OWN}

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


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint directory; errors are one line."""
    path = checkpoint_at(directory) / "config.json"
    try:
        config = read_object(path)
        if not {"adaptivit", "policy", "format"} & set(config):
            raise WeightsError(f"Not a checkpoint of adaptivit: {path} was written by something else.")
        version = convert("format", config.get("format"), Count, strict=True)
        if version <= FORMAT:
            _check(config)
    except WeightsError:
        raise
    except UserError as error:
        raise WeightsError(f"Damaged checkpoint: {path}: {error}") from None
    if version > FORMAT:
        raise WeightsError(f"{directory} was saved by a newer adaptivit (format {version}); upgrade adaptivit.")
    config["task"] = config.get("task") or tasks.DEFAULT
    if version < 3:
        _upgrade(config, path)
    return config


def _upgrade(config: dict[str, Any], path: Path) -> None:
    """Turn formats 1 and 2 into today's."""
    try:
        config["settings"] = upgraded(config["policy"], config["settings"])
    except UserError as error:
        raise WeightsError(f"{path} (saved by adaptivit {config.get('adaptivit', '?')}): {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WeightsError(f"Damaged checkpoint: {path} ({error!r}).") from None
    if "weights" not in config and (path.parent / "model.safetensors").is_file():
        config["weights"] = {"sha256": digest_of(path.parent / "model.safetensors")}
    config["format"] = FORMAT


def _check(config: dict[str, Any]) -> None:
    """UserError unless types and ranges are those of what save writes."""
    convert("", {name: value for name, value in config.items() if name in _OWN}, Config, strict=True)
    described, version = config["backbone"], config["format"]
    if described.get("name") is None:
        family = family_named(described.get("family", "timm_vit"))
        require("kwargs" in described, "backbone", "a name or kwargs", described)
        if family.stored is not None:
            convert("backbone.kwargs", described["kwargs"], family.stored, strict=True)
    if version >= 2 and config.get("weights") is None:
        raise UserError("weights is missing.")
    Preprocessing.from_config(config["preprocessing"])
    if config.get("calibration") is not None:
        Calibration.from_config(config["calibration"])
