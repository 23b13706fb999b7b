"""One thread that runs the model, on batches filled by tokens instead of images.

Shapes: C x H x W an image, L blocks, P patches.

A batch has room for a number of tokens (of the mean block). An image takes as many as recent images at its budget
took: where 16 static images fill a batch, 32 of a model with half the tokens do, and budgets may differ within it. The
image whose turn it is always goes (`turns.py`), and those behind it as they fit. Of a slow model a batch has room for
what takes `longest` seconds, so that no client waits long for another's batch; in a batch that clients share, one of
them has no more than the others together, or a quarter of `longest`.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..budget.curve import Budget
from ..cost import CostModel
from ..errors import UserError
from ..model import AdaptiveViT
from ..output import Output
from ..utils.hardware import device_name
from .memory import Trimmer
from .metrics import Metrics
from .turns import Asker, next_turn

_MOMENTUM = 0.9  # of the moving mean of an image's tokens
_PACE = 0.7  # of that of a token's time
_RECENT = 10.0  # seconds that a client counts after its last image
log = logging.getLogger("adaptivit.serve")


class QueueFull(Exception):
    """No room for so many images."""


@dataclass(frozen=True)
class Answer:
    """The model's output for one image, its cost and its times."""

    logits: Tensor  # [classes], float32 on the CPU
    macs: float
    static_macs: float
    live: list[int]  # [L] tokens in each block's attention
    mean_depth: float
    attended: Tensor | None  # [L, P] bool, if the job has `trace`
    queued: float  # seconds
    seconds: float  # of the pass that this image was part of
    images: int  # of that pass


