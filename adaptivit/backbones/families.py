"""Which backbone families there are, and which one drives a module."""

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
        f"Expected a timm VisionTransformer, got {type(module).__module__}.{type(module).__name__}: "
        f"{_odd_part(module)}. A family of your own is one file, added to adaptivit.backbones.FAMILIES."
    )


def _odd_part(module: nn.Module) -> str:
    """What of a module is not as in a plain ViT."""
    if getattr(module, "rope", None) is not None:
        return "its positions are rotary (`rope`)"
    if not hasattr(module, "blocks"):
        return "it has no `blocks`, one list of transformer blocks on the same tokens"
    return "its class runs its blocks in a way of its own"


def family_named(name: str) -> type[Backbone]:
    """The family that a checkpoint names."""
    for family in FAMILIES:
        if family.family == name:
            return family
    raise unknown("backbone family", name, [family.family for family in FAMILIES])
