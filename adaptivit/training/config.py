"""Every setting of a training run, as a frozen dataclass. Nothing here imports torch, so that --help is instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..data.augment_config import AugmentConfig
from ..errors import UserError
from ..utils.coerce import at_least, between, check_size, positive

# What a method brings of its own when methods are compared under one recipe: its losses.
LOSSES = (
    *("task", "ponder", "ponder_form", "target_depth", "sigma", "mass", "mass_tau", "kl", "detach"),
    *("prior", "prior_form", "prior_depth", "budget", "budget_share", "ratio", "exits", "expected", "geometric"),
)


@dataclass(frozen=True)
class TrainConfig:
    """Fine-tune a backbone into an adaptive model.

    Example: adaptivit train --data photos/ --backbone deit_tiny_patch16_224 --weights deit_tiny.safetensors
    --recipe aht-balanced --epochs 10
    """

    data: str
    """Image folder (train/CLASS/*.jpg and val/..., or CLASS/*.jpg to be split), .npz with train_x, train_y, folder of
    mosaics, .tar shards (a folder, or x-{000..009}.tar), or hf:PATH; see docs/data.md."""
    backbone: str = "deit_tiny_patch16_224"
    """timm name of the VisionTransformer."""
    policy: str = "aht"
    """Policy and its settings, e.g. aht:threshold=0.9,straight_through=true (listed below)."""
    recipe: str | None = None
    """Start from a named recipe (listed below); the other flags override it."""
    weights: str | None = None
    """Starting weights: .safetensors or .pth in timm's keys, or a checkpoint directory of ours."""
    out: str = "runs/train"
    """Run directory: config, log, checkpoints, the final model."""
    resume: bool = False
    """Go on with the interrupted run in --out."""
    img_size: int | None = None
    """Image size in pixels; default: the backbone's. Another size resizes the position embedding."""
    val_split: float = 0.1
    """Share of the training images held out where the data has no val split."""
    val_epochs: int = 1
    """Validate after every so many epochs, and after the last one."""

    epochs: int = 50
    """Passes over the training images."""
    batch_size: int = 128
    """Images a step, over all processes."""
    lr: float = 1e-4
    """Peak learning rate of AdamW."""
    min_lr: float = 1e-6
    """Learning rate at the end of the cosine."""
    warmup_epochs: float = 1.0
    """Linear warm-up."""
    weight_decay: float = 0.05
    """AdamW's weight decay; not on biases, norms, embeddings and gates."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 for no clipping."""
    backbone_lr: float = 1.0
    """The backbone's learning rate as a share of --lr, which the policy's own parameters get; 0.01 in DynamicViT."""
    freeze_epochs: float = 0.0
    """The backbone does not move for so many epochs; 5 in DynamicViT."""
    drop_path: float = 0.0
    """Stochastic depth rate at the last block."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, e.g. 0.999; 0 for none. The average is what is saved."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 autocast on a GPU and fp32 on a CPU by default."""
    compile: Literal["no", "blocks", "whole"] = "no"
    """torch.compile for training: what blocks compute, ready in seconds, or forward pass and losses as one graph, which
    takes a minute or more, anew for every change of the method."""
    accumulate: int = 1
    """Take every batch in so many parts, one after the other, to fit it into memory; the step is that of the batch."""
    checkpoint_activations: bool = False
    """Compute blocks again in the backward pass instead of keeping what they computed: less memory, more time."""
    fsdp: bool = False
    """Shard weights, gradients and AdamW's state over the processes (FSDP2), for models that do not fit on one GPU."""

    label_smoothing: float = 0.0
    """Label smoothing of the cross-entropy."""
    augment: Literal["none", "flip", "pad", "crop", "rand"] = "rand"
    """Nothing; mirror; mirror and a random shift by up to 1/8 (black from outside); random resized crop and mirror; the
    same with RandAugment."""
    augment_on: Literal["auto", "cpu", "device"] = "auto"
    """Where training images are augmented: one by one on the CPU, or whole batches on the device, for arrays. auto: on
    the device where that is a GPU and has room for the arrays."""
    crop_scale: float = 0.35
    """Smallest share of an image's area that the random resized crop takes."""
    color_jitter: float = 0.0
    """Brightness, contrast and saturation change by a factor of 1 plus or minus up to this."""
    rand_magnitude: int = 9
    """RandAugment's magnitude, of 30."""
    random_erasing: float = 0.0
    """Probability of erasing a random rectangle."""
    mixup: float = 0.0
    """Mixup's alpha; off by default, since A-ViT found that it hurts halting."""
    cutmix: float = 0.0
    """CutMix's alpha; off by default."""

    task: float = 1.0
    """Weight of the cross-entropy of the final logits."""
    ponder: float = 0.0
    """Weight of the ponder loss (AHT-ViT's lambda_p, A-ViT's alpha_p)."""
    ponder_form: Literal["remainder", "expected"] = "remainder"
    """Its differentiable form: N + r (A-ViT), or the mean of the halting distribution."""
    target_depth: float = 0.0
    """Weight of AHT-ViT's KL between executed and planned depth (lambda_t)."""
    sigma: float = 1.0
    """Width of the planned depth's distribution."""
    mass: Literal["act", "hazard", "crossing"] = "act"
    """How P_actual is made of the scores."""
    mass_tau: float = 0.1
    """Width of the soft crossing of T, for --mass crossing."""
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
    budget: float = 0.0
    """Weight of the squared distance from a cost budget."""
    budget_share: float = 0.67
    """That budget, as a share of static's MACs."""
    ratio: float = 0.0
    """Weight of DynamicViT's squared distance of the kept share from its ratio, stage by stage."""
    exits: float = 0.0
    """Weight of the mean cross-entropy of the exits after every block (confidence, similarity)."""
    expected: float = 0.0
    """Weight of PonderNet's task loss: the cross-entropy of every exit, weighted by the chance of stopping there."""
    geometric: float = 0.0
    """Weight of PonderNet's KL between that chance and a truncated geometric prior (its beta)."""
    distill: float = 0.0
    """Weight of distillation from the frozen static model; any weight > 0 switches it on."""
    distill_temperature: float = 1.0
    """Its temperature."""
    features: float = 0.0
    """Weight of distillation of the kept patches' features after the final norm (DynamicViT)."""
    teacher: str | None = None
    """The static model to distil from (file or directory); default: the starting weights."""
    calibrate: bool = True
    """Set the gate's start on one batch, so that halting begins near the last block."""

    seed: int = 0
    """Everything random follows from it: initial head, data order, augmentation, drop path."""
    workers: int = 0
    """Data-loading processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    checkpoint_steps: int = 0
    """Write a checkpoint every so many steps as well as after every epoch; 0 for epochs alone."""
    log_steps: int = 20
    """Log a line every so many steps."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    allow_corrupt: bool = False
    """Leave out images that cannot be read instead of stopping."""

    def __post_init__(self) -> None:
        check_size(self.img_size)
        for name in ("epochs", "val_epochs", "batch_size", "log_steps", "accumulate"):
            at_least(name, getattr(self, name), 1)
        for name in ("lr", "sigma", "mass_tau", "distill_temperature"):
            positive(name, getattr(self, name))
        weights: tuple[str, ...] = (
            "task",
            "ponder",
            "target_depth",
            "prior",
            "budget",
            "ratio",
            "exits",
            "expected",
            "geometric",
        )
        weights += ("distill", "features", "backbone_lr", "freeze_epochs")
        steps = ("min_lr", "warmup_epochs", "weight_decay", "clip_grad", "checkpoint_steps")
        for name in (*weights, *steps, "workers", "seed"):
            at_least(name, getattr(self, name), 0)
        for name in ("val_split", "drop_path", "random_erasing", "ema"):
            between(name, getattr(self, name), 0.0, 1.0)
        if not 0 < self.budget_share <= 1:
            raise UserError(f"budget_share: expected a share of static's MACs in (0, 1], got {self.budget_share}.")
        _ = self.augmentation

    @property
    def augmentation(self) -> AugmentConfig:
        """How training images are augmented."""
        return AugmentConfig(
            kind=self.augment,
            on=self.augment_on,
            crop_scale=self.crop_scale,
            color_jitter=self.color_jitter,
            rand_magnitude=self.rand_magnitude,
            erasing=self.random_erasing,
            mixup=self.mixup,
            cutmix=self.cutmix,
            label_smoothing=self.label_smoothing,
        )
