"""The papers' tables and figures, each a list of recipes (adaptivit/training/recipes).

None of them has been run by us: full ImageNet is needed. Figures are top-1 % / GMACs, as printed.
Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any

from ...training.recipes import RECIPES
from .run import Run, Table

_IMAGENET = "ImageNet-1k as a folder with train/ and val/"
_OWN = "Every run has its recipe's own settings and starts from the weights of its backbone; the report is on val."
_SMALL = {"backbone": "deit_small_patch16_224"}
_LR = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)


def _recipes(name: str, title: str, source: str, rows: dict[str, str], weights: str = "", **more: Any) -> Table:
    """Rows: recipe -> what the paper reports."""
    runs = tuple(Run(recipe, recipe=recipe, weights=weights, paper=paper) for recipe, paper in rows.items())
    given = {"protocol": _OWN, "data": _IMAGENET, "runs": runs} | more
    return Table(name, title, source=source, **given)


def _transfer(data: str, title: str, static: str, aht: str) -> Table:
    return Table(
        f"aht-table-4-{data}",
        f"AHT-ViT balanced, trained on ImageNet, fine-tuned on {title}",
        "static starts from DeiT-S, AHT-ViT from `aht-balanced` in the folder --weights: the directory of the model "
        "that aht-table-3 trained. Both are fine-tuned as on ImageNet; the paper does not say how.",
        (
            Run("static", recipe="static-aht", paper=static),
            Run("AHT-ViT", recipe=f"aht-{data}", weights="aht-balanced", paper=aht),
        ),
        f"{title} as a folder with train/ and val/ or test/",
        source="AHT-ViT Table 4",
        reference="static",
    )


def _routing(percent: str) -> dict[str, str]:
    """Rows of A-MoD's Table 1 at a capacity."""
    return {name: recipe.paper for name, recipe in RECIPES.items() if recipe.paper and name.endswith(f"-{percent}")}


def _untrained() -> Table:
    printed = {
        "tiny": (4.45, 52.6, 0.42, 0.97),
        "small": (0.23, 13.49, 0.16, 0.35),
        "base": (69.91, 78.88, 62.25, 66.62),
        "large": (0.43, 49.06, 0.2, 6.03),
    }
    runs = []
    for size, values in printed.items():
        names = (f"mod-{size}-50", f"amod-{size}-50", f"mod-{size}-12.5", f"amod-{size}-12.5")
        runs += [Run(n, recipe=n, train=False, paper=f"{v}") for n, v in zip(names, values, strict=True)]
    protocol = "The weights of each backbone as they are, routed, without training; MoD's routers are random."
    title = "MoD and A-MoD adapted without training"
    return Table("amod-table-3", title, protocol, tuple(runs), _IMAGENET, source="A-MoD Table 3")


def _token_methods() -> Table:
    def tome(size: str, paper: str) -> Run:
        change = {"policy": "tome:r=8", "loss.distill": 1.0}
        return Run(f"ToMe, {size}", recipe=f"amod-{size}-50", change=change, paper=paper)

    runs = (
        Run("A-MoD, tiny", recipe="amod-tiny-50", paper="71.8 / 0.9"),
        Run("A-ViT, tiny", recipe="avit-paper", paper="71.0 / 0.8"),
        Run("DynamicViT, tiny", recipe="dynamicvit", paper="70.9 / 0.9"),
        tome("tiny", "71.69 / 0.93"),
        Run("A-MoD, small", recipe="amod-small-50", paper="78.66 / 3.42"),
        Run("A-ViT, small", recipe="avit-paper-small", paper="78.6 / 3.6"),
        Run("DynamicViT, small", recipe="dynamicvit", change=_SMALL, paper="78.3 / 3.4"),
        tome("small", "79.68 / 3.43"),
    )
    protocol = (
        "Every method has its own recipe; the paper took the peers' figures from their papers. ToMe, for which no "
        "paper here has a recipe, is trained as A-MoD and distilled from the static model."
    )
    title = "A-MoD beside methods that prune and merge tokens"
    return Table("amod-table-4", title, protocol, runs, _IMAGENET, source="A-MoD Table 4")


def _rates() -> Table:
    runs = tuple(Run(f"mod-tiny-50, lr {lr:g}", recipe="mod-tiny-50", change={"optim.lr": lr}) for lr in _LR)
    runs += tuple(Run(f"amod-tiny-50, lr {lr:g}", recipe="amod-tiny-50", change={"optim.lr": lr}) for lr in _LR)
    protocol = f"{_OWN} The learning rates are ours: the figures print none."
    title, source = "Learning rates of standard and attention routing", "A-MoD Fig. 8 and 9"
    return Table("amod-figure-8", title, protocol, runs, _IMAGENET, source=source, curves=("top1",))


