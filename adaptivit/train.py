"""Training: one step function, one loop, accelerate underneath (one process, or many under torchrun).

Everything random follows from (seed, step) and (seed, epoch, image), so a resumed run needs no generator state and
the data order continues where it was. Each process takes its share of every global batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from timm.data.mixup import Mixup
from torch import Tensor

from . import data, settings
from .arrays import Source, evaluation_images, training_images
from .config import TrainConfig
from .data import Labelled, Loaded, mix
from .errors import DataError, NotFiniteError, UserError
from .evaluate import Result, evaluate
from .factory import create
from .model import AdaptiveViT
from .objectives import (
    Batch,
    Budget,
    CrossEntropy,
    Distillation,
    DistributionPrior,
    Exits,
    Expected,
    Features,
    Geometric,
    KeepRatio,
    Losses,
    Objective,
    Ponder,
    TargetDepth,
)
from .optimise import Average, adamw, learning_rate
from .output import Output
from .run_directory import Meter, RunDirectory
from .start import calibrate


def objective(config: TrainConfig) -> Objective:
    """The loss that a configuration asks for."""
    target, actual = config.detach == "target", config.detach == "actual"
    target_depth = TargetDepth(config.sigma, config.mass, config.kl, target, actual, config.mass_tau)
    return Objective(
        {
            "task": (config.task, CrossEntropy(config.label_smoothing)),
            "ponder": (config.ponder, Ponder(config.ponder_form)),
            "target_depth": (config.target_depth, target_depth),
            "prior": (config.prior, DistributionPrior(config.prior_form, config.prior_depth)),
            "budget": (config.budget, Budget(config.budget_share)),
            "ratio": (config.ratio, KeepRatio()),
            "exits": (config.exits, Exits(config.label_smoothing)),
            "expected": (config.expected, Expected(config.label_smoothing)),
            "geometric": (config.geometric, Geometric()),
            "distill": (config.distill, Distillation(config.distill_temperature)),
            "features": (config.features, Features()),
        }
    )


def judged(
    model: Any, teacher: AdaptiveViT | None, objective: Objective, images: Tensor, targets: Tensor
) -> tuple[Losses, Output]:
    """Forward pass, of the teacher too where there is one, and losses, these in full precision."""
    known = taught(teacher, objective, images, targets)
    output = model(images, ask=objective.needs)
    with torch.autocast(images.device.type, enabled=False):
        return objective(output, known), output


@torch.no_grad()
def taught(teacher: AdaptiveViT | None, objective: Objective, images: Tensor, targets: Tensor) -> Batch:
    """What a loss may know beside the output: the targets, and what the static model says."""
    if teacher is None:
        return Batch(targets)
    said = teacher(images, ask=objective.needs & {"patches"})
    return Batch(targets, said.logits, said.patches)


@dataclass
class Trainer:
    """What a step needs. `fit` below builds it from a configuration; the quickstart builds its own."""

    model: AdaptiveViT
    objective: Objective
    optimizer: torch.optim.Optimizer
    config: TrainConfig
    accelerator: Accelerator
    wrapped: Any  # the model as accelerate runs it
    teacher: AdaptiveViT | None = None
    mixup: Mixup | None = None
    average: Average | None = None
    judge: Callable[..., tuple[Losses, Output]] = judged  # compiled where asked for

    def step(self, batch: Loaded, step: int, steps_per_epoch: int) -> tuple[Losses, Output]:
        """One optimiser step on this process's share of a global batch."""
        config, accelerator = self.config, self.accelerator
        torch.manual_seed(mix(config.seed, 1 << 20, step, accelerator.process_index))
        images, targets = batch.images.to(accelerator.device), batch.labels.to(accelerator.device)
        if self.mixup is not None:
            np.random.seed(mix(config.seed, 1 << 21, step, accelerator.process_index) % 2**32)  # timm draws from there
            images, targets = self.mixup(images, targets)
        self.wrapped.train()
        self.model.policy.schedule(step / steps_per_epoch)
        with accelerator.autocast():
            losses, output = self.judge(self.wrapped, self.teacher, self.objective, images, targets)
        if accelerator.device.type == "cpu" or step % config.log_steps == 0:  # a look costs a wait on a GPU
            losses.check_finite(step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["share"] * learning_rate(config, step, steps_per_epoch)
            if group["backbone"] and step < config.freeze_epochs * steps_per_epoch:
                group["lr"] = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        # a policy may own parameters that no loss of this run reaches: their gradient is 0, which several processes
        # wait for, and one need not compute
        own = [p for p in self.model.policy.parameters() if p.requires_grad]
        idle = 0.0 * torch.stack([p.sum() for p in own]).sum() if own and accelerator.num_processes > 1 else 0.0
        accelerator.backward(losses.total + idle)
        for p in own:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norm = accelerator.clip_grad_norm_(self.wrapped.parameters(), config.clip_grad or float("inf"))
        if accelerator.device.type == "cpu" and norm is not None and not bool(norm.isfinite()):
            raise NotFiniteError(
                f"The gradient became {float(norm)} at step {step + 1} (loss {float(losses.total.detach()):.4g}). "
                "Lower the learning rate; the last good checkpoint was kept."
            )
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.model, step)
        return losses, output


