"""Dense features of an adaptive ViT: one row for every patch, also those that stopped early.

Shapes: B images, N slots (prefix tokens first), P patches = h w, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..decision import Drop, Merge, Trace
from ..errors import UserError
from ..model import AdaptiveViT


def features(
    model: AdaptiveViT, images: Tensor, *, prefix: bool = False, as_map: bool = False, layout: str = "auto"
) -> Tensor:
    """[B, P, D] the patches of `images` [B, C, H, W] after the final norm: for segmentation, or as a vision tower.

    A token that halted is given as it was when it did; one that merged, as what it merged into is at the end. With
    `prefix` class, distillation and register tokens come first: [B, N, D]. `as_map` gives [B, D, h, w]. Every layout
    gives the same, and gradients flow.
    """
    if prefix and as_map:
        raise UserError("features: prefix tokens have no place on a map; ask for prefix or as_map.")
    output = model(images, layout=layout, aux=("tokens",))
    tokens = output.tokens
    assert tokens is not None
    if any(isinstance(step.decision, Merge) for step in output.trace.steps):
        index = stands_for(output.trace)[..., None].expand_as(tokens)
        tokens = tokens.gather(1, index)
    tokens = model.backbone.norm(tokens)
    if prefix:
        return tokens
    patches = tokens[:, output.trace.num_prefix_tokens :]
    if not as_map:
        return patches
    return patches.transpose(1, 2).unflatten(2, model.backbone.grid(*images.shape[2:]))


def stands_for(trace: Trace) -> Tensor:
    """[B, N] for every token the slot where it is in the end: its own, or that of the token that it merged into."""
    _, images, slots = trace.attended.shape
    slot = torch.arange(slots, device=trace.attended.device).expand(images, slots)
    live, place = torch.ones_like(slot, dtype=torch.bool), slot
    for step in trace.steps:
        decision = step.decision
        if isinstance(decision, Drop):
            live = live & ~decision.leaving
        elif isinstance(decision, Merge):
            goes = torch.where(live & (decision.target >= 0), decision.target, slot)
            place = goes.gather(1, place)
            live = live & (decision.target == slot)
    return place