PAPERS: tuple[Table, ...] = (
    _recipes(
        "aht-table-3",
        "AHT-ViT's three configurations, DynamicViT and A-ViT on DeiT-S",
        "AHT-ViT Tables 2 and 3, Fig. 3",
        {
            "static-aht": "79.9 / 4.6",
            "dynamicvit-aht": "79.3 / 2.9",
            "avit-aht": "78.6 / 3.6",
            "aht-high-accuracy": "79.8 / 3.8",
            "aht-balanced": "79.4 / 3.1",
            "aht-high-efficiency": "78.5 / 2.4",
        },
        reference="static-aht",
        protocol="All methods under AHT-ViT's conditions (optimiser, schedule, epochs, augmentation), from DeiT-S.",
    ),
    _transfer("places365", "Places365", "81.6 / 4.6", "80.2 / 2.8"),
    _transfer("cifar100", "CIFAR-100", "90.1 / 4.6", "89.6 / 3.7"),
    _recipes(
        "aht-table-5",
        "AHT-ViT with and without the target-depth loss",
        "AHT-ViT Table 5",
        {"aht-balanced": "79.4 / 3.1", "aht-no-target-depth": "78.8 / 3.4"},
        reference="aht-balanced",
    ),
    _recipes(
        "avit-table-2",
        "A-ViT-T beside other halting mechanisms",
        "A-ViT Table 2",
        {
            "static-avit-tiny": "71.3 / 1.3",
            "act": "71.0 / 1.0",
            "confidence": "65.8 / 1.1",
            "similarity": "69.4 / 1.1",
            "pondernet-tokens": "66.2 / 1.0",
            "dynamicvit": "70.9 / 0.9",
            "avit-paper": "71.0 / 0.8",
        },
        reference="static-avit-tiny",
    ),
    Table(
        "avit-table-3",
        "A-ViT-T and A-ViT-S beside DynamicViT, with and without a distillation token",
        _OWN,
        (
            Run("DeiT-S", recipe="static-avit-small", paper="78.9 / 4.6"),
            Run("DynamicViT-S", recipe="dynamicvit", change=_SMALL, paper="78.3 / 3.4"),
            Run("A-ViT-S", recipe="avit-paper-small", paper="78.6 / 3.6"),
            Run("A-ViT-S, distillation token", recipe="avit-distilled-small", paper="80.7 / 3.6"),
            Run("DeiT-T", recipe="static-avit-tiny", paper="71.3 / 1.2"),
            Run("DynamicViT-T", recipe="dynamicvit", paper="70.9 / 0.9"),
            Run("A-ViT-T", recipe="avit-paper", paper="71.0 / 0.8"),
            Run("A-ViT-T, distillation token", recipe="avit-distilled-tiny", paper="72.4 / 0.8"),
        ),
        _IMAGENET,
        source="A-ViT Table 3",
    ),
    _recipes(
        "avit-figure-7",
        "A-ViT-T's mean depth and accuracy in training, with and without the distribution prior",
        "A-ViT Fig. 7",
        {"avit-paper": "71.0", "avit-no-prior": "6.4 points less"},
        reference="avit-paper",
        curves=("mean_depth", "top1"),
    ),
    _recipes(
        "avit-ablations",
        "A-ViT-T beside sharp halting, the prior alone, and a network a layer",
        "A-ViT Sec. 4.1 and 4.3",
        {
            "avit-paper": "71.0 / 0.8",
            "static-sharp": "1.4 points less",
            "avit-prior-only": "more than 2 points less",
            "avit-network": "0.06 points more",
        },
        reference="avit-paper",
    ),
    _recipes(
        "amod-table-1",
        "A-MoD, MoD and isoFLOP models, four backbones, two capacities",
        "A-MoD Table 1, Fig. 1",
        _routing("50") | _routing("12.5"),
    ),
    _recipes("amod-figure-2", "Convergence at 50 %", "A-MoD Fig. 2", _routing("50"), curves=("top1",)),
    _recipes("amod-figure-6", "Convergence at 12.5 %", "A-MoD Fig. 6", _routing("12.5"), curves=("top1",)),
    _recipes(
        "amod-figure-3",
        "MoD in the later layers alone, Stanford Cars",
        "A-MoD Fig. 3",
        {
            f"{name}-{size}": ""
            for size in ("small", "base")
            for name in ("static-isoflop-cars", "mod-cars", "amod-cars", "amod-cars-later")
        },
        data="Stanford Cars as a folder with train/ and test/",
        curves=("top1",),
    ),
    _untrained(),
    _token_methods(),
    Table(
        "amod-table-5",
        "A-MoD at 70 % capacity beside static DeiT-S",
        _OWN,
        (
            Run("static", recipe="amod-small-70", change={"policy": "static"}, paper="79.6 / 4.6"),
            Run("A-MoD", recipe="amod-small-70", paper="79.63 / 3.8"),
        ),
        _IMAGENET,
        source="A-MoD Table 5",
        reference="static",
    ),
    _recipes(
        "amod-table-6",
        "A-MoD and MoD trained from scratch",
        "A-MoD Table 6",
        {
            "amod-scratch-small": "76.63",
            "mod-scratch-small": "75.90",
            "amod-scratch-base": "73.66",
            "mod-scratch-base": "72.47",
        },
        weights="none",
        protocol="No weights. The epochs are the paper's, everything else is DeiT's recipe; the report is on val.",
    ),
    _recipes(
        "amod-figure-7",
        "A-MoD with and without the score multiplied to the output",
        "A-MoD Fig. 7",
        {"amod-tiny-50": "", "amod-multiply": ""},
        curves=("top1",),
    ),
    _rates(),
)
