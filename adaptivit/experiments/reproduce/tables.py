"""Our own tables. The peers that they show, and what all runs on a data set have in common: once, at the top. Which
AHT-ViT, and how every method comes to a budget: equal_cost.py.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from .equal_cost import AHT, AHT_SAMPLED, TITLES, adding, at, run_at, saving
from .run import Run, Table

# The two peers beside it in the main rows and in the front, best first.
BEST_PEERS = ("fold", "tome")

CIFAR100: Mapping[str, Any] = {
    "backbone": "deit_tiny_patch16_224",
    "epochs": 10,
    "batch_size": 256,
    "optim.lr": 1e-4,
    "optim.weight_decay": 0.05,
    "optim.warmup_epochs": 1.0,
    "augment.kind": "rand",
    "loss.distill": 1.0,
    "val_split": 0.1,
    "run.val_epochs": 5,  # it runs in float32 and would take a third of the time
}
IMAGENET_ADAPT: Mapping[str, Any] = {
    "backbone": "deit_tiny_patch16_224",
    "epochs": 4,
    "batch_size": 64,
    "optim.lr": 3e-5,
    "optim.warmup_epochs": 0.5,
    "augment.kind": "rand",
    "loss.distill": 1.0,
    "val_split": 0.05,
}
DIGITS: Mapping[str, Any] = {
    "backbone": "digits_vit",
    "epochs": 3,
    "batch_size": 32,
    "optim.lr": 1e-3,
    "optim.warmup_epochs": 0.5,
    "augment.kind": "none",
    "loss.distill": 1.0,
}
ABLATION_EPOCHS, ABLATED = 5, 0.52
# The first fine-tuning on CIFAR-100, from ImageNet's weights; what goes on from it takes smaller steps.
FIRST: Mapping[str, Any] = {"optim.lr": 3e-4, "epochs": 20}
# The paper's gate in aht_merge, and one that is not sharp: rows of the ingredients' table.
SLOPE = "surrogate=score,surrogate_width=0.25,center_per_image=0"
PAPERS_GATE = (
    f"gate=shared,gamma=1,halt_point=after,halting_blocks={'+'.join(map(str, range(11)))},start_at=depth,{SLOPE}"
)
LEARNS_SLOWLY = f"gamma=4,{SLOPE}"
# The same with more of everything: what static gains by it is in `cifar100-static`.
MIXED: Mapping[str, Any] = {"augment.mixup": 0.8, "augment.cutmix": 1.0}
LONGER: Mapping[str, Any] = {**FIRST, **MIXED, "epochs": 40}
SHARES = (0.83, 0.67, 0.52)  # AHT-ViT's three configurations: -17 %, -33 %, -48 %

STATIC, TRAINED_ON = "static", "static, trained on"


def _first(**change: Any) -> tuple[Run, Run]:
    """What every other run starts from, and the same model trained for as long as they are."""
    return Run(STATIC, "static", change={"loss.distill": 0.0} | change), Run(TRAINED_ON, "static", start=STATIC)


def _protocol(
    epochs: int, first: str = f"on CIFAR-100 for {FIRST['epochs']} epochs at lr {FIRST['optim.lr']:g}"
) -> str:
    """How the rows of a table were trained; `epochs` is how long they go on."""
    return (
        f"static is fine-tuned from --weights without distillation, {first}. Every method, static too (the row "
        f"`static, trained on`, which differences are against), then goes on from it for {epochs} epochs under the "
        "same settings and is distilled from it. Cost is held by each method's own means; where settings do not fix "
        "it, the share of static's MACs is met by calibration (a shift of the halting score) on up to 512 validation "
        "images, held out of the training images. The test images are used for the report alone."
    )


_GOES_ON = _protocol(CIFAR100["epochs"])
_ABLATED = _protocol(ABLATION_EPOCHS) + " One thing differs between the rows."
_CURVES: Mapping[str, Any] = {"curves": ("accuracy", "mean_depth"), "training": True}
_CIFAR = "CIFAR-100 as an .npz or folder with train and test"


def _cifar(name: str, title: str, runs: Iterable[Run], **more: Any) -> Table:
    given = {"protocol": _GOES_ON, "data": _CIFAR, "shared": CIFAR100, "reference": TRAINED_ON} | more
    given |= _CURVES
    given |= {"time": "3 to 10 minutes a row, about 10 of them side by side on an H200"}
    return Table(name, title, runs=(*_first(**FIRST), *runs), **given)


def _short(name: str, title: str, runs: Iterable[Run], first_settings: Mapping[str, Any] = FIRST, **more: Any) -> Table:
    """Few epochs, and with every seed from the one static model."""
    first = replace(_first(**first_settings)[0], seed=0)
    on = Run(TRAINED_ON, "static", start=STATIC, change={"epochs": ABLATION_EPOCHS})
    given: dict[str, Any] = {"data": _CIFAR, "shared": CIFAR100, "reference": TRAINED_ON, "one_cost": True}
    given |= {"time": "2 to 7 minutes a row, compiling included, 10 to 14 of them side by side on an H200"}
    given |= {**_CURVES, **more}
    given["protocol"] += (
        " All seeds go on from the static model of seed 0, which has seen some of the validation images of other "
        "seeds; these set the cost, nothing else."
    )
    return Table(name, title, runs=(first, on, *runs), **given)


def _on(policy: str, share: float) -> tuple[Run, ...]:
    """A method at a share, going on from the static model."""
    return tuple(run_at(policy, share, start=STATIC))


def _smaller(size: int) -> Run:
    """Static on smaller images: what whoever wants to save would try first."""
    return Run(f"static at {size} px", "static", start=STATIC, change={"img_size": size})


def _versus(shares: Iterable[float], peers: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"AHT-ViT {saving(s)}", f"{TITLES[p]} {saving(s)}") for s in shares for p in peers if at(p, s) is not None
    )


def _main() -> Table:
    peer = BEST_PEERS[0]
    return _cifar(
        "cifar100-main",
        "CIFAR-100, DeiT-T at 224 px: AHT-ViT's three configurations beside static and the best peer",
        [run for share in SHARES for policy in ("aht", peer) for run in _on(policy, share)],
        source="AHT-ViT Tables 3 and 4 on DeiT-T",
        seeds=(0, 1, 2),
        pairs=_versus(SHARES, [peer]),
    )


def _peers() -> Table:
    names = [policy for policy in TITLES if policy != "aht"]
    smaller = (
        Run("static, 8 blocks", "static:depth=8", start=STATIC),
        Run("static, narrower -33 %", "static:share=0.67,by=width", start=STATIC),
        _smaller(192),  # 71 %
        _smaller(176),  # 59 %
    )
    return _cifar(
        "cifar100-peers",
        "CIFAR-100, DeiT-T: every method once at -33 %",
        [*(run for policy in ("aht", *names) for run in _on(policy, 0.67)), *smaller],
        pairs=(*_versus([0.67], names), *(("AHT-ViT -33 %", run.name) for run in smaller)),
    )


def _front() -> Table:
    shares = (0.83, 0.75, 0.67, 0.60, 0.52)
    return _cifar(
        "cifar100-front",
        "CIFAR-100, DeiT-T: the front of AHT-ViT, the two best peers and static on smaller images",
        [
            *(run for share in shares for policy in ("aht", *BEST_PEERS) for run in _on(policy, share)),
            *map(_smaller, (192, 176, 160)),
        ],
        source="AHT-ViT Fig. 3 on DeiT-T",
        pairs=_versus(shares, BEST_PEERS),
    )


def _static() -> Table:
    """What static itself gains by a richer recipe. For choosing, on held-out images."""
    variants: dict[str, Mapping[str, Any]] = {
        "mixup and CutMix": MIXED,
        "mixup and CutMix, lr 5e-4": {**MIXED, "optim.lr": 5e-4},
        "CutMix": {"augment.cutmix": 1.0},
        "drop path, smooth labels, averaged weights": {
            "optim.drop_path": 0.1,
            "augment.label_smoothing": 0.1,
            "optim.ema": 0.999,
        },
        "mixup and CutMix, 40 epochs": LONGER,
    }
    return Table(
        "cifar100-static",
        "CIFAR-100, DeiT-T: recipes for the static model",
        f"Fine-tuned from --weights for {FIRST['epochs']} epochs at lr {FIRST['optim.lr']:g} with random crops and "
        "RandAugment, but for what a row names. Choose with --split val: images held out of the training images.",
        (
            Run(STATIC, "static", change={"loss.distill": 0.0, **FIRST}),
            *(
                Run(f"static, {name}", "static", change={"loss.distill": 0.0, **FIRST, **v})
                for name, v in variants.items()
            ),
        ),
        _CIFAR,
        shared=CIFAR100,
        reference=STATIC,
        one_cost=True,
        time="9 minutes for four of 20 epochs side by side on an H200, beside other work; the last takes twice as long",
    )


def _longer() -> Table:
    """Whether what the other tables say holds when static is as good as we can make it."""
    shares, change = (0.67, 0.52), {"epochs": ABLATION_EPOCHS}
    first = f"on CIFAR-100 for {LONGER['epochs']} epochs at lr {LONGER['optim.lr']:g} with mixup and CutMix"
    return _short(
        "cifar100-longer",
        "CIFAR-100, DeiT-T: AHT-ViT and the best peer from a static model that was trained longer",
        [run for s in shares for p in ("aht", BEST_PEERS[0]) for run in run_at(p, s, start=STATIC, change=change)],
        LONGER,
        protocol=_protocol(ABLATION_EPOCHS, first) + " What goes on does so without mixup and CutMix.",
        seeds=(0, 1, 2),
        pairs=_versus(shares, BEST_PEERS[:1]),
        one_cost=False,
        time="static 5 minutes on an H200 beside other work, then 5 minutes for ten rows side by side",
    )


def _one_checkpoint() -> Table:
    shares, one = (0.83, 0.75, 0.67, 0.60, 0.52), "AHT-ViT, one checkpoint"
    along = [
        Run(f"one checkpoint {saving(s)}", AHT_SAMPLED, start=one, train=False, share=s, change={"loss.distill": 0.0})
        for s in shares
    ]
    return _cifar(
        "cifar100-one-checkpoint",
        "CIFAR-100, DeiT-T: one AHT-ViT at every budget beside models trained for it",
        [Run(one, AHT_SAMPLED, start=STATIC), *along, *(run for s in shares for run in _on("aht", s))],
        pairs=tuple((f"one checkpoint {saving(s)}", f"AHT-ViT {saving(s)}") for s in shares),
        protocol=_GOES_ON
        + " `one checkpoint` is trained once, with a budget drawn for every image; calibrated budgets alone differ "
        "between its rows.",
    )


def _ingredients() -> Table:
    """From the paper's form to ours, one ingredient after the other; then what else was thought of, and peers."""
    drop = "removal=drop"
    steps = {
        "the paper's": "aht:balanced",
        "straight-through": "aht:budget",
        "reads class attention": adding(AHT, f"{PAPERS_GATE},{drop},feature=class_row"),
        "reads worth": adding(AHT, f"{PAPERS_GATE},{drop}"),
        "folds": adding(AHT, PAPERS_GATE),
        "decides inside the block": adding(AHT, f"{LEARNS_SLOWLY},start_at=depth"),
        "starts at the budget": adding(AHT, LEARNS_SLOWLY),
        "sharp gates": adding(AHT, "center_per_image=0"),
        "against its image": AHT,
        "gates that do not learn": adding(AHT, "straight_through=false,loss.cost=0,loss.target_depth=0"),
        "sampled budgets": AHT_SAMPLED,
        "three supervisors": adding(AHT, "halting_blocks=3+6+9"),
    }
    share, runs = ABLATED, []
    more: dict[str, Any] = {"start": STATIC, "change": {"epochs": ABLATION_EPOCHS}}
    for name, method in steps.items():
        aimed = method if "loss.cost_target" in method else adding(method, f"loss.cost_target={share}")
        runs.append(Run(f"AHT-ViT, {name}", aimed, share=share, **more))
    for policy in ("fold", "tome", "evit"):
        runs += run_at(policy, share, **more)
    runs.append(Run("fold in three blocks", f"fold:budget={share},blocks=3+6+9", **more))
    return _short(
        "cifar100-ingredients",
        f"CIFAR-100, DeiT-T at {saving(share)}: what each ingredient of AHT-ViT brings",
        runs,
        protocol=_protocol(ABLATION_EPOCHS)
        + " Rows of AHT-ViT add one ingredient after the other, up to `against its image`, which is the AHT-ViT of the "
        "other tables; those after it change that one.",
    )


