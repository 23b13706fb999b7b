"""AHT-ViT's recipes (Sec. 3.5 and Table 2): 50 epochs, AdamW 1e-4, cosine, weight decay 0.05, RandAugment.

The batch size and the warm-up are ours: the paper gives none.
"""

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
    The paper reports 79.8 % at 3.8 GMACs (static 79.9 at 4.6) on ImageNet (Table 3). Not run by us. The batch size is
    ours: the paper gives none.
    """
    return replace(_PAPER, ponder=1e-3, target_depth=1.0)


def balanced() -> TrainConfig:
    """lambda_p = 5e-2, lambda_t = 0.5.

    adaptivit train --recipe aht-balanced --data IMAGENET --weights DEIT_S.safetensors
    The paper reports 79.4 % at 3.1 GMACs on ImageNet (Table 3). Not run by us.
    """
    return replace(_PAPER, ponder=5e-2, target_depth=0.5)


def high_efficiency() -> TrainConfig:
    """lambda_p = 1e-2, lambda_t = 0.2, as printed (smaller than balanced's lambda_p, though it is said to be cheaper).

    adaptivit train --recipe aht-high-efficiency --data IMAGENET --weights DEIT_S.safetensors
    The paper reports 78.5 % at 2.4 GMACs on ImageNet (Table 3). Not run by us.
    """
    return replace(_PAPER, ponder=1e-2, target_depth=0.2)


def no_target_depth() -> TrainConfig:
    """Table 5's ablation: balanced without the target-depth loss, lambda_t = 0.

    adaptivit train --recipe aht-no-target-depth --data IMAGENET --weights DEIT_S.safetensors --ponder TUNED
    The paper reports 78.8 % at 3.4 GMACs on ImageNet, lambda_p tuned again; the value is not printed, so that of
    balanced stands here. Not run by us.
    """
    return replace(balanced(), target_depth=0.0)


def places365() -> TrainConfig:
    """Table 4's transfer of balanced to Places365.

    adaptivit train --recipe aht-places365 --data PLACES365 --weights BALANCED/model
    --weights is the directory that aht-balanced saved on ImageNet; gate and planners come along. The paper reports
    80.2 % at 2.8 GMACs (static 81.6 at 4.6). It says nothing of how it fine-tuned: as on ImageNet here. Not run by us.
    """
    return balanced()


def cifar100() -> TrainConfig:
    """Table 4's transfer of balanced to CIFAR-100, at 224 px.

    adaptivit train --recipe aht-cifar100 --data CIFAR100 --weights BALANCED/model
    --weights is the directory that aht-balanced saved on ImageNet. The paper reports 89.6 % at 3.7 GMACs (static 90.1
    at 4.6). It says nothing of how it fine-tuned: as on ImageNet here. Not run by us.
    """
    return balanced()


def static_peer() -> TrainConfig:
    """The static DeiT-S under AHT-ViT's conditions: the baseline of its Tables 3 and 4.

    adaptivit train --recipe static-aht --data IMAGENET --weights DEIT_S.safetensors
    The paper reports 79.9 % on ImageNet, 81.6 on Places365, 90.1 on CIFAR-100, all at 4.6 GMACs. Not run by us.
    """
    return replace(_PAPER, policy="static")


def dynamicvit_peer() -> TrainConfig:
    """DynamicViT at rho = 0.7 under AHT-ViT's conditions: Table 3's row.

    adaptivit train --recipe dynamicvit-aht --data IMAGENET --weights DEIT_S.safetensors
    The paper reports 79.3 % at 2.9 GMACs on ImageNet. The losses are DynamicViT's own. Not run by us.
    """
    return replace(_PAPER, policy="dynamicvit:keep=0.7", ratio=2.0, distill=0.5, features=0.5)


def avit_peer() -> TrainConfig:
    """A-ViT-S under AHT-ViT's conditions: Table 3's row.

    adaptivit train --recipe avit-aht --data IMAGENET --weights DEIT_S.safetensors
    The paper reports 78.6 % at 3.6 GMACs on ImageNet. The constants are those of A-ViT's public code. Not run by us.
    """
    policy = "avit:gate_scale=10,gate_center=75"
    return replace(_PAPER, policy=policy, ponder=5e-4, prior=1e-3, prior_form="reference", calibrate=False)


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


def folding() -> TrainConfig:
    """Ours: the supervisor reads what a token is worth, and a token that halts folds into its likeness.

    adaptivit train --recipe aht-fold --data DATA --weights STATIC --budget-share 0.67
    As aht-budget, and: worth (attention of the class token times distance from the most similar patch) as the feature,
    a sharp gate for every layer that learns by the slope of its logit, decisions between attention and MLP from a
    quarter of the depth on, and training that starts at the budget. Needs a static model of the same classes as
    --weights or --teacher. With relative=1 on CIFAR-100 (10 epochs, DeiT-T, three seeds; results/cifar100-main):
    84.52, 84.37 and 83.89 % at -17, -33 and -48 % of static's MACs, static 84.52 %; 4 minutes a run beside others on
    an H200. Not run by us on ImageNet.
    """
    policy = "aht:feature=worth,leave=fold,decide=between,spare=3,gate=layer,gamma=30,start=budget"
    return replace(budget(), policy=f"{policy},straight_through=true,slope=logit,tau=0.5")


RECIPES = {
    "aht-high-accuracy": high_accuracy,
    "aht-balanced": balanced,
    "aht-high-efficiency": high_efficiency,
    "aht-no-target-depth": no_target_depth,
    "aht-places365": places365,
    "aht-cifar100": cifar100,
    "static-aht": static_peer,
    "dynamicvit-aht": dynamicvit_peer,
    "avit-aht": avit_peer,
    "aht-budget": budget,
    "aht-fold": folding,
}
