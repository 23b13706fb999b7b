"""Backbones from a timm name, a module or arguments, and their description to be made again."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

import timm
import torch
from torch import nn

from ..errors import UnsupportedBackbone, UserError, WeightsError, first_line
from ..utils.hardware import without_memory
from .families import family_named, family_of
from .names import check_name, nearest
from .protocol import Backbone

DIGITS_VIT: dict[str, Any] = {  # the small backbone of the quickstart, for data/digits.py
    "img_size": 64,
    "patch_size": 8,
    "embed_dim": 64,
    "depth": 6,
    "num_heads": 2,
    "mlp_ratio": 2,
    "num_classes": 10,
}
DIGITS = {"digits_vit": DIGITS_VIT, "digits_vit_distilled": DIGITS_VIT | {"distilled": True}}
DIGITS_CFG = {"mean": (0.2,) * 3, "std": (0.25,) * 3, "crop_pct": 1.0, "interpolation": "bilinear"}


def build_backbone(
    backbone: str | nn.Module | Mapping[str, Any],
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    drop_path_rate: float = 0.0,
    pretrained: bool = False,
    family: str = "timm_vit",
) -> Any:
    """The module of a backbone: a timm name, a module (used as it is), or arguments of `family`."""
    if isinstance(backbone, nn.Module):
        return _adapted(backbone, num_classes, img_size, drop_path_rate, pretrained)
    asked = {"drop_path_rate": drop_path_rate or None, "img_size": img_size, "num_classes": num_classes}
    given = {name: value for name, value in asked.items() if value is not None}
    if not isinstance(backbone, str):
        return family_named(family).build(dict(backbone) | given)
    if ":" in backbone:
        return _from_source(backbone, pretrained, given)
    if backbone not in DIGITS:
        return _from_timm(backbone, pretrained, given)
    if pretrained:
        raise UserError(f"{backbone} has no weights to download; train it: adaptivit train --data digits.")
    small: Any = family_named(family).build(DIGITS[backbone] | given)
    nn.init.normal_(small.pos_embed, std=0.2)  # positions must be told apart from the first step on
    small.pretrained_cfg = dict(DIGITS_CFG)
    return small


def _adapted(
    module: nn.Module,
    num_classes: int | None,
    img_size: int | tuple[int, int] | None,
    drop_path_rate: float,
    pretrained: bool,
) -> nn.Module:
    """A module that the user made, with the classifier and the image size that are asked for."""
    if pretrained:
        raise UserError("weights=True downloads by timm name; this backbone is a module.")
    backbone = family_of(module)(module)
    shape = backbone.inspect()
    own = backbone.drop_path_rate
    if drop_path_rate not in (0.0, own):
        raise UserError(f"drop_path_rate: the module brings its own, {own}; make it with {drop_path_rate}.")
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    new_size = None if size is None or tuple(size) == tuple(backbone.image_size) else (size[0], size[1])
    backbone.adapt(None if num_classes == shape.outputs else num_classes, new_size)
    return module


def _from_timm(name: str, pretrained: bool, given: dict[str, Any]) -> nn.Module:
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), 3)
        hint = f"Similar: {', '.join(near)}. " if near else ""
        raise UserError(f"Unknown timm model {name!r}. {hint}The nearest that works: {nearest(name)}.")
    logging.getLogger("timm").setLevel(logging.WARNING)
    if torch.get_default_device().type != "meta":  # where it would cost memory to find out
        check_name(name)
    try:
        return timm.create_model(name, pretrained=pretrained, **given)
    except TypeError as error:
        raise UnsupportedBackbone(f"{name} is not a VisionTransformer that takes these settings ({error}).") from None
    except (AssertionError, RuntimeError) as error:
        raise UserError(f"timm could not make {name}: {error}") from None
    except OSError as error:
        raise WeightsError(f"timm could not download the weights of {name}: {error}") from None


def _from_source(name: str, pretrained: bool, given: dict[str, Any]) -> nn.Module:
    """hf-hub:USER/NAME or local-dir:PATH, as timm takes them: config.json says what it is."""
    logging.getLogger("timm").setLevel(logging.WARNING)
    try:
        return timm.create_model(name, pretrained=pretrained, **given)
    except Exception as error:  # no such place, no network, another config.json, weights that do not fit
        raise WeightsError(f"timm could not make {name} ({type(error).__name__}: {first_line(error)}).") from None


def describe_backbone(backbone: Backbone, name: str | None) -> dict[str, Any]:
    """What `rebuild` needs to make this backbone again; refuses what it could not describe."""
    shape = backbone.inspect()
    changes = {"num_classes": shape.outputs, "img_size": list(backbone.image_size)}
    for known in dict.fromkeys((name, None)):
        described: dict[str, Any] = {"name": known, "changes": changes}
        if known is None:
            described |= {"family": backbone.family, "kwargs": backbone.arguments()}
        with without_memory():
            again = rebuild(described)
        if _fingerprint(backbone.module) == _fingerprint(again):
            return described
    raise UserError(
        "This VisionTransformer cannot be described by its arguments, so it cannot be saved as a checkpoint; "
        "make it by its timm name, or by create({'embed_dim': ..., 'depth': ...}, ...)."
    )


def rebuild(described: Mapping[str, Any]) -> nn.Module:
    """The backbone of a checkpoint's description, with fresh weights."""
    given = described.get("name") or described["kwargs"]
    if isinstance(given, str) and ":" in given:
        raise UserError(f"Unknown timm model {given!r}. A checkpoint names no place elsewhere.")
    return build_backbone(given, **described["changes"], family=described.get("family", "timm_vit"))


def _fingerprint(module: nn.Module) -> list[Any]:
    """What a description must reproduce: shapes of weights, kinds of modules, epsilons, activations."""
    parts = [
        f"{name} {type(m).__name__} {m.extra_repr()}"
        for name, m in module.named_modules()
        if not isinstance(m, (nn.Dropout, nn.Identity)) and "drop_path" not in name
    ]
    return [{name: value.shape for name, value in module.state_dict().items()}, parts]