def _imagenet_adapt() -> Table:
    runs = [Run(STATIC, "static", train=False), Run("static, adapted", "static")]
    for share in (0.80, 0.75, 0.67, 0.60, 0.52):
        few = share == 0.75  # AHT-ViT's own aim, and fold's beside it
        for policy in ("aht", "fold") if few else ("aht", "avit", "amod", "dynamicvit", "evit", "tome", "fold"):
            runs += run_at(policy, share, ", no training", train=False)
            runs += run_at(policy, share, ", adapted")
    shares = (0.80, 0.67, 0.60, 0.52)
    versus = [
        (f"{TITLES[p]} {saving(s)}, adapted", "static, adapted")
        for p in ("aht", "fold")
        for s in (0.80, 0.75, 0.67, 0.60, 0.52)
    ]
    versus += [("AHT-ViT -25 %, adapted", "fold -25 %, adapted")]
    versus += [
        (f"AHT-ViT {saving(s)}, adapted", f"{TITLES[p]} {saving(s)}, adapted")
        for s in shares
        for p in ("avit", "amod", "dynamicvit", "evit", "tome", "fold")
        if at(p, s) is not None
    ]
    return Table(
        "imagenet-adapt",
        "ImageNet, DeiT-T: methods at four budgets, AHT-ViT and fold at five, as they are and after 3 images a class",
        "All start from --weights, the public DeiT-T, and are distilled from it. `no training` is the policy on these "
        "weights. Budgets are calibrated on validation images held out of `train`. The report is on `test` alone.",
        tuple(runs),
        "a folder with train/ (imagenet/adapt) and test/ (imagenet/eval)",
        shared=IMAGENET_ADAPT,
        reference=STATIC,
        pairs=tuple(versus),
        time="2 minutes a row, a few of them side by side on an H200",
    )


