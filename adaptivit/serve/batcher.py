"""One thread that runs the model, on batches filled by tokens instead of images.

Shapes: C x H x W an image, L blocks, P patches.

A batch has room for so many tokens (of the mean block). An image takes up as many as images at its budget have been
taking, so that where a static model's batch has 16 images, that of a model which halves its tokens has 32, and images
of different budgets share one. The image that has waited longest always goes; those behind it ride along as they fit.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..budget import control
from ..budget import curve as budgets
from ..budget.curve import Budget
from ..cost import CostModel
from ..errors import UserError
from ..model import AdaptiveViT
from ..output import Output
from ..utils.hardware import device_name
from .memory import Keeper
from .metrics import Metrics

_MEMORY = 0.9  # how much of an expectation is kept when an image has been seen
log = logging.getLogger("adaptivit.serve")


class QueueFull(Exception):
    """No room for so many images."""


@dataclass(frozen=True)
class Answer:
    """What the model says of an image, and what that took."""

    logits: Tensor  # [classes], float32 on the CPU
    macs: float
    static_macs: float
    live: list[int]  # [L] tokens in each block's attention
    mean_depth: float
    attended: Tensor | None  # [L, P] bool, where it was asked for
    queued: float  # seconds
    seconds: float  # of the pass that this image was part of
    images: int  # of that pass


@dataclass
class Job:
    image: Tensor  # [C, H, W], normalised, on the CPU
    budget: Budget | None = None  # None: the model's own
    trace: bool = False  # give `attended`
    answer: Future[Answer] = field(default_factory=Future)
    tokens: float = 0.0  # expected in the mean block
    since: float = 0.0


class Batcher:
    """Takes images from any thread, answers through futures."""

    def __init__(
        self,
        model: AdaptiveViT,
        *,
        tokens: int | None = None,
        images: int | None = None,
        wait: float = 0.002,
        queue: int = 256,
        metrics: Metrics | None = None,
    ) -> None:
        weight = next(model.parameters())
        self.model, self.device, self.dtype = model.eval(), weight.device, weight.dtype
        slots = model.shape.tokens
        self.tokens = tokens or slots * (256 if self.device.type == "cuda" else 16)
        self.images = images or max(1, 4 * self.tokens // slots)
        self.wait, self.queue, self.metrics = wait, queue, metrics or Metrics()
        self.costs = CostModel(model.whole or model.shape, slots)
        self._expected: dict[int | None, float] = {}  # tokens in the mean block, by the budget's share of static
        self._waiting: deque[Job] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._run: Any = model
        self._share(None)  # a budget of the model's own that cannot be met here is said now
        self._thread = threading.Thread(target=self._loop, name="adaptivit-model", daemon=True)
        self._thread.start()

    # -- from outside --------------------------------------------------------------------------------------------
    def submit(self, jobs: Sequence[Job]) -> list[Future[Answer]]:
        """Queue images, all of them or (QueueFull) none."""
        now = time.monotonic()
        for job in jobs:
            job.since, job.tokens = now, self.expected(job.budget)
        with self._changed:
            if self._closing:
                raise QueueFull("The service is shutting down.")
            if len(self._waiting) + len(jobs) > self.queue:
                raise QueueFull(f"The queue is full ({self.queue} images wait).")
            self._waiting.extend(jobs)
            self._changed.notify()
        return [job.answer for job in jobs]

    def call(self, function: Callable[..., Any], *given: Any) -> Future[Any]:
        """Run a function where the model runs, between two batches."""
        answer: Future[Any] = Future()
        with self._changed:
            if self._closing or len(self._calls) >= self.queue:
                raise QueueFull("The queue is full.")
            self._calls.append((functools.partial(function, *given), answer))
            self._changed.notify()
        return answer

    def budget(self, given: object) -> Budget | None:
        """A budget of a request, checked: UserError where this model cannot meet it."""
        if given is None:
            return None
        made = budgets.parse(given)
        control.solve(self.model, made, self.device)
        return made

    def expected(self, budget: Budget | None) -> float:
        """Tokens of the mean block, by what images at this budget took; before any, by the budget itself."""
        share = self._share(budget)
        start = self.model.shape.tokens * (1.0 if share is None else share / 100)
        return self._expected.get(share, start)

    def _share(self, budget: Budget | None) -> int | None:
        """Whole percents of static's MACs, so that no number of different budgets fills the memory."""
        budget = self.model._budget if budget is None else budget
        if budget is None or budget.free or self.model.calibration is None:
            return None
        macs = self.model.calibration.wanted(budget, device_name(self.device))
        return round(100 * macs / self.costs.static)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Finish what was accepted, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # -- in the thread -------------------------------------------------------------------------------------------
    def _loop(self) -> None:
        with torch.inference_mode():
            self._prepare()
            keeper = Keeper()
            while self._next():
                self._answer(self._batch())
                self._one_call()
                keeper.look()

    def _prepare(self) -> None:
        """A first pass, which is slow; and on a GPU one CUDA graph for every batch, where the policy allows it."""
        size = self.model.preprocessing.size
        self.model(torch.zeros(1, self.model.vit.in_chans, *size, device=self.device, dtype=self.dtype))
        if self.device.type != "cuda":
            return
        try:
            self._run = self.model.capture(self.images)
        except Exception as error:  # whatever the driver or the compiler finds: the model itself runs as well
            log.warning("no CUDA graph, running without: %s", error)

    def _next(self) -> bool:
        """Wait for something to do; False when there will be nothing more."""
        with self._changed:
            while not self._waiting and not self._calls and not self._closing:
                self._changed.wait()
            return bool(self._waiting or self._calls)

    def _batch(self) -> list[Job]:
        """The next batch, full or as full as it became while its first image could wait."""
        with self._changed:
            if not self._waiting:
                return []
            until = self._waiting[0].since + self.wait
            while not self._closing and (left := until - time.monotonic()) > 0 and not self._full():
                self._changed.wait(left)
            return self._fill()

    def _full(self) -> bool:
        return len(self._waiting) >= self.images or sum(job.tokens for job in self._waiting) >= self.tokens

    def _fill(self) -> list[Job]:
        """The oldest image, and of the others, in their order, those that fit."""
        batch: list[Job] = []
        room = float(self.tokens)
        left: deque[Job] = deque()
        while self._waiting and len(batch) < self.images:
            job = self._waiting.popleft()
            if batch and job.tokens > room:
                left.append(job)
                continue
            batch.append(job)
            room -= job.tokens
        left.extend(self._waiting)
        self._waiting = left
        return batch

    def _answer(self, batch: list[Job]) -> None:
        batch = [job for job in batch if job.answer.set_running_or_notify_cancel()]
        if not batch:
            return
        try:
            answers = self._pass(batch)
        except Exception as error:
            if len(batch) == 1:
                log.exception("the model failed")
                batch[0].answer.set_exception(error)
                return
            for job in batch:  # one image may be at fault: the others get their answers
                self._alone(job)
            return
        for job, answer in zip(batch, answers, strict=True):
            job.answer.set_result(answer)

    def _one_call(self) -> None:
        with self._changed:
            if not self._calls:
                return
            function, answer = self._calls.popleft()
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)

    def _alone(self, job: Job) -> None:
        try:
            job.answer.set_result(self._pass([job])[0])
        except Exception as error:
            log.exception("the model failed")
            job.answer.set_exception(error)

    def _pass(self, batch: list[Job]) -> list[Answer]:
        begun = time.monotonic()
        images = torch.stack([job.image for job in batch]).to(self.device, self.dtype)
        output = self._forward(images, [job.budget for job in batch])
        logits, attended = output.logits.float().cpu(), output.trace.attended.cpu()
        live, macs = output.trace.live.T.tolist(), output.macs_deployed.tolist()
        depth = output.trace.mean_depth.tolist()
        seconds = time.monotonic() - begun
        self._count(batch, live, macs, begun, seconds)
        prefix, static = output.trace.num_prefix_tokens, self.costs.static
        return [
            Answer(
                logits=logits[i],
                macs=macs[i],
                static_macs=static,
                live=live[i],
                mean_depth=depth[i],
                attended=attended[:, i, prefix:].clone() if job.trace else None,
                queued=begun - job.since,
                seconds=seconds,
                images=len(batch),
            )
            for i, job in enumerate(batch)
        ]

    def _forward(self, images: Tensor, given: list[Budget | None]) -> Output:
        if all(b is None for b in given):
            return self._run(images)
        own = self.model.budget or "none"
        texts = [own if b is None else b.text for b in given]
        if self._run is self.model:
            return self.model(images, budget=texts)
        try:
            return self._run(images, budget=texts)
        except UserError:  # a graph has the shapes of one budget where the dial fixes counts
            return self.model(images, budget=texts)

    def _count(self, batch: list[Job], live: list[list[int]], macs: list[float], begun: float, seconds: float) -> None:
        layers, metrics = len(live[0]), self.metrics
        tokens, static = sum(map(sum, live)), self.costs.static
        for job, row in zip(batch, live, strict=True):
            share, mean = self._share(job.budget), sum(row) / layers
            self._expected[share] = _MEMORY * self._expected.get(share, mean) + (1 - _MEMORY) * mean
            metrics.observe("queue_seconds", begun - job.since)
        metrics.add("images_total", len(batch))
        metrics.add("batches_total")
        metrics.add("tokens_total", tokens)
        metrics.add("tokens_saved_total", self.model.shape.tokens * layers * len(batch) - tokens)
        metrics.add("macs_total", sum(macs))
        metrics.add("macs_saved_total", static * len(batch) - sum(macs))
        metrics.observe("batch_seconds", seconds)
        metrics.observe("batch_images", len(batch))
