"""EViT's recipe (its public code): 30 epochs from DeiT, keep rate 1 until epoch 10, then down by a cosine."""

from __future__ import annotations

from ..config import TrainConfig


def paper() -> TrainConfig:
    """The task loss alone; the keep rate falls from epoch 10 to 25.

    adaptivit train --recipe evit --data IMAGENET --weights DEIT_T.safetensors
    Published for DeiT-S on ImageNet: 79.5 % at 3.0 GMACs. Not run by us on ImageNet.
    """
    return TrainConfig(
        data="",
        policy="evit:warm_epochs=10,shrink_epochs=15",
        epochs=30,
        batch_size=1024,
        lr=2e-5,
        mixup=0.8,
        cutmix=1.0,
        label_smoothing=0.1,
    )
