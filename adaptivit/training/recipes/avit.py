"""A-ViT's recipes (Sec. 4 and its public code): 100 epochs from DeiT, no mixup, ponder 5e-4.

What the paper leaves to DeiT's repository (label smoothing, random erasing) is as there; the batch size is ours.
"""

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
_GATE = "avit:gate_scale=5,gate_center=10"


def paper() -> TrainConfig:
    """The paper's constants: gate 5 and -10, alpha_d = 0.1, lr 1.5e-3.

    adaptivit train --recipe avit-paper --data IMAGENET --weights DEIT_T.safetensors
    The paper reports 71.0 % at 0.8 GMACs for DeiT-T (static 71.3 at 1.3; Tables 2 and 3). Not run by us. The batch
    size is ours.
    """
    return replace(_COMMON, policy=_GATE, prior=0.1, prior_form="paper", lr=1.5e-3)


def paper_small() -> TrainConfig:
    """The paper's constants for DeiT-S: A-ViT-S.

    adaptivit train --recipe avit-paper-small --data IMAGENET --weights DEIT_S.safetensors
    The paper reports 78.6 % at 3.6 GMACs (static 78.9 at 4.6; Table 3). Not run by us.
    """
    return replace(paper(), backbone="deit_small_patch16_224")


def distilled_tiny() -> TrainConfig:
    """A-ViT-T with a distillation token: the paper's constants on distilled DeiT-T.

    adaptivit train --recipe avit-distilled-tiny --data IMAGENET --weights DEIT_T_DISTILLED.safetensors
    The paper reports 72.4 % at 0.8 GMACs (Table 3). It says nothing of a teacher in this training: both heads learn
    from the labels here, --distill 1 adds the static model as a teacher. Not run by us.
    """
    return replace(paper(), backbone="deit_tiny_distilled_patch16_224")


def distilled_small() -> TrainConfig:
    """A-ViT-S with a distillation token: the paper's constants on distilled DeiT-S.

    adaptivit train --recipe avit-distilled-small --data IMAGENET --weights DEIT_S_DISTILLED.safetensors
    The paper reports 80.7 % at 3.6 GMACs (Table 3). No teacher, as in avit-distilled-tiny. Not run by us.
    """
    return replace(paper(), backbone="deit_small_distilled_patch16_224")


def no_prior() -> TrainConfig:
    """Fig. 7's ablation: A-ViT-T without the distribution prior, alpha_d = 0.

    adaptivit train --recipe avit-no-prior --data IMAGENET --weights DEIT_T.safetensors
    The paper reports that the prior brings 6.4 points and a mean depth of 9 within a few epochs. Not run by us.
    """
    return replace(paper(), prior=0.0)


def prior_only() -> TrainConfig:
    """Sec. 4.3's ablation: A-ViT-T with the prior alone, alpha_p = 0.

    adaptivit train --recipe avit-prior-only --data IMAGENET --weights DEIT_T.safetensors
    The paper reports a loss of more than 2 points. Not run by us.
    """
    return replace(paper(), ponder=0.0)


def network() -> TrainConfig:
    """Sec. 4.3's ablation: A-ViT-T with a learned network a layer instead of the neuron.

    adaptivit train --recipe avit-network --data IMAGENET --weights DEIT_T.safetensors
    The paper reports +0.06 points for 0.2 M parameters and 12.6 % less throughput. Not run by us.
    """
    return replace(paper(), policy=f"{_GATE},gate=network")


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


def static_tiny() -> TrainConfig:
    """The static DeiT-T under A-ViT's fine-tuning: the baseline of its Tables 2 and 3.

    adaptivit train --recipe static-avit-tiny --data IMAGENET --weights DEIT_T.safetensors
    The paper reports 71.3 % at 1.3 GMACs. Not run by us.
    """
    return replace(paper(), policy="static", ponder=0.0, prior=0.0)


def static_small() -> TrainConfig:
    """The static DeiT-S under A-ViT's fine-tuning: the baseline of its Table 3.

    adaptivit train --recipe static-avit-small --data IMAGENET --weights DEIT_S.safetensors
    The paper reports 78.9 % at 4.6 GMACs. Not run by us.
    """
    return replace(static_tiny(), backbone="deit_small_patch16_224")


def sharp() -> TrainConfig:
    """Sec. 4.1's sharp-halting baseline: the first 8 of DeiT-T's 12 blocks (68 % of its MACs).

    adaptivit train --recipe static-sharp --data IMAGENET --weights DEIT_T.safetensors
    The paper reports 1.4 points less than A-ViT-T, so 69.6 %. Not run by us.
    """
    return replace(static_tiny(), policy="static:share=0.68")


RECIPES = {
    "avit-paper": paper,
    "avit-paper-small": paper_small,
    "avit-distilled-tiny": distilled_tiny,
    "avit-distilled-small": distilled_small,
    "avit-no-prior": no_prior,
    "avit-prior-only": prior_only,
    "avit-network": network,
    "avit-tiny": tiny,
    "avit-small": small,
    "static-avit-tiny": static_tiny,
    "static-avit-small": static_small,
    "static-sharp": sharp,
}
