"""Backbone families: how a model embeds images, runs a block and reads out. A family is one file (protocol.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .families import FAMILIES

__all__ = ["FAMILIES"]


def __getattr__(name: str) -> Any:
    """FAMILIES on first use, since it imports torch, and a part of this package checks checkpoints without it."""
    if name in __all__:
        from .families import FAMILIES

        return FAMILIES
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
