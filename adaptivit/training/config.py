"""Every setting of a training run, as frozen dataclasses. Nothing here imports torch, so that --help is instant."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from .. import tasks
from ..data.augment_config import AugmentConfig
from ..errors import UserError, unknown
from ..utils.coerce import at_least, between, check_size, convert, positive, require
from ..utils.settings import changed, kinds


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule: a linear warm-up, then a cosine."""

    lr: float = 1e-4
    """Peak learning rate of AdamW."""
    min_lr: float = 1e-6
    """Learning rate at the end of the cosine."""
    warmup_epochs: float = 1.0
    """Linear warm-up. Without this flag, where an epoch has fewer than 50 steps: 50, or a tenth of all if fewer."""
    weight_decay: float = 0.05
    """AdamW's weight decay; not on biases, norms, embeddings and gates."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 for no clipping."""
    backbone_lr: float = 1.0
    """The backbone's learning rate as a share of lr, which the policy's own parameters get; 0.01 in DynamicViT; 0
    freezes it, as FastBERT and DeeBERT do for their heads."""
    freeze_epochs: float = 0.0
    """The backbone does not move for so many epochs; 5 in DynamicViT."""
    drop_path: float = 0.0
    """Stochastic depth rate at the last block."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, e.g. 0.999; 0 for none. The average is what is saved."""

    def __post_init__(self) -> None:
        positive("optim.lr", self.lr)
        for name in ("min_lr", "warmup_epochs", "weight_decay", "clip_grad", "backbone_lr", "freeze_epochs"):
            at_least(f"optim.{name}", getattr(self, name), 0)
        for name in ("drop_path", "ema"):
            between(f"optim.{name}", getattr(self, name), 0.0, 1.0)


@dataclass(frozen=True)
class LossConfig:
    """Weights of the loss terms, and their settings."""

    task: float = 1.0
    """Weight of the task's loss on the final output."""
    ponder: float = 0.0
    """Weight of the ponder loss N + r (AHT-ViT's lambda_p, A-ViT's alpha_p)."""
    target_depth: float = 0.0
    """Weight of AHT-ViT's KL between executed and planned depth (lambda_t)."""
    sigma: float = 1.0
    """Width of the planned depth's distribution."""
    mass: Literal["act", "hazard", "crossing"] = "act"
    """How P_actual is made of the scores."""
    kl: Literal["actual_target", "target_actual"] = "actual_target"
    """Direction of that KL."""
    detach: Literal["none", "target", "actual"] = "none"
    """Whether the KL teaches both sides, the supervisor alone (target detached) or the planners alone."""
    prior: float = 0.0
    """Weight of A-ViT's distribution prior (alpha_d)."""
    prior_form: Literal["paper", "reference"] = "paper"
    """Eq. 12, or as the public code computes it."""
    prior_depth: float = 9.0
    """Depth at the centre of the prior."""
    cost: float = 0.0
    """Weight of the squared distance of the mean cost from cost_target."""
    cost_target: float = 0.67
    """The cost that training aims at, as a share of static's MACs."""
    ratio: float = 0.0
    """Weight of DynamicViT's squared distance of the kept share from its ratio, stage by stage."""
    exits: float = 0.0
    """Weight of the mean cross-entropy of the exits after every block (confidence, similarity)."""
    exits_last: float = 1.0
    """Weight of the last exit in that mean, where the others have 1; 0.3 in BranchyNet."""
    self_distill: float = 0.0
    """Weight of the mean KL of the exits from the last one, which it does not teach (FastBERT)."""
    expected: float = 0.0
    """Weight of PonderNet's task loss: the cross-entropy of every exit, weighted by the chance of stopping there."""
    geometric: float = 0.0
    """Weight of PonderNet's KL between that chance and a truncated geometric prior (its beta)."""
    distill: float = 0.0
    """Weight of distillation from the frozen static model; any weight > 0 switches it on."""
    features: float = 0.0
    """Weight of distillation of the kept patches' features after the final norm (DynamicViT)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), (int, float)):
                at_least(f"loss.{field.name}", value, 0)
        positive("loss.sigma", self.sigma)
        share = "a share of static's MACs in (0, 1]"
        require(0 < self.cost_target <= 1, "loss.cost_target", share, self.cost_target)


@dataclass(frozen=True)
class RunConfig:
    """How a run is carried out and logged; none of it changes what is trained."""

    compile: bool = False
    """torch.compile of forward pass and losses as one graph; a minute or more, anew for every change of the method."""
    accumulate: int = 1
    """Take every batch in so many parts, one after the other, to fit it into memory; the step is that of the batch."""
    checkpoint_activations: bool = False
    """Compute blocks again in the backward pass instead of keeping what they computed: less memory, more time."""
    fsdp: bool = False
    """Shard weights, gradients and AdamW's state over the processes (FSDP2), for models that do not fit on one GPU."""
    val_epochs: int = 1
    """Validate after every so many epochs, and after the last one."""
    checkpoint_steps: int = 0
    """Write a checkpoint every so many steps as well as after every epoch; 0 for epochs alone."""
    log_steps: int = 20
    """Log a line every so many steps."""
    tensorboard: bool = False
    """Also write TensorBoard events."""

    def __post_init__(self) -> None:
        for name in ("accumulate", "val_epochs", "log_steps"):
            at_least(f"run.{name}", getattr(self, name), 1)
        at_least("run.checkpoint_steps", self.checkpoint_steps, 0)


