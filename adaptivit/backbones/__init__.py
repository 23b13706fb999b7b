"""Backbone families: how a model embeds images, runs a block and reads out. A family is one file (protocol.py)."""

from __future__ import annotations

from torch import nn

from ..errors import UnsupportedBackbone, unknown
from .protocol import Backbone
from .timm_vit import TimmViT

FAMILIES: list[type[Backbone]] = [TimmViT]  # asked in turn


def family_of(module: nn.Module) -> type[Backbone]:
    """The family that drives this module."""
    for family in FAMILIES:
        if family.drives(module):
            return family
    raise UnsupportedBackbone(
        f"Expected a timm VisionTransformer, got {type(module).__module__}.{type(module).__name__}. "
        "Use a model such as deit_tiny_patch16_224, vit_base_patch16_224 or vit_small_patch14_dinov2, or add its "
        "family to adaptivit.backbones.FAMILIES."
    )


def family_named(name: str) -> type[Backbone]:
    """The family that a checkpoint names."""
    for family in FAMILIES:
        if family.family == name:
            return family
    raise unknown("backbone family", name, [family.family for family in FAMILIES])
