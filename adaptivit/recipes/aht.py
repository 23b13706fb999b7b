"""AHT-ViT's recipes (Sec. 3.5 and Table 2): 50 epochs, AdamW 1e-4, cosine, weight decay 0.05, RandAugment."""

from __future__ import annotations

from dataclasses import replace

from ..config import TrainConfig

_PAPER = TrainConfig(
    data="",
    backbone="deit_small_patch16_224",
    policy="aht",
    epochs=50,
    batch_size=1024,
    lr=1e-4,
    weight_decay=0.05,
    augment="rand",
)


def high_accuracy() -> TrainConfig:
    """lambda_p = 1e-3, lambda_t = 1.0.

    adaptivit train --recipe aht-high-accuracy --data IMAGENET --weights DEIT_S.safetensors
    The paper reports 79.8 % at 3.8 GMACs (static 79.9 at 4.6) on ImageNet. Not run by us. The batch size is ours:
    the paper gives none.
    """
    return replace(_PAPER, ponder=1e-3, target_depth=1.0)


def balanced() -> TrainConfig:
    """lambda_p = 5e-2, lambda_t = 0.5.

    adaptivit train --recipe aht-balanced --data IMAGENET --weights DEIT_S.safetensors
    The paper reports 79.4 % at 3.1 GMACs on ImageNet. Not run by us.
    """
    return replace(_PAPER, ponder=5e-2, target_depth=0.5)


def high_efficiency() -> TrainConfig:
    """lambda_p = 1e-2, lambda_t = 0.2, as printed (smaller than balanced's lambda_p, though it is said to be cheaper).

    adaptivit train --recipe aht-high-efficiency --data IMAGENET --weights DEIT_S.safetensors
    The paper reports 78.5 % at 2.4 GMACs on ImageNet. Not run by us.
    """
    return replace(_PAPER, ponder=1e-2, target_depth=0.2)


def budget() -> TrainConfig:
    """Ours: the task loss reaches the scores, a budget holds the mean cost, the static model teaches.

    adaptivit train --recipe aht-budget --data DATA --weights STATIC --budget-share 0.67
    The ingredients of the quickstart's AHT-ViT; the planners and their loss are the paper's. Needs a static model of
    the same classes as --weights or --teacher. Not run by us on ImageNet.
    """
    return replace(
        _PAPER,
        policy="aht:straight_through=true",
        batch_size=256,
        target_depth=0.1,
        budget=10.0,
        budget_share=0.67,
        distill=1.0,
    )
