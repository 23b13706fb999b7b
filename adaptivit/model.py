"""An adaptive ViT: a timm backbone and a policy, run by the loop in forward.py."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from . import layouts, policies
from .backbone import Shape, inspect
from .cost import CostModel
from .errors import UserError
from .forward import forward
from .output import Output
from .preprocess import Preprocessing


class AdaptiveViT(nn.Module):
    """`vit` is the timm model, untouched; `policy` decides. Both are ordinary modules with ordinary parameters."""

    def __init__(self, vit: VisionTransformer, policy: str, settings: dict[str, Any], name: str | None = None) -> None:
        super().__init__()
        self.shape = inspect(vit)
        self.vit = vit
        self.policy_name = policy
        self.backbone_name = name  # the timm name, where there is one
        self.policy = policies.build(policy, self.shape, settings)
        self.whole: Shape | None = None  # of the backbone that this one was cut out of (static:width)
        self.class_names: list[str] | None = None
        self.preprocessing = Preprocessing.of(vit)

    def forward(self, images: Tensor, *, layout: str = "auto", ask: Collection[str] = ()) -> Output:
        """Classify `images` [B, C, H, W].

        layout: "masked", "packed", "gathered" or "auto". ask: facts wanted though they do not act ("plan"), "tokens"
        for the last value of every token, "patches" for those of the patches after the final norm.
        """
        self._check(images)
        chosen = layouts.choose(layout, training=self.training, device=images.device, equal=self.policy.equal)
        return forward(self.vit, self.shape, self.policy, chosen, images, ask)

    def _check(self, images: Tensor) -> None:
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
            what = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise UserError(f"Expected a float tensor [batch, channels, height, width], got {what}.")
        if len(images) == 0:
            raise UserError("Expected at least one image, got an empty batch.")
        if images.shape[1] != self.vit.in_chans:
            raise UserError(f"Expected images with {self.vit.in_chans} channels, got {images.shape[1]}.")
        wanted = next(self.parameters()).dtype
        if images.dtype != wanted and not torch.is_autocast_enabled(images.device.type):
            raise UserError(f"Expected images of {wanted}, as the weights are, got {images.dtype}.")
        patch, embed = self.vit.patch_embed.patch_size, self.vit.patch_embed
        whole = all(s % p == 0 for s, p in zip(images.shape[2:], patch, strict=True))
        if self.vit.dynamic_img_size and not embed.dynamic_img_pad and not whole:
            raise UserError(
                f"Expected sides that are multiples of the {patch[0]} x {patch[1]} px patch, "
                f"got {images.shape[2]} x {images.shape[3]}."
            )
        size = self.vit.patch_embed.img_size
        if not self.vit.dynamic_img_size and size is not None and tuple(images.shape[2:]) != tuple(size):
            raise UserError(
                f"Expected images of {size[0]} x {size[1]} px, got {images.shape[2]} x {images.shape[3]}. "
                "Resize them, or create the model with img_size=..."
            )

    def static_macs(self, output: Output) -> float:
        """MACs an image of the whole backbone with every token everywhere: what a saving is measured against."""
        return CostModel(self.whole or self.shape, output.costs.tokens).static

    @property
    def settings(self) -> dict[str, Any]:
        """The policy's settings."""
        return asdict(self.policy.settings)

    def save_pretrained(self, directory: str | Path, **extra: Any) -> None:
        """Write model.safetensors (timm's keys, and policy.*) and config.json; adaptivit.load reads them."""
        from .checkpoint import save

        save(self, directory, extra)
