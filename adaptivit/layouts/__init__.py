"""How live tokens are stored and moved: `masked` (training, reference), `packed` (ragged, no padding), `gathered`."""

from __future__ import annotations

from .base import Layout, RowSchedule
from .gathered import Gathered
from .masked import Masked
from .packed import Packed
from .similarity import Match, Similarity
from .triton import GatheredOnDevice, HeadRows, PackedOnDevice

LAYOUTS: dict[str, type[Layout]] = {"masked": Masked, "packed": Packed, "gathered": Gathered}

__all__ = [
    "LAYOUTS",
    "Gathered",
    "GatheredOnDevice",
    "HeadRows",
    "Layout",
    "Masked",
    "Match",
    "Packed",
    "PackedOnDevice",
    "RowSchedule",
    "Similarity",
]