def _digits() -> Table:
    methods = {
        "AHT-ViT": adding(AHT, "halting_blocks=3+4,loss.cost_target=0.5"),
        "A-ViT": "avit",
        "EViT": "evit:keep=0.6",
        "fold": "fold:budget=0.5",
    }
    return Table(
        "digits",
        "Handwritten digits: four methods at about half the work, on a CPU and without a file",
        _protocol(DIGITS["epochs"], f"for {DIGITS['epochs']} epochs").partition(" Cost is held")[0]
        + " Nothing is calibrated afterwards. The test digits are used for the report alone.",
        (*_first(), *(Run(name, method, start=STATIC) for name, method in methods.items())),
        "digits",
        time="6 minutes on two CPU cores",
        shared=DIGITS,
        reference=TRAINED_ON,
    )


def _ablation(name: str, what: str, variants: Mapping[str, str], calibrated: bool = True, **more: Any) -> Table:
    """Variants of AHT-ViT at -48 %, where there is something to lose (at -33 % it is level with static): name ->
    settings."""
    base, share = adding(AHT, f"loss.cost_target={ABLATED}"), ABLATED if calibrated else None
    change = {"epochs": ABLATION_EPOCHS}
    runs = [Run(k, adding(base, v), start=STATIC, change=change, share=share) for k, v in variants.items()]
    title = f"AHT-ViT at {saving(ABLATED)} on CIFAR-100, DeiT-T: {what}"
    given: dict[str, Any] = {"source": "left open by AHT-ViT", "protocol": _ABLATED, "one_cost": calibrated}
    return _short(f"ablation-{name}", title, runs, **given | more)


