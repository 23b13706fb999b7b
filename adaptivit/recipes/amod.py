"""A-MoD's recipes (App. A.3): 100 epochs from a pretrained checkpoint, batch 128, lr 1e-5, warm-up and cosine.

The length of the warm-up is ours.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import TrainConfig


def amod() -> TrainConfig:
    """Attention routing: no parameter of its own, the task loss alone.

    adaptivit train --recipe amod --data IMAGENET --weights DEIT_T.safetensors
    The paper reports 71.8 % at 0.92 GMACs for DeiT-T at 50 % capacity. Not run by us on ImageNet.
    """
    return TrainConfig(data="", policy="amod:capacity=0.5", epochs=100, batch_size=128, lr=1e-5, warmup_epochs=5)


def mod() -> TrainConfig:
    """Standard routing: one linear router a routed block, learned through its gate.

    adaptivit train --recipe mod --data IMAGENET --weights DEIT_T.safetensors
    Not run by us on ImageNet.
    """
    return replace(amod(), policy="mod:capacity=0.5")
