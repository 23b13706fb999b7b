"""Training: from a configuration to a trained model, in one process or many (torchrun, accelerate underneath).

Everything random follows from (seed, step) and (seed, epoch, image), so a resumed run needs no generator state and
the data order continues where it was. Each process takes its share of every global batch (step.py).
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator

from .. import tasks
from ..budget.control import BudgetState
from ..checkpoint.weights import refill
from ..data import dataset
from ..data.dataset import Labelled, Loaded, mix
from ..data.gpu_pipeline import Source, evaluation_images, training_images
from ..errors import DataError, UserError
from ..evaluation.evaluate import Result, evaluate
from ..execution.compiling import compiled
from ..factory import create
from ..model import AdaptiveViT
from ..policies import spec
from ..utils.console import announce, count
from ..utils.hardware import device_name
from ..utils.lock import writing
from . import fsdp, losses
from .config import FEW, TrainConfig, fitted
from .gate_init import init_gate
from .micro_batch import rows
from .optim import Average, adamw
from .processes import accelerator_for, check_divisible, meet_again, peers
from .run_dir import RunDirectory, StepLog
from .step import StepStats, Trainer, compute_losses, teacher_batch


def build_objective(config: TrainConfig) -> losses.Objective:
    """The loss that a configuration asks for."""
    own, smoothing, task = config.loss, config.augment.label_smoothing, tasks.get(config.task)
    target, actual = own.detach == "target", own.detach == "actual"
    return losses.Objective(
        {
            "task": (own.task, losses.TaskLoss(smoothing, task)),
            "ponder": (own.ponder, losses.Ponder()),
            "target_depth": (own.target_depth, losses.TargetDepth(own.sigma, own.mass, own.kl, target, actual)),
            "prior": (own.prior, losses.DistributionPrior(own.prior_form, own.prior_depth)),
            "cost": (own.cost, losses.Cost(own.cost_target)),
            "ratio": (own.ratio, losses.KeepRatio()),
            "exits": (own.exits, losses.Exits(smoothing, task, own.exits_last)),
            "self_distill": (own.self_distill, losses.SelfDistillation(task)),
            "expected": (own.expected, losses.Expected(smoothing, task)),
            "geometric": (own.geometric, losses.Geometric()),
            "distill": (own.distill, losses.Distillation(task)),
            "features": (own.features, losses.Features()),
        }
    )


def fit(
    config: TrainConfig, show: bool = True, stop: Callable[[], bool] | None = None, follow: Collection[str] = ()
) -> Result:
    """Train as configured; returns the validation result of the model that was saved in OUT/model.

    stop: called after every step, in a run of one process. If it returns True, a checkpoint is written and
    KeyboardInterrupt raised; `resume` goes on from there. follow: which of config.FOLLOW (batch size, warm-up) are to
    suit the number of images where that is small.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))  # by torchrun --max-restarts
    if restarts:
        meet_again(config, restarts)
    accelerator = accelerator_for(config)
    if restarts and (Path(config.out) / "config.json").exists():
        config = replace(config, resume=True)
    alone = writing(config.out) if accelerator.is_main_process else contextlib.nullcontext()
    with peers(accelerator), alone:
        return _fit(config, accelerator, show, stop or (lambda: False), follow)