@dataclass(frozen=True)
class TrainConfig:
    """Fine-tune a backbone into an adaptive model.

    Example: adaptivit train --data photos/ --backbone deit_tiny_patch16_224 --weights deit_tiny.safetensors
    --recipe aht-balanced --epochs 10
    """

    data: str
    """Image folder (train/CLASS/*.jpg and val/..., or CLASS/*.jpg to be split), .npz with train_x, train_y, folder of
    mosaics, .tar shards (a folder, or x-{000..009}.tar), or hf:PATH; see docs/guide/data.md."""
    backbone: str = "deit_tiny_patch16_224"
    """timm name of the VisionTransformer, or hf-hub:NAME, local-dir:PATH with their weights."""
    policy: str = "aht"
    """Policy and its settings, e.g. aht:threshold=0.9,straight_through=true (listed below). Without --recipe it has the
    losses and settings of its own recipe, beside these flags."""
    recipe: str | None = None
    """Start from a named recipe (listed below); the other flags override it."""
    task: str = tasks.DEFAULT
    """What is predicted: classification, or a task of your own (--import)."""
    weights: str | None = None
    """Starting weights: .safetensors or .pth in timm's keys, or a checkpoint directory of ours."""
    teacher: str | None = None
    """The static model to distil from (file or directory); default: the starting weights."""
    out: str = "runs/train"
    """Run directory: config, log, checkpoints, the final model."""
    resume: bool = False
    """Go on with the interrupted run in --out."""
    img_size: int | None = None
    """Image size in pixels; default: the backbone's. Another size resizes the position embedding."""
    epochs: int = 50
    """Passes over the training images."""
    batch_size: int = 128
    """Images a step, over all processes. Without this flag halved while an epoch has fewer than 16 steps."""
    gate_init: bool = True
    """Set the gate's start on one batch, so that halting begins near the last block."""
    val_split: float = 0.1
    """Share of the training images held out where the data has no val split."""
    allow_corrupt: bool = False
    """Leave out images that cannot be read instead of stopping."""
    seed: int = 0
    """Everything random follows from it: initial head, data order, augmentation, drop path."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 autocast on a GPU and fp32 on a CPU by default."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    workers: int = 0
    """Data-loading processes."""
    optim: OptimConfig = OptimConfig()
    augment: AugmentConfig = AugmentConfig()
    loss: LossConfig = LossConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self) -> None:
        if not tasks.known(self.task):
            raise unknown("task", self.task, tasks.names())
        check_size(self.img_size)
        for name in ("epochs", "batch_size"):
            at_least(name, getattr(self, name), 1)
        for name in ("workers", "seed"):
            at_least(name, getattr(self, name), 0)
        between("val_split", self.val_split, 0.0, 1.0)


# What the command line leaves to the number of images where no flag says it.
FOLLOW = ("batch_size", "optim.warmup_epochs")
EPOCH, WARM, FEW = 16, 50, 200  # steps: of an epoch and of a warm-up at least; in all, below which there is a warning


def fitted(config: TrainConfig, images: int, processes: int, follow: Collection[str]) -> TrainConfig:
    """A batch size and a warm-up for so few images, of those that may follow their number (FOLLOW)."""
    size = config.batch_size
    parts = processes * config.run.accumulate * (2 if config.augment.mixup or config.augment.cutmix else 1)
    while "batch_size" in follow and size % (2 * parts) == 0 and images < (EPOCH if size >= 16 else 1) * size:
        size //= 2
    steps, warm = max(images // size, 1), config.optim.warmup_epochs
    if "optim.warmup_epochs" in follow and steps < WARM and warm:
        warm = min(max(warm, WARM / steps), config.epochs / 10)
    return changed(config, {"batch_size": size, "optim.warmup_epochs": warm})


# What a method brings of its own when methods are compared under one recipe: its losses, but not distillation.
LOSSES = tuple(f"loss.{field.name}" for field in fields(LossConfig) if field.name not in ("distill", "features"))
# Settings that do not change the figures of a run: they may differ when it is resumed.
FREE = frozenset(
    {"out", "resume", "recipe", "workers", "device", *(f"run.{field.name}" for field in fields(RunConfig))}
)

GROUPS = {"optim": OptimConfig, "augment": AugmentConfig, "loss": LossConfig, "run": RunConfig}
# Names of settings before 0.2, or without their group -> names now; empty for settings that are gone.
RENAMED = {field.name: f"{group}.{field.name}" for group, cls in GROUPS.items() for field in fields(cls)}
RENAMED |= {"augment": "augment.kind", "augment_on": "augment.on", "random_erasing": "augment.erasing"}
RENAMED |= {"budget": "loss.cost", "budget_share": "loss.cost_target", "calibrate": "gate_init"}
del RENAMED["task"]  # a name again, of the task
RENAMED |= dict.fromkeys(("mass_tau", "ponder_form", "distill_temperature"), "")


def wrong_name(kind: str, name: str, valid: Iterable[str]) -> UserError:
    """The error for a setting that does not exist: its new name, or the nearest."""
    if name not in RENAMED:
        return unknown(kind, name, valid)
    return UserError(f"Unknown {kind} {name!r}: it is " + (f"{RENAMED[name]!r} now." if RENAMED[name] else "gone."))


def with_settings(config: TrainConfig, given: Mapping[str, Any], kind: str = "setting") -> TrainConfig:
    """Change settings by dotted names; values may be texts. An error names the setting."""
    known = kinds(type(config))
    for name in given:
        if name not in known:
            raise wrong_name(kind, name, known)
    return changed(config, {name: convert(name, value, known[name]) for name, value in given.items()})
