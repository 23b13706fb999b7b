"""config.json of a checkpoint, read and checked. Nothing here imports torch, unless it names a family from outside."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

from .. import __version__, policies, tasks
from ..backbones.preprocessing import Preprocessing, Side
from ..backbones.stored import Arguments, sizes
from ..budget.curve import Calibration, parse
from ..cost import Shape
from ..errors import UserError, WeightsError
from ..policies.renamed import upgraded
from ..policies.spec import make
from ..utils.coerce import Check, Count, Name, convert, require, up_to
from .place import checkpoint_at, digest_of, header_of, read_object

FORMAT = 3  # 1 had no digest of the weights, 1 and 2 other names of policies' settings


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
    sha256: Annotated[str, Check(lambda v: re.fullmatch("[0-9a-f]{64}", v) is not None, "64 hexadecimal digits")]


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


OWN = set(typing.get_type_hints(Config))


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
    convert("", {name: value for name, value in config.items() if name in OWN}, Config, strict=True)
    described, version = config["backbone"], config["format"]
    if described.get("name") is None:
        require("kwargs" in described, "backbone", "a name or kwargs", described)
        if stored := _stored(described.get("family", "timm_vit")):
            convert("backbone.kwargs", described["kwargs"], stored, strict=True)
    if version >= 2 and config.get("weights") is None:
        raise UserError("weights is missing.")
    Preprocessing.from_config(config["preprocessing"])
    curve = None if config.get("calibration") is None else Calibration.from_config(config["calibration"])
    for name, text in (("max_macs", config.get("max_macs")), ("budget", None if curve is None else curve.budget)):
        if text is not None:
            parse(text, name)


def _stored(family: str) -> type | None:
    """What the arguments of a family must be."""
    if family == "timm_vit":
        return Arguments
    from ..backbones.families import family_named

    return family_named(family).stored


def check_known(config: dict[str, Any], path: Path) -> None:
    """Refuse a policy, a setting or a task that this version does not know, with what to do."""
    saved = f"(saved by adaptivit {config.get('adaptivit', '?')}, this is {__version__})"
    for kind, name, registry in (("policy", config["policy"], policies), ("task", config["task"], tasks)):
        if not registry.known(name):
            raise WeightsError(
                f"{path} names the {kind} {name!r}, which is unknown here {saved}. "
                f"Register your own before loading: --import FILE, or in Python adaptivit.register_{kind}({name!r})."
            )
    try:
        make(config["policy"], config["settings"])
    except UserError as error:
        raise WeightsError(f"{path} {saved}: {error} Correct it there, or use the version that saved it.") from None


def check_sizes(backbone: Mapping[str, Any], shapes: Mapping[str, list[int]], source: str) -> None:
    """Refuse arguments of a timm ViT that are not those of the weights in the file, before anything is allocated."""
    if backbone.get("name") is not None or backbone.get("family", "timm_vit") != "timm_vit":
        return
    for name, wanted in sizes(backbone["kwargs"]).items():
        if shapes.get(name) != wanted:
            held = shapes.get(name, "none of that name")
            raise WeightsError(f"The weights in {source} do not fit the model; {name}: expected {wanted}, got {held}.")


def check(directory: str | Path) -> None:
    """Refuse a checkpoint that `load` would refuse, as far as it can be known without torch."""
    place = checkpoint_at(directory)
    config, weights = read_config(place), place / "model.safetensors"
    check_known(config, place / "config.json")
    check_sizes(config["backbone"], {name: shape for name, (_, shape) in header_of(weights).items()}, str(weights))