def fit(config: TrainConfig, show: bool = True) -> Result:
    """Train as configured; returns the validation result of the model that was saved in OUT/model."""
    accelerator = _accelerator(config)
    if config.device == "cuda" and accelerator.device.type != "cuda":
        raise UserError("device: cuda was asked for, but torch sees no GPU.")
    run = RunDirectory(config, accelerator)
    train_set, val_set = data.for_training(config.data, config.val_split, config.seed, config.allow_corrupt)
    train_set = _readable(train_set, config.allow_corrupt)
    if len(train_set) < config.batch_size:
        raise DataError(
            f"{config.data}: {len(train_set)} training images are fewer than one batch of {config.batch_size}."
        )
    if config.batch_size % accelerator.num_processes:
        raise UserError(f"batch_size: expected a multiple of {accelerator.num_processes} processes.")
    if (config.mixup or config.cutmix) and config.batch_size // accelerator.num_processes % 2:
        raise UserError(f"mixup: expected an even number of images a process and step, got {config.batch_size}.")
    torch.manual_seed(config.seed)
    policy, policy_settings = settings.parse(config.policy)
    classes = len(train_set.classes)
    model = create(
        config.backbone,
        policy,
        weights=config.weights,
        num_classes=classes,
        img_size=config.img_size,
        drop_path_rate=config.drop_path,
        **policy_settings,
    )
    if policy == "replay":
        raise UserError("A replay belongs to one batch and cannot be trained.")
    if model.class_names not in (None, list(train_set.classes)):
        model.vit.reset_classifier(classes)  # as many classes as the weights have, but other ones
    model.class_names = list(train_set.classes)
    trainer = _trainer(config, model, accelerator, classes)
    images = training_images(train_set, model.preprocessing, config, accelerator.device)
    val = evaluation_images(val_set, model.preprocessing, accelerator.device)
    if not trainer.objective.terms:
        raise UserError("No loss has a weight > 0: give --task, --exits, --expected or another.")
    _probe(trainer, val)
    run.open()
    notes = list(dict.fromkeys((*train_set.notes, *val_set.notes)))
    if notes:
        run.say(f"left out: {notes[0]}" + f", and {len(notes) - 1} more" * (len(notes) > 1))
    start = run.restore(trainer) if config.resume else 0
    if start == 0 and config.calibrate:
        run.say(calibrate(model, policy_settings, config.weights, val_set, accelerator.device))
        if trainer.average is not None:
            trainer.average = Average(model, config.ema)
    return _loop(trainer, run, images, val, start, show)


@torch.no_grad()
def _probe(trainer: Trainer, val: Source) -> None:
    """One look at the loss before anything is written: a term that the policy cannot serve is said now."""
    batch = next(data.batches(val, [[0, len(val) - 1]]))
    if len(batch.labels):
        images, targets = batch.images.to(trainer.accelerator.device), batch.labels.to(trainer.accelerator.device)
        output = trainer.model(images, ask=trainer.objective.needs)
        with trainer.accelerator.autocast():
            known = taught(trainer.teacher, trainer.objective, images, targets)
        for name, (_, term) in trainer.objective.terms.items():
            try:
                term(output, known)
            except UserError as error:
                policy = trainer.model.policy_name
                raise UserError(f"--{name.replace('_', '-')}: the policy {policy!r} cannot serve it: {error}") from None


def _trainer(config: TrainConfig, model: AdaptiveViT, accelerator: Accelerator, classes: int) -> Trainer:
    teacher = None
    if config.distill or config.features:
        teacher = _teacher(config, model.class_names or []).to(accelerator.device)
    optimizer = adamw(model, config)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    mixup = None
    if config.mixup or config.cutmix:
        mixup = Mixup(config.mixup, config.cutmix, label_smoothing=0.0, num_classes=classes)
    average = Average(model, config.ema) if config.ema else None
    trainer = Trainer(model, objective(config), optimizer, config, accelerator, wrapped, teacher, mixup, average)
    if config.compile:  # training alone: validation runs `model`, whose compact layouts have other shapes every time
        graphs = accelerator.device.type == "cuda" and accelerator.num_processes == 1  # one launch for many kernels
        trainer.judge = torch.compile(judged, dynamic=False, mode="reduce-overhead" if graphs else None)
    return trainer


