"""The early-exit baselines of A-ViT's Table 2; the forms are ours, with A-ViT's training length and loss weights.

The table's figures are for DeiT-T on ImageNet, where its A-ViT has 71.0 % at 0.8 GMACs and a mean depth of 7.23.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import TrainConfig

_COMMON = TrainConfig(data="", epochs=100, batch_size=1024, lr=5e-4, augment="rand", label_smoothing=0.1)


def act() -> TrainConfig:
    """Layer-wise ACT: cross-entropy of the mean-field output and the ponder cost N + R of the image.

    adaptivit train --recipe act --data IMAGENET --weights DEIT_T.safetensors
    A-ViT's Table 2 has 71.0 % at 1.0 GMACs, mean depth 10.01. Not run by us on ImageNet.
    """
    return replace(_COMMON, policy="act", ponder=5e-4)


def confidence() -> TrainConfig:
    """Early exit on the largest probability, trained with the mean of the exits' cross-entropies.

    adaptivit train --recipe confidence --data IMAGENET --weights DEIT_T.safetensors
    A-ViT's Table 2 has 65.8 % at 1.1 GMACs, mean depth 10.63. Not run by us on ImageNet.
    """
    return replace(_COMMON, policy="confidence", task=0.0, exits=1.0)


def similarity() -> TrainConfig:
    """Early exit where the output no longer changes, trained like confidence.

    adaptivit train --recipe similarity --data IMAGENET --weights DEIT_T.safetensors
    A-ViT's Table 2 has 69.4 % at 1.1 GMACs, mean depth 10.68. Not run by us on ImageNet.
    """
    return replace(confidence(), policy="similarity")


def pondernet() -> TrainConfig:
    """Expected cross-entropy over the exits and a KL to the geometric prior, weight 0.01 as in PonderNet.

    adaptivit train --recipe pondernet --data IMAGENET --weights DEIT_T.safetensors
    A-ViT's Table 2 has 66.2 % at 1.0 GMACs, mean depth 9.74, for a form that halts tokens (pondernet-tokens). Not run
    by us on ImageNet.
    """
    return replace(_COMMON, policy="pondernet", task=0.0, expected=1.0, geometric=0.01)


def pondernet_tokens() -> TrainConfig:
    """PonderNet with every token halting by itself, as A-ViT's Table 2 has it.

    adaptivit train --recipe pondernet-tokens --data IMAGENET --weights DEIT_T.safetensors
    A-ViT's Table 2 has 66.2 % at 1.0 GMACs, mean depth 9.74. Not run by us.
    """
    return replace(pondernet(), policy="pondernet:unit=token")


RECIPES = {
    "act": act,
    "confidence": confidence,
    "similarity": similarity,
    "pondernet": pondernet,
    "pondernet-tokens": pondernet_tokens,
}