@dataclass
class Job:
    image: Tensor  # [C, H, W], normalised, on the CPU
    budget: Budget | None = None  # None: the model's own
    trace: bool = False  # give `attended`
    asker: Asker = field(default_factory=Asker)
    answer: Future[Answer] = field(default_factory=Future)
    tokens: float = 0.0  # expected in the mean block
    since: float = 0.0
    turn: float = 0.0


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
        one: int | None = None,
        longest: float = math.inf,
        metrics: Metrics | None = None,
    ) -> None:
        weight = next(model.parameters())
        self.model, self.device, self.dtype = model.eval(), weight.device, weight.dtype
        slots = model.shape.tokens
        self.tokens = tokens or slots * (256 if self.device.type == "cuda" else 16)
        self.images = images or max(1, 4 * self.tokens // slots)
        self.wait, self.queue, self.metrics = wait, queue, metrics or Metrics()
        self.one = queue if one is None else one  # of the queue, for one client
        self.longest, self._pace = longest, 0.0  # seconds of a pass; of a token, a moving mean
        self.costs = CostModel(model.whole or model.shape, slots)
        self._mean_tokens: dict[int | None, float] = {}  # in the mean block, by the budget's percentage of static
        self._waiting: list[Job] = []  # by turn
        self._now = 0.0  # the turn of the last batch
        self._seen: dict[str, float] = {}  # clients of the last seconds, and when
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._run: Any = model
        self._percentage(None)  # a budget of the model that cannot be met here is an error now, not in the thread
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
            self._waiting = [job for job in self._waiting if not job.answer.cancelled()]
            own = sum(job.asker.client == jobs[0].asker.client for job in self._waiting) if jobs else 0
            if len(self._waiting) + len(jobs) > self.queue or own + len(jobs) > self.one:
                raise QueueFull(f"The queue is full ({self.queue} images wait, or {self.one} of one client).")
            self._seen = {client: when for client, when in self._seen.items() if now - when < _RECENT}
            for job in jobs:
                self._seen[job.asker.client] = now
                job.turn = next_turn(self._now, job.asker, 1.0, self._waiting)
                self._waiting.append(job)
            self._waiting.sort(key=lambda job: job.turn)
            self._changed.notify()
        return [job.answer for job in jobs]

    def call(self, function: Callable[..., Any], *given: Any) -> Future[Any]:
        """Run a function in the model's thread, between two batches."""
        answer: Future[Any] = Future()
        with self._changed:
            if self._closing or len(self._calls) >= self.queue:
                raise QueueFull("The queue is full.")
            self._calls.append((functools.partial(function, *given), answer))
            self._changed.notify()
        return answer

    def expected(self, budget: Budget | None) -> float:
        """Tokens of the mean block for images at this budget: measured, or at first those of the budget itself."""
        percentage = self._percentage(budget)
        start = self.model.shape.tokens * (1.0 if percentage is None else percentage / 100)
        return self._mean_tokens.get(percentage, start)

    def _percentage(self, budget: Budget | None) -> int | None:
        """Percent of static's MACs: whole, so that many different budgets do not fill the memory."""
        budget = self.model.budget_state.budget if budget is None else budget
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
            trimmer = Trimmer()
            while self._next():
                self._answer([job for job in self._batch() if job.answer.set_running_or_notify_cancel()])
                self._one_call()
                trimmer.step()

    def _prepare(self) -> None:
        """A first pass, which is slow; on a GPU also one CUDA graph for every batch, if the policy allows it."""
        size = self.model.preprocessing.size
        self.model(torch.zeros(1, self.model.backbone.in_chans, *size, device=self.device, dtype=self.dtype))
        if self.device.type != "cuda":
            return
        try:
            self._run = self.model.capture(self.images)
        except Exception as error:  # whatever the driver or the compiler finds: the model itself runs as well
            log.warning("no CUDA graph, running without: %s", error)

    def _next(self) -> bool:
        """Wait for something to do; False if closing and nothing is left."""
        with self._changed:
            while not self._waiting and not self._calls and not self._closing:
                self._changed.wait()
            return bool(self._waiting or self._calls)

    def _batch(self) -> list[Job]:
        """The next batch, full or as full as it became while its first image could wait."""
        with self._changed:
            if not self._waiting:
                return []
            until = min(job.since for job in self._waiting) + self.wait
            while not self._closing and (left := until - time.monotonic()) > 0 and not self._full():
                self._changed.wait(left)
            return self._fill()

    def _full(self) -> bool:
        return len(self._waiting) >= self.images or sum(job.tokens for job in self._waiting) >= self._room()

    def _room(self) -> float:
        """Tokens of the next batch: a quarter of the room at least, since smaller ones take longer by the image.

        Half as long where several clients ask: then another's image is probably on its way.
        """
        longest = self.longest / (2 if len(self._seen) > 1 else 1)
        return min(self.tokens, max(self.tokens / 4, longest / self._pace)) if self._pace else self.tokens

    def _fill(self) -> list[Job]:
        """The image whose turn it is, and of the others, in their order, those that fit."""
        batch: list[Job] = []
        room, shares = self._room(), self._shares()
        for job in self._waiting:
            client = job.asker.client
            fits = not batch or job.tokens <= min(room, shares[client])
            if len(batch) < self.images and fits and not job.answer.cancelled():
                batch.append(job)
                room -= job.tokens
                shares[client] -= job.tokens
                self._now = max(self._now, job.turn)
        chosen = set(map(id, batch))
        self._waiting = [job for job in self._waiting if id(job) not in chosen and not job.answer.cancelled()]
        return batch

    def _shares(self) -> dict[str, float]:
        """Tokens that each client may have in the next batch."""
        waiting: dict[str, float] = defaultdict(float)
        for job in self._waiting:
            waiting[job.asker.client] += 0.0 if job.answer.cancelled() else job.tokens
        if len(waiting) < 2 or not self._pace:
            return dict.fromkeys(waiting, math.inf)
        least, total = self.longest / self._pace / 4, sum(waiting.values())
        return {client: max(least, total - own) for client, own in waiting.items()}

    def _answer(self, batch: list[Job]) -> None:
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
                self._answer([job])
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

    def _pass(self, batch: list[Job]) -> list[Answer]:
        begun = time.monotonic()
        images = torch.stack([job.image for job in batch]).to(self.device, self.dtype)
        output = self._forward(images, [job.budget for job in batch])
        logits, attended = output.logits.float().cpu(), output.trace.attended.cpu()
        macs, depth = output.macs_deployed.tolist(), output.trace.mean_depth.tolist()
        live, prefix = output.trace.live.T.tolist(), output.trace.num_prefix_tokens
        seconds = time.monotonic() - begun
        answers = [
            Answer(
                logits=logits[i],
                macs=macs[i],
                static_macs=self.costs.static,
                live=live[i],
                mean_depth=depth[i],
                attended=attended[:, i, prefix:].clone() if job.trace else None,
                queued=begun - job.since,
                seconds=seconds,
                images=len(batch),
            )
            for i, job in enumerate(batch)
        ]
        self._count(batch, answers)
        return answers

    def _forward(self, images: Tensor, given: list[Budget | None]) -> Output:
        if all(b is None for b in given):
            return self._run(images)
        own = self.model.budget or "none"
        texts = [own if b is None else b.text for b in given]
        try:
            return self._run(images, budget=texts)
        except UserError:  # a graph has the shapes of one budget, if the policy's counts are fixed
            if self._run is self.model:
                raise
            return self.model(images, budget=texts)

    def _count(self, batch: list[Job], answers: list[Answer]) -> None:
        metrics, count, layers = self.metrics, len(batch), len(answers[0].live)
        pace = answers[0].seconds / sum(job.tokens for job in batch)
        self._pace = _PACE * (self._pace or pace) + (1 - _PACE) * pace
        for job, answer in zip(batch, answers, strict=True):
            key, mean = self._percentage(job.budget), sum(answer.live) / layers
            self._mean_tokens[key] = _MOMENTUM * self._mean_tokens.get(key, mean) + (1 - _MOMENTUM) * mean
            metrics.observe("queue_seconds", answer.queued)
        tokens, macs = sum(sum(answer.live) for answer in answers), sum(answer.macs for answer in answers)
        metrics.add("images_total", count)
        metrics.add("batches_total")
        metrics.add("tokens_total", tokens)
        metrics.add("tokens_saved_total", self.model.shape.tokens * layers * count - tokens)
        metrics.add("macs_total", macs)
        metrics.add("macs_saved_total", self.costs.static * count - macs)
        metrics.observe("batch_seconds", answers[0].seconds)
        metrics.observe("batch_images", count)