def _values(key: str, values: Iterable[Any], title: str = "", usual: Any = None) -> dict[str, str]:
    """Name -> setting; nothing for the one that AHT-ViT has anyway, so that all tables share that run."""
    name = title or key.rpartition(".")[2]
    return {f"{name} {value}": "" if value == usual else f"{key}={value}" for value in values}


OURS: tuple[Table, ...] = (
    _digits(),
    _static(),
    _main(),
    _longer(),
    _peers(),
    _front(),
    _one_checkpoint(),
    _ingredients(),
    _imagenet_adapt(),
    _ablation(
        "threshold",
        "the threshold T",
        _values("threshold", (0.8, 1.0, 1.2), "T", usual=1.0),
        calibrated=False,  # a calibrated shift would undo T
        protocol=_ABLATED.partition(" Cost is held")[0] + " The cost loss holds the cost; nothing is calibrated.",
    ),
    _ablation(
        "sigma", "the width of the planned depth's distribution", _values("loss.sigma", (0.5, 1.0, 2.0), usual=1.0)
    ),
    _ablation(
        "stages",
        "where the planners sit",
        _values("planner_blocks", ("3", "6", "3+6+9", "2+4+6+8+10"), "stages", usual="3+6+9"),
    ),
    _ablation(
        "planner",
        "the planners' width and context",
        _values("planner_width", (0.25, 0.5, 1.0), usual=0.5) | _values("planner_context", ("class", "none")),
    ),
    _ablation(
        "feature",
        "what the supervisor reads",
        _values("feature", ("merge_score", "class_row", "received"), usual="merge_score")
        # known only when the block is over
        | {f"feature {name}": f"feature={name},halt_point=after" for name in ("fc1", "residual")},
        protocol=_ABLATED + " But fc1 and residual are known only after the block, so that tokens leave later.",
    ),
    _ablation(
        "mass", "how P_actual is made of the scores", _values("loss.mass", ("act", "hazard", "crossing"), usual="act")
    ),
    _ablation(
        "kl",
        "the direction of the KL, and whom it teaches",
        _values("loss.kl", ("actual_target", "target_actual"), usual="actual_target")
        | _values("loss.detach", ("target", "actual")),
    ),
    _ablation(
        "target-depth",
        "with and without the target-depth loss",
        _values("loss.target_depth", (0.0, 0.1, 1.0), "lambda_t", usual=0.1),
        source="AHT-ViT Table 5 on DeiT-T",
        seeds=(0, 1, 2),
    ),
)
