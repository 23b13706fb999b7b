"""The early-exit baselines of A-ViT's Table 2; the forms are ours, with A-ViT's training length and loss weights."""

from __future__ import annotations

from dataclasses import replace

from ..config import TrainConfig

_COMMON = TrainConfig(data="", epochs=100, batch_size=1024, lr=5e-4, augment="rand", label_smoothing=0.1)


def act() -> TrainConfig:
    """Layer-wise ACT: cross-entropy of the mean-field output and the ponder cost N + R of the image.

    adaptivit train --recipe act --data IMAGENET --weights DEIT_T.safetensors
    """
    return replace(_COMMON, policy="act", ponder=5e-4)


def confidence() -> TrainConfig:
    """Early exit on the largest probability, trained with the mean of the exits' cross-entropies.

    adaptivit train --recipe confidence --data IMAGENET --weights DEIT_T.safetensors
    """
    return replace(_COMMON, policy="confidence", task=0.0, exits=1.0)


def similarity() -> TrainConfig:
    """Early exit where the output no longer changes, trained like confidence.

    adaptivit train --recipe similarity --data IMAGENET --weights DEIT_T.safetensors
    """
    return replace(confidence(), policy="similarity")


def pondernet() -> TrainConfig:
    """Expected cross-entropy over the exits and a KL to the geometric prior, weight 0.01 as in PonderNet.

    adaptivit train --recipe pondernet --data IMAGENET --weights DEIT_T.safetensors
    """
    return replace(_COMMON, policy="pondernet", task=0.0, expected=1.0, geometric=0.01)