def _teacher(config: TrainConfig, names: list[str]) -> AdaptiveViT:
    classes = len(names)
    source = config.teacher or config.weights
    if source is None:
        raise UserError("distill: expected the static model's weights as --teacher or --weights, got neither.")
    teacher = create(config.backbone, "static", weights=source, img_size=config.img_size)
    if teacher.vit.num_classes != classes:
        raise UserError(
            f"distill: the teacher in {source} has {teacher.vit.num_classes} classes, the data {classes}. "
            "Train it first: adaptivit train --policy static --out STATIC, then --teacher STATIC/model."
        )
    if teacher.class_names not in (None, names):
        raise UserError(f"distill: the teacher in {source} was trained on other classes than the data has.")
    return teacher.requires_grad_(False).eval()


def _loop(trainer: Trainer, run: RunDirectory, images: Source, val: Source, start: int, show: bool) -> Result:
    config, accelerator = trainer.config, trainer.accelerator
    per_epoch = len(images) // config.batch_size
    result: Result | None = None
    with Meter(run, config.epochs * per_epoch, start, show and accelerator.is_main_process) as meter:
        for epoch in range(start // per_epoch, config.epochs):
            images.epoch = epoch
            begun = time.perf_counter()
            for step, batch in _epoch(trainer, images, epoch, per_epoch, max(start - epoch * per_epoch, 0)):
                losses, output = trainer.step(batch, step, per_epoch)
                now = time.perf_counter()
                meter.step(step, losses, output, batch, config.batch_size / (now - begun), trainer)
                begun = now
                done = step + 1
                if config.checkpoint_steps and done % config.checkpoint_steps == 0 and done % per_epoch:
                    losses.check_finite(step)
                    run.checkpoint(trainer, done)
            result = validate(trainer, val)
            meter.epoch(epoch, (epoch + 1) * per_epoch, result)
            run.checkpoint(trainer, (epoch + 1) * per_epoch)
    if result is None:  # a finished run was resumed
        result = validate(trainer, val)
    run.finish(trainer, result)
    return result


def _epoch(trainer: Trainer, images: Source, epoch: int, per_epoch: int, skip: int) -> Iterator[tuple[int, Loaded]]:
    """(step, this process's share of the batch) of an epoch, from its batch number `skip` on."""
    config, accelerator = trainer.config, trainer.accelerator
    generator = torch.Generator().manual_seed(mix(config.seed, epoch))
    order = torch.randperm(len(images), generator=generator).tolist()
    size, rank, world = config.batch_size, accelerator.process_index, accelerator.num_processes
    plan = [order[i * size : (i + 1) * size][rank::world] for i in range(skip, per_epoch)]
    for number, batch in enumerate(data.batches(images, plan, config.workers), start=skip):
        if batch.unreadable and not config.allow_corrupt:
            raise DataError(f"Cannot read the image {images.labelled.name(batch.unreadable[0])}.")
        if len(batch.labels):
            yield epoch * per_epoch + number, batch


def validate(trainer: Trainer, val: Source) -> Result:
    """The model that would be saved (the average where there is one) on the validation images."""
    order = data.in_order(len(val), trainer.config.batch_size)
    if trainer.average is None:
        return evaluate(trainer.model, data.batches(val, order), device=trainer.accelerator.device)
    with trainer.average.used(trainer.model):
        return evaluate(trainer.model, data.batches(val, order), device=trainer.accelerator.device)


def _readable(labelled: Labelled, allow_corrupt: bool) -> Labelled:
    bad = set(data.verify(labelled))
    if bad and not allow_corrupt:
        raise DataError(
            f"Cannot read the image {labelled.name(min(bad))}"
            + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
            + ". Remove it, or pass --allow-corrupt to leave such images out."
        )
    return labelled.part([i for i in range(len(labelled)) if i not in bad]) if bad else labelled


def _accelerator(config: TrainConfig) -> Accelerator:
    """accelerate keeps one state a process; a second run of another precision or device begins with a fresh one."""
    if PartialState._shared_state and PartialState().num_processes == 1:
        AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(mixed_precision=_precision(config), cpu=config.device == "cpu")


def _precision(config: TrainConfig) -> str:
    gpu = torch.cuda.is_available() and config.device != "cpu"
    return "bf16" if config.precision == "bf16" or (config.precision == "auto" and gpu) else "no"
