"""A-MoD's recipes (App. A.3): 100 epochs from a pretrained checkpoint, batch 128, lr 1e-5, warm-up and cosine.

The length of the warm-up is ours. So are, where the paper prints no number: the capacity of Fig. 3, Fig. 7 and Table 6
(0.5), the settings of training from scratch (DeiT's), and what an isoFLOP baseline is: its printed GFLOPs are those of
the first blocks alone (Table 1: 7 and 9 of DeiT-T's 12, 6 and 9 of DeiT-S's and ViT-B's, 13 and 18 of ViT-L's 24).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..config import TrainConfig

BACKBONES = {
    "tiny": "deit_tiny_patch16_224",
    "small": "deit_small_patch16_224",
    "base": "vit_base_patch16_224",
    "large": "vit_large_patch16_224",
}
# Table 1, for each backbone and capacity in %: the isoFLOP share, then (GMACs, top-1) of isoFLOP, MoD and A-MoD.
TABLE_1: dict[tuple[str, str], tuple[float, tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    ("tiny", "50"): (0.76, (0.95, 71.1), (0.92, 69.78), (0.92, 71.8)),
    ("tiny", "12.5"): (0.60, (0.75, 67.4), (0.71, 67.52), (0.71, 69.76)),
    ("small", "50"): (0.76, (3.47, 78.04), (3.42, 77.43), (3.42, 78.66)),
    ("small", "12.5"): (0.51, (2.3, 73.53), (2.6, 76.07), (2.6, 76.98)),
    ("base", "50"): (0.76, (13.21, 79.28), (13.1, 79.5), (13.1, 80.4)),
    ("base", "12.5"): (0.51, (8.8, 77.69), (9.8, 78.49), (9.8, 78.42)),
    ("large", "50"): (0.76, (46.24, 80.28), (45.92, 82.04), (45.92, 82.82)),
    ("large", "12.5"): (0.545, (33.4, 77.64), (34.5, 81.1), (34.5, 81.37)),
}


def amod() -> TrainConfig:
    """Attention routing: no parameter of its own, the task loss alone. DeiT-T at 50 % capacity.

    adaptivit train --recipe amod --data IMAGENET --weights DEIT_T.safetensors
    The paper reports 71.8 % at 0.92 GMACs for DeiT-T at 50 % capacity. Not run by us on ImageNet.
    """
    return TrainConfig(data="", policy="amod:capacity=0.5", epochs=100, batch_size=128, lr=1e-5, warmup_epochs=5)


def mod() -> TrainConfig:
    """Standard routing: one linear router a routed block, learned through its gate. DeiT-T at 50 % capacity.

    adaptivit train --recipe mod --data IMAGENET --weights DEIT_T.safetensors
    The paper reports 69.78 % at 0.92 GMACs. Not run by us on ImageNet.
    """
    return replace(amod(), policy="mod:capacity=0.5")


def amod_70() -> TrainConfig:
    """Table 5: A-MoD on DeiT-S at 70 % capacity.

    adaptivit train --recipe amod-small-70 --data IMAGENET --weights DEIT_S.safetensors
    The paper reports 79.63 % at 3.8 GMACs (static 79.6 at 4.6). Not run by us.
    """
    return replace(amod(), backbone=BACKBONES["small"], policy="amod:capacity=0.7")


def multiply() -> TrainConfig:
    """Fig. 7's variant: A-MoD with the routing score multiplied to the output, DeiT-T at 50 % capacity.

    adaptivit train --recipe amod-multiply --data IMAGENET --weights DEIT_T.safetensors
    The paper reports, in a figure without numbers, that it can slow convergence. Backbone and capacity are ours. Not
    run by us.
    """
    return replace(amod(), policy="amod:capacity=0.5,multiply=true")


def _named(name: str, config: TrainConfig, first: str, given: str, more: str) -> Callable[[], TrainConfig]:
    """A recipe of a family, with a docstring like the others'."""

    def make() -> TrainConfig:
        return config

    make.__doc__ = f"{first}\n\n    adaptivit train --recipe {name} {given}\n    {more} Not run by us.\n    "
    return make


def _table_1() -> dict[str, Callable[[], TrainConfig]]:
    """Table 1, Fig. 1, 2 (50 %) and 6 (12.5 %): every backbone at both capacities beside its isoFLOP model."""
    found = {}
    for (size, percent), (share, *printed) in TABLE_1.items():
        policies = (f"static:share={share}", *(f"{p}:capacity={float(percent) / 100}" for p in ("mod", "amod")))
        names = (f"static-isoflop-{size}-{percent}", f"mod-{size}-{percent}", f"amod-{size}-{percent}")
        titles = ("The isoFLOP model of", "Standard routing (MoD) on", "Attention routing (A-MoD) on")
        for name, policy, title, (gmacs, top1) in zip(names, policies, titles, printed, strict=True):
            first = f"{title} {BACKBONES[size].split('_patch')[0]} at {percent} % capacity (Table 1)."
            more = f"The paper reports {top1} % at {gmacs} GMACs."
            config = replace(amod(), backbone=BACKBONES[size], policy=policy)
            found[name] = _named(name, config, first, "--data IMAGENET --weights WEIGHTS", more)
    return found


def _cars() -> dict[str, Callable[[], TrainConfig]]:
    """Fig. 3: transfer to Stanford Cars, routed alternately, or from the fifth layer on with the first four dense."""
    found = {}
    for size in ("small", "base"):
        variants = {
            f"amod-cars-{size}": ("amod:capacity=0.5", "Attention routing in every second block"),
            f"amod-cars-later-{size}": ("amod:capacity=0.5,first=4", "Attention routing from the fifth layer on"),
            f"mod-cars-{size}": ("mod:capacity=0.5", "Standard routing in every second block"),
            f"static-isoflop-cars-{size}": ("static:share=0.76", "The isoFLOP model"),
        }
        for name, (policy, title) in variants.items():
            first = f"{title}, {BACKBONES[size].split('_patch')[0]} on Stanford Cars (Fig. 3)."
            more = "The paper prints no numbers; with the first four layers dense A-MoD matches isoFLOP there."
            config = replace(amod(), backbone=BACKBONES[size], policy=policy)
            found[name] = _named(name, config, first, "--data CARS --weights WEIGHTS", more)
    return found


def _scratch() -> dict[str, Callable[[], TrainConfig]]:
    """Table 6: training from scratch. Everything but the epochs is DeiT's recipe, since the paper prints nothing."""
    deit = replace(amod(), batch_size=1024, lr=1e-3, min_lr=1e-5, label_smoothing=0.1, random_erasing=0.25)
    deit = replace(deit, mixup=0.8, cutmix=1.0, drop_path=0.1)
    printed = {("small", "amod"): 76.63, ("small", "mod"): 75.90, ("base", "amod"): 73.66, ("base", "mod"): 72.47}
    found = {}
    for (size, policy), top1 in printed.items():
        name, epochs = f"{policy}-scratch-{size}", {"small": 300, "base": 160}[size]
        config = replace(deit, backbone=BACKBONES[size], policy=f"{policy}:capacity=0.5", epochs=epochs)
        title = {"amod": "A-MoD", "mod": "MoD"}[policy]
        first = f"{title} on {BACKBONES[size].split('_patch')[0]} from scratch, {epochs} epochs (Table 6)."
        more = f"The paper reports {top1} %, at a capacity that it does not print."
        found[name] = _named(name, config, first, "--data IMAGENET", more)
    return found


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "amod": amod,
    "mod": mod,
    **_table_1(),
    "amod-small-70": amod_70,
    "amod-multiply": multiply,
    **_cars(),
    **_scratch(),
}
