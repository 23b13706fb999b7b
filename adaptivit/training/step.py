"""One optimiser step: this process's share of a global batch, in one part or several (--run.accumulate).

Everything random follows from the seed, the step and the place in the global batch, and every loss is that of the
global batch, so the step is the same however many processes and parts there are.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from .. import tasks
from ..data.dataset import Loaded, mix
from ..errors import NotFiniteError, UserError
from ..model import AdaptiveViT
from ..output import Output
from ..tasks.protocol import Mixing, Task
from ..utils.batch_rng import BatchSlice, drawing
from ..utils.sharded import whole
from . import fsdp
from .config import TrainConfig
from .losses import Batch, Losses, Objective, Sums
from .micro_batch import GlobalBatch, over_processes, rows
from .optim import Average, learning_rate


def compute_losses(
    model: Any,
    teacher: AdaptiveViT | None,
    objective: Objective,
    images: Tensor,
    targets: Tensor,
    whole: GlobalBatch | None = None,
) -> tuple[Losses, Output]:
    """Forward pass, of the teacher too where there is one, and losses, these in full precision."""
    known = teacher_batch(teacher, objective, images, targets)
    output = model(images, aux=objective.needs)
    with torch.autocast(images.device.type, enabled=False):
        return objective(output, known, whole), output


@torch.no_grad()
def teacher_batch(teacher: AdaptiveViT | None, objective: Objective, images: Tensor, targets: Tensor) -> Batch:
    """What a loss may read beside the output: the targets, and the static model's answers at its own image size."""
    if teacher is None:
        return Batch(targets)
    try:
        teacher.backbone.check_size(*images.shape[2:])
    except UserError:  # another size than it takes
        size = teacher.backbone.image_size
        images = F.interpolate(images, size, mode="bicubic", align_corners=False, antialias=True)
    output = teacher(images, aux=objective.needs & {"patches"})
    return Batch(targets, output.logits, output.patches)


@dataclass(frozen=True)
class Part:
    """The images of one forward pass: this process's batch, or a part of it."""

    images: Tensor  # [b, C, H, W]
    targets: Tensor  # [b, ...] as the loss takes them: mixed where asked for
    labels: Tensor  # [b, ...] before any mixing
    rows: BatchSlice | None  # None: the whole global batch
    whole: GlobalBatch | None

    @property
    def weight(self) -> float:
        return 1.0 if self.whole is None else self.whole.weight


@dataclass
class StepStats:
    """Figures of the images of a step, for the log: sums over parts and processes."""

    score: str  # the task's name for the mean score of images
    sums: Sums = field(default_factory=dict)

    @torch.no_grad()
    def add(self, output: Output, scores: Tensor, weight: float) -> None:
        """A part of the batch, with the task's score of every image [b]."""
        trace = output.trace
        sums = {
            "images": scores.new_full((), len(scores), dtype=torch.float64),
            "score": scores.double().sum(),
            "depth": trace.mean_depth.sum(),
            "gmacs": output.macs_deployed.sum() / 1e9,
            "live": trace.live.double().sum(1),  # [L]
        }
        if "plan" in trace.facts:  # whether execution keeps to the plan
            gap = (trace.facts["halt"] - trace.facts["plan"]).double() * trace.facts["planned"]
            sums["gap"] = torch.stack([gap.sum(), trace.facts["planned"].double().sum()])
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + weight * value

    def figures(self) -> dict[str, Any]:
        """Means over the images of the global batch; every process has to call it."""
        total: dict[str, Any] = {name: value.tolist() for name, value in over_processes(self.sums).items()}
        count = max(total["images"], 1.0)
        figures = {
            self.score: total["score"] / count,
            "mean_depth": total["depth"] / count,
            "gmacs": total["gmacs"] / count,
            "live": [round(n / count, 3) for n in total["live"]],
        }
        if "gap" in total:
            figures["plan_gap"] = total["gap"][0] / max(total["gap"][1], 1.0)
        return figures


