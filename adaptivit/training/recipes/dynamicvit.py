"""DynamicViT's recipe (its public code): 30 epochs from DeiT, ratio loss 2, distillation 0.5 and 0.5."""

from __future__ import annotations

from ..config import TrainConfig


def paper() -> TrainConfig:
    """Four losses; the backbone at a hundredth of the learning rate, frozen for 5 epochs.

    adaptivit train --recipe dynamicvit --data IMAGENET --weights DEIT_T.safetensors
    A-ViT's Table 3 has 70.9 % at 0.9 GMACs for DeiT-T on ImageNet, by our count at a higher keep ratio than 0.7. Not
    run by us on ImageNet.
    """
    return TrainConfig(
        data="",
        policy="dynamicvit",
        epochs=30,
        batch_size=1024,
        lr=1e-3,
        backbone_lr=0.01,
        freeze_epochs=5,
        ratio=2.0,
        distill=0.5,
        features=0.5,
        mixup=0.8,
        cutmix=1.0,
        label_smoothing=0.1,
    )
