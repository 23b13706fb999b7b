"""Which of timm's names work, found on the meta device: before a weight is made, or a gigabyte of them."""

from __future__ import annotations

import functools

import timm
import torch

from ..errors import UnsupportedBackbone
from ..utils.hardware import without_memory
from .families import FAMILIES, family_of

_FALLBACK = "deit_tiny_patch16_224"


def check_name(name: str) -> None:
    """Refuse a model of timm's that no family drives: the part that is the reason, and the nearest name that works."""
    if ":" in name:  # hf-hub:, local-dir:
        return
    plain = name.partition(".")[0]  # without the tag of its weights
    own = timm.models.model_entrypoint(plain).__module__.startswith("timm.")
    if own and (reason := _refusal(plain, len(FAMILIES))):
        raise UnsupportedBackbone(f"{name} cannot be made adaptive. {reason} The nearest that works: {nearest(plain)}.")


def nearest(name: str) -> str:
    """The ViT of timm's that works and shares most words with this name, and the plainest of those."""
    words = set(name.lower().replace("-", "_").partition(".")[0].split("_"))
    vits = [n for module in ("vision_transformer", "deit") for n in timm.list_models(module=module)]
    shared = {n: len(words & set(n.split("_"))) for n in vits if not n.startswith("test_")}
    near = sorted(
        (n for n in shared if shared[n] and n != name), key=lambda n: (-shared[n], "patch16" not in n, len(n))
    )
    return next((n for n in near[:8] if _refusal(n, len(FAMILIES)) is None), _FALLBACK)


@functools.cache
def _refusal(name: str, families: int) -> str | None:
    """Why no family drives this model; None where one does. `families`: more may have been added since."""
    with torch.random.fork_rng(devices=[]), without_memory():
        module = timm.create_model(name)
    try:
        family_of(module)(module).inspect()
    except UnsupportedBackbone as error:
        return str(error)
    return None