@dataclass
class Trainer:
    """Model, losses, optimiser and processes of a training."""

    model: AdaptiveViT
    objective: Objective
    optimizer: torch.optim.Optimizer
    config: TrainConfig
    accelerator: Accelerator
    wrapped: Any  # the model as it is run: accelerate's, or `model` itself where FSDP shards it
    teacher: AdaptiveViT | None = None
    mixing: Mixing | None = None
    average: Average | None = None
    compute: Callable[..., tuple[Losses, Output]] = compute_losses  # compiled where asked for
    copy: AdaptiveViT | None = None  # of a sharded model: filled where whole weights are needed

    @property
    def task(self) -> Task:
        return tasks.get(self.model.task)

    def step(
        self,
        batch: Loaded,
        step: int,
        steps_per_epoch: int,
        missing: Sequence[int] = (),
        stats: StepStats | None = None,
    ) -> tuple[Losses, Output]:
        """One optimiser step on this process's share of a global batch; `missing`: places of unreadable images in it.

        Returns the losses of the global batch, and the output of the last part.
        """
        config, accelerator = self.config, self.accelerator
        self.wrapped.train()
        self.model.policy.schedule(step / steps_per_epoch)
        parts, seed = self._parts(batch, step, missing), mix(config.seed, 1 << 20, step, 0)
        if len(parts) > 1:
            parts = self._with_global_sums(parts, seed)
        for group in self.optimizer.param_groups:
            group["lr"] = group["share"] * learning_rate(config, step, steps_per_epoch)
            if group["backbone"] and step < config.optim.freeze_epochs * steps_per_epoch:
                group["lr"] = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        every = []
        for number, part in enumerate(parts, start=1):
            alone = contextlib.nullcontext() if number == len(parts) else accelerator.no_sync(self.wrapped)
            with alone, drawing(part.rows, seed):
                losses, output = self._run(part)
                self._backward(losses.total)
            every.append(losses)
            if stats is not None:
                scores = self.task.judge(output.logits.detach(), part.labels.to(output.logits.device)).scores
                stats.add(output, scores, part.weight)
        losses = self._together(every)
        if accelerator.device.type == "cpu" or step % config.run.log_steps == 0:  # a check waits for the GPU
            losses.check_finite(step)
        norm = self._clip()
        if accelerator.device.type == "cpu" and norm is not None and not bool(norm.isfinite()):
            raise NotFiniteError(
                f"The gradient became {float(norm)} at step {step + 1} (loss {float(losses.total.detach()):.4g}). "
                "Lower the learning rate; the last good checkpoint was kept."
            )
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.model, step)
        return losses, output

    # -- the parts of a batch ----------------------------------------------------------------------------------------
    def _parts(self, batch: Loaded, step: int, missing: Sequence[int]) -> list[Part]:
        processes, count, device = self.accelerator.num_processes, self.config.run.accumulate, self.accelerator.device
        planned, gone = len(batch.labels) + len(missing), set(missing)
        places = [p for p in range(planned) if p not in gone]
        size = planned // count  # images a part, were none missing
        parts = []
        for k in range(count):
            start, stop = (bisect.bisect_left(places, (k + i) * size) for i in (0, 1))
            if self.mixing is not None:
                stop -= (stop - start) % 2
            images, labels = batch.images[start:stop].to(device, non_blocking=True), batch.labels[start:stop]
            weight = 1.0
            if start == stop:  # no image could be read, but the other processes wait: a stand-in of weight 0
                images = torch.zeros(2, self.model.backbone.in_chans, *self.model.preprocessing.size, device=device)
                labels, weight = batch.labels.new_zeros(2, *batch.labels.shape[1:]), 0.0
            targets = labels.to(device, non_blocking=True)
            if self.mixing is not None and weight:
                np.random.seed(mix(self.config.seed, 1 << 21, step, 0) % 2**32)  # timm draws from it
                images, targets = self.mixing(images, targets)
            chosen, whole = None, None
            if processes * count > 1 or missing:
                part = (size * count * processes, self.accelerator.process_index * count + k, processes * count)
                there = _rows(*part, self.mixing is not None, device)
                if missing:
                    there = there[[p - k * size for p in places[start:stop]] or [0, 0]]
                chosen, whole = BatchSlice(there, part[0]), GlobalBatch(processes, weight=weight)
            parts.append(Part(images, targets, labels, chosen, whole))
        return parts

    def _with_global_sums(self, parts: list[Part], seed: int) -> list[Part]:
        """The parts, each with the sums over the global batch that its losses need.

        A mean over images needs their number. Any other loss needs the sums of all parts before the first backward
        pass, so the parts run forward once without a gradient.
        """
        if self.objective.plain:
            count = sum(part.weight * len(part.labels) for part in parts)
            number = over_processes({"images": torch.full((), count, device=self.accelerator.device)})["images"]
            return [replace(p, whole=replace(p.whole, images=number)) for p in parts if p.whole]
        sums: Sums = {}
        with torch.no_grad():
            for part in parts:
                with drawing(part.rows, seed):
                    losses, _ = self._run(replace(part, whole=None))
                for name, value in losses.sums.items():
                    sums[name] = sums.get(name, 0.0) + part.weight * value
        total = over_processes(sums)
        return [replace(p, whole=replace(p.whole, total=total)) for p in parts if p.whole]

    def _run(self, part: Part) -> tuple[Losses, Output]:
        with self.accelerator.autocast():
            return self.compute(self.wrapped, self.teacher, self.objective, part.images, part.targets, part.whole)

    def _together(self, every: list[Losses]) -> Losses:
        """The losses of the global batch: those of any part, or the sum over parts where each has its part of them."""
        if len(every) == 1 or not self.objective.plain:
            return every[-1]
        values = {name: torch.stack([one.terms[name] for one in every]).sum() for name in every[0].terms}
        values = over_processes({**values, "": torch.stack([one.total.detach() for one in every]).sum()})
        return replace(every[-1], total=values.pop(""), terms=values)

    # -- gradients ---------------------------------------------------------------------------------------------------
    def _backward(self, total: Tensor) -> None:
        # parameters of the policy that no loss of this run reaches have a gradient of 0, for which processes wait
        own = [p for p in self.model.policy.parameters() if p.requires_grad] if self.copy is None else []
        if own and self.accelerator.num_processes > 1:
            total = total + 0.0 * torch.stack([p.sum() for p in own]).sum()
        self.accelerator.backward(total)
        for p in own:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad

    def _clip(self) -> Tensor | None:
        most = self.config.optim.clip_grad or float("inf")
        if self.copy is None:
            return self.accelerator.clip_grad_norm_(self.wrapped.parameters(), most)
        fsdp.finish_gradients(self.model)
        return fsdp.clip(self.model.parameters(), most)

    # -- the weights as a whole --------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def whole(self, averaged: bool = True) -> Iterator[AdaptiveViT]:
        """The model that would be saved: averaged where asked for, not sharded; every process has to call it."""
        average = self.average if averaged else None
        if self.copy is not None:
            state = self.model.state_dict() if average is None else average.values
            self.copy.load_state_dict({name: whole(value).cpu() for name, value in state.items()})
            try:
                yield self.copy.to(self.accelerator.device)
            finally:
                self.copy.cpu()
        elif average is not None:
            with average.used(self.model):
                yield self.model
        else:
            yield self.model


@functools.cache
def _rows(batch: int, part: int, parts: int, pairs: bool, device: torch.device) -> Tensor:
    """`rows` on the device, made once."""
    return torch.tensor(rows(batch, part, parts, pairs), device=device)