def _fit(
    config: TrainConfig, accelerator: Accelerator, show: bool, stop: Callable[[], bool], follow: Collection[str]
) -> Result:
    if config.device == "cuda" and accelerator.device.type != "cuda":
        raise UserError("device: cuda was asked for, but torch sees no GPU.")
    run = RunDirectory(config, accelerator)
    given = (config.data, config.val_split, config.seed, config.allow_corrupt)
    train_set, val_set = dataset.for_training(*given, config.task)
    train_set, val_set = (_readable(part, config.allow_corrupt) for part in (train_set, val_set))
    config = fitted(config, len(train_set), accelerator.num_processes, follow)
    run.settle(config)
    if len(train_set) < (size := config.batch_size):
        few = f"{len(train_set)} training images are fewer than one batch of {size}"
        raise DataError(f"{config.data}: {few}; lower --batch-size.")
    check_divisible(config, accelerator.num_processes)
    torch.manual_seed(config.seed)
    policy, policy_settings = spec.parse(config.policy)
    names, outputs = list(train_set.classes) or None, tasks.get(config.task).outputs(train_set.classes)
    model = create(
        config.backbone,
        policy,
        weights=config.weights,
        num_classes=outputs,
        img_size=config.img_size,
        drop_path_rate=config.optim.drop_path,
        **policy_settings,
    )
    if policy == "replay":
        raise UserError("A replay belongs to one batch and cannot be trained.")
    if model.task != config.task or model.class_names not in (None, names):
        model.backbone.adapt(outputs, None)  # other classes than those of the weights
    if not config.optim.backbone_lr:
        _freeze(model, config, names)
    model.task, model.class_names = config.task, names
    model.budget_state = BudgetState(model)  # the weights may bring one
    trainer = _trainer(config, model, accelerator)
    images = training_images(train_set, model.preprocessing, config.augment, config.seed, accelerator.device)
    val = evaluation_images(val_set, model.preprocessing, accelerator.device)
    if not trainer.objective.terms:
        raise UserError("No loss has a weight > 0: give --loss.task, --loss.exits, --loss.expected or another.")
    _probe(trainer, val)
    accelerator.wait_for_everyone()  # every process has read OUT
    run.left_out |= dict.fromkeys((*train_set.left_out, *val_set.left_out))
    start = run.restore(trainer, config.epochs * (len(images) // config.batch_size)) if config.resume else 0
    run.open()
    if show and accelerator.is_main_process:
        announce(f"train {model.policy_name} on {config.backbone}", *_facts(trainer, images, val))
        _warn_of_few_steps(config, len(images))
    run.name_left_out()
    if config.resume:
        run.say(f"resumed after step {start}" if start else "no checkpoint yet: starting from the beginning")
    if start == 0 and config.gate_init:
        with trainer.whole(averaged=False) as whole:
            run.say(init_gate(whole, policy_settings, config, val_set, accelerator.device))
            if whole is not model:
                refill(model, whole.state_dict())
        if trainer.average is not None:
            trainer.average = Average(model, config.optim.ema)
    return _loop(trainer, run, images, val, start, show, stop)


def _freeze(model: AdaptiveViT, config: TrainConfig, names: list[str] | None) -> None:
    """Leave the backbone, its head included, as the weights bring it."""
    if not list(model.policy.parameters()):
        nothing = f"the policy {config.policy!r} has no parameters of its own"
        raise UserError(f"optim.backbone_lr: 0 leaves nothing to train: {nothing}.")
    given = create(config.backbone, "static", weights=config.weights)
    fits = given.shape.outputs == model.shape.outputs and given.class_names in (None, names)
    if not fits or given.task != config.task or (config.weights is None and ":" not in config.backbone):
        raise UserError(
            f"optim.backbone_lr: 0 needs --weights with a head for these {tasks.get(config.task).noun}, got "
            f"{config.weights}. Train it first: adaptivit train --policy static --out STATIC, then give --weights "
            "STATIC/model."
        )
    model.vit.requires_grad_(False)


def _facts(trainer: Trainer, images: Source, val: Source) -> Iterator[str]:
    """What the first line says."""
    config, model, device = trainer.config, trainer.model, trainer.accelerator.device
    steps, classes = len(images) // config.batch_size, len(images.labelled.classes)
    yield count(len(images), "image") + (f" of {count(classes, 'class')}" if classes else "")
    yield f"{len(val):,} for validation"
    yield f"{count(steps, 'step')} an epoch, {steps * config.epochs:,} in all"
    processes = trainer.accelerator.num_processes
    yield device_name(device) + (f" in {processes} processes" if processes > 1 else "")
    own, every = (sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (model.policy, model))
    frozen = f" (the backbone from epoch {config.optim.freeze_epochs:g} on)" if config.optim.freeze_epochs else ""
    yield f"trained: {every / 1e6:.3g} M weights, {own:,} of them the policy's{frozen}"


def _warn_of_few_steps(config: TrainConfig, images: int) -> None:
    per_epoch = images // config.batch_size
    steps, needed = per_epoch * config.epochs, -(-FEW // per_epoch)
    if steps < FEW:
        few = f"{count(steps, 'step')} in all are few to learn from"
        print(f"note: {few}; --epochs {needed} makes {needed * per_epoch}", file=sys.stderr, flush=True)


@torch.no_grad()
def _probe(trainer: Trainer, val: Source) -> None:
    """Compute the losses once before anything is written: a term that the policy cannot serve is an error."""
    batch = next(dataset.batches(val, [[0, len(val) - 1]]))
    if len(batch.labels):
        images, targets = batch.images.to(trainer.accelerator.device), batch.labels.to(trainer.accelerator.device)
        with trainer.accelerator.autocast():
            known = teacher_batch(trainer.teacher, trainer.objective, images, targets)
        with trainer.whole() as model, trainer.accelerator.autocast():
            output = model(images, aux=trainer.objective.needs)
        for name, (_, term) in trainer.objective.terms.items():
            try:
                term(output, known)
            except UserError as error:
                what = f"--loss.{name.replace('_', '-')}: the policy {trainer.model.policy_name!r} cannot serve it"
                raise UserError(f"{what}: {error}") from None


def _trainer(config: TrainConfig, model: AdaptiveViT, accelerator: Accelerator) -> Trainer:
    teacher = None
    if config.loss.distill or config.loss.features:
        teacher = _teacher(config, model).to(accelerator.device)
    model.recompute = config.run.checkpoint_activations
    whole, wrapped = None, model
    if config.run.fsdp:
        whole = copy.deepcopy(model)
        fsdp.shard(model, accelerator.device.type, accelerator.num_processes)
        optimizer = adamw(model, config)
    else:
        wrapped, optimizer = accelerator.prepare(model, adamw(model, config))
        for name in ("forward", "_original_forward"):  # accelerate's autocast: validation runs without
            vars(model).pop(name, None)
    mixing = tasks.get(config.task).mixing(config.augment, model.shape.outputs)
    average = Average(model, config.optim.ema) if config.optim.ema else None
    trainer = Trainer(model, build_objective(config), optimizer, config, accelerator, wrapped, teacher, mixing, average)
    trainer.copy = whole
    if config.run.compile:  # training alone: validation has other shapes every time
        graphs = accelerator.device.type == "cuda" and accelerator.num_processes == 1  # one launch for many kernels
        trainer.compute = compiled(compute_losses, mode="reduce-overhead" if graphs else None)
        # torch warns of what its own compiler reads
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    return trainer


def _teacher(config: TrainConfig, model: AdaptiveViT) -> AdaptiveViT:
    outputs, noun = model.shape.outputs, tasks.get(model.task).noun
    source = config.teacher or config.weights
    if source is None:
        raise UserError("loss.distill: expected the static model's weights as --teacher or --weights, got neither.")
    size = config.img_size if config.loss.features else None  # patches are compared one by one; else its own size
    teacher = create(config.backbone, "static", weights=source, img_size=size)
    if teacher.shape.outputs != outputs:
        raise UserError(
            f"loss.distill: the teacher in {source} has {teacher.shape.outputs} {noun}, the data {outputs}. "
            "Train it first: adaptivit train --policy static --out STATIC, then --teacher STATIC/model."
        )
    if teacher.class_names not in (None, model.class_names):
        raise UserError(f"loss.distill: the teacher in {source} was trained on other {noun} than the data has.")
    return teacher.requires_grad_(False).eval()


def _loop(
    trainer: Trainer, run: RunDirectory, images: Source, val: Source, start: int, show: bool, stop: Callable[[], bool]
) -> Result:
    config, accelerator, every = trainer.config, trainer.accelerator, trainer.config.run.checkpoint_steps
    per_epoch = len(images) // config.batch_size
    result: Result | None = None
    with StepLog(run, config.epochs * per_epoch, start, show and accelerator.is_main_process) as log:
        for epoch in range(start // per_epoch, config.epochs):
            images.epoch = epoch
            begun = time.perf_counter()
            for step, batch, missing in _epoch(trainer, images, epoch, per_epoch, max(start - epoch * per_epoch, 0)):
                stats = StepStats(trainer.task.score) if log.wants(step) else None
                if batch.unreadable:
                    run.left_out |= dict.fromkeys(images.labelled.without(batch.unreadable))
                found, _ = trainer.step(batch, step, per_epoch, missing, stats)
                now, done = time.perf_counter(), step + 1
                log.step(step, found, stats, config.batch_size / (now - begun), trainer)
                begun = now
                due, stopped = every and done % every == 0, stop()
                if done % per_epoch and (due or stopped):
                    found.check_finite(step)
                    run.checkpoint(trainer, done)
                    if stopped:
                        raise KeyboardInterrupt
            if (epoch + 1) % config.run.val_epochs == 0 or epoch + 1 == config.epochs:
                result = validate(trainer, val)
                if result.unreadable:
                    run.left_out |= dict.fromkeys(val.labelled.without(set(range(len(val))) - set(result.indices)))
                log.epoch(epoch, (epoch + 1) * per_epoch, result)
            run.checkpoint(trainer, (epoch + 1) * per_epoch)
            if epoch + 1 < config.epochs and stop():
                raise KeyboardInterrupt
    if result is None:  # a finished run was resumed
        result = validate(trainer, val)
    run.finish(trainer, result)
    return result


def _epoch(
    trainer: Trainer, images: Source, epoch: int, per_epoch: int, skip: int
) -> Iterator[tuple[int, Loaded, list[int]]]:
    """(step, this process's share of a batch, places of unreadable images in it) from batch `skip` of an epoch on."""
    config, accelerator = trainer.config, trainer.accelerator
    generator = torch.Generator().manual_seed(mix(config.seed, epoch))
    order = torch.randperm(len(images), generator=generator).tolist()
    size, parts, pairs = config.batch_size, config.run.accumulate, trainer.mixing is not None
    first, total = accelerator.process_index * parts, accelerator.num_processes * parts
    mine = [i for k in range(parts) for i in rows(size, first + k, total, pairs)]
    plan = [[order[n * size + i] for i in mine] for n in range(skip, per_epoch)]
    for number, batch in enumerate(dataset.batches(images, plan, config.workers), start=skip):
        if batch.unreadable and not config.allow_corrupt:
            raise DataError(f"Cannot read the image {images.labelled.name(batch.unreadable[0])}.")
        missing = [plan[number - skip].index(i) for i in batch.unreadable]
        yield epoch * per_epoch + number, batch, missing


def validate(trainer: Trainer, val: Source) -> Result:
    """Evaluate the model that would be saved on the validation images, which the processes share."""
    accelerator = trainer.accelerator
    order = dataset.in_order(len(val), trainer.config.batch_size)
    mine = [batch[accelerator.process_index :: accelerator.num_processes] for batch in order]
    with trainer.whole() as model:
        return evaluate(
            model,
            dataset.batches(val, [batch for batch in mine if batch], trainer.config.workers),
            device=accelerator.device,
            shared=accelerator.num_processes > 1,
        )


def _readable(labelled: Labelled, allow_corrupt: bool) -> Labelled:
    bad = set(dataset.verify(labelled))
    if bad and not allow_corrupt:
        raise DataError(
            f"Cannot read the image {labelled.name(min(bad))}"
            + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
            + ". Remove it, or pass --allow-corrupt to leave such images out."
        )
    if not bad:
        return labelled
    good = labelled.part([i for i in range(len(labelled)) if i not in bad])
    return replace(good, left_out=labelled.without(bad))
