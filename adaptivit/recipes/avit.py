"""A-ViT's recipes (Sec. 4 and its public code): 100 epochs from DeiT, no mixup, ponder 5e-4."""

from __future__ import annotations

from dataclasses import replace

from ..config import TrainConfig

_COMMON = TrainConfig(
    data="",
    backbone="deit_tiny_patch16_224",
    policy="avit",
    epochs=100,
    batch_size=1024,
    ponder=5e-4,
    augment="rand",
    label_smoothing=0.1,
    random_erasing=0.25,
    calibrate=False,
)


def paper() -> TrainConfig:
    """The paper's constants: gate 5 and -10, alpha_d = 0.1, lr 1.5e-3.

    adaptivit train --recipe avit-paper --data IMAGENET --weights DEIT_T.safetensors
    The paper reports 71.0 % at 0.8 GMACs for DeiT-T (static 71.3 at 1.3). Not run by us. The batch size is ours.
    """
    return replace(_COMMON, policy="avit:gate_scale=5,gate_center=10", prior=0.1, prior_form="paper", lr=1.5e-3)


def tiny() -> TrainConfig:
    """The public code's constants for DeiT-T: gate 10 and -30, prior 1e-3 in its reference form, lr 5e-4.

    adaptivit train --recipe avit-tiny --data IMAGENET --weights DEIT_T.safetensors
    Users' re-runs on ImageNet report 68.3 and 72.1 %. Not run by us.
    """
    policy = "avit:gate_scale=10,gate_center=30"
    return replace(_COMMON, policy=policy, prior=1e-3, prior_form="reference", lr=5e-4)


def small() -> TrainConfig:
    """The public code's constants for DeiT-S: gate 10 and -75, lr 3e-4.

    adaptivit train --recipe avit-small --data IMAGENET --weights DEIT_S.safetensors
    The paper reports 78.6 % at 3.6 GMACs (static 78.9 at 4.6). Not run by us.
    """
    policy = "avit:gate_scale=10,gate_center=75"
    return replace(tiny(), backbone="deit_small_patch16_224", policy=policy, lr=3e-4)
