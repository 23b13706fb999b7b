"""A model behind its batcher, and what the routes share: from a request's bytes to answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from torch import Tensor

from .. import tasks
from ..budget.curve import Budget, parse
from ..errors import UserError
from ..evaluation.record import record
from ..model import AdaptiveViT
from .batcher import Answer, Batcher, Job
from .config import Limits, share
from .errors import Refused, busy, require, shown
from .limits import body, content_type, encoded_images, form, picture, pixels_of, read_json, whole_number
from .metrics import Metrics
from .turns import Asker, Room, Workers

_WILD = 1e3  # no normalised pixel is as large
_THREADS = 2  # that parse and decode
_LONGEST = 0.15  # seconds of a batch
T = TypeVar("T")


class Asked(NamedTuple):
    """A parsed request for answers."""

    files: list[bytes]
    top_k: int
    budgets: list[Budget | None]  # one an image


class Service:
    def __init__(
        self,
        model: AdaptiveViT,
        *,
        limits: Limits | None = None,
        name: str = "adaptivit",
        class_names: Sequence[str] | None = None,
        batch_tokens: int | None = None,
        batch_images: int | None = None,
        wait: float = 0.002,
    ) -> None:
        if not model.shape.num_classifiers:
            raise UserError("This model has no classifier (num_classes = 0), so there is nothing to serve.")
        self.model, self.name, self.limits = model, name, limits or Limits()
        self.task = tasks.get(model.task)
        self.names = list(class_names or model.class_names or [])
        self.metrics = Metrics()
        self.batcher = Batcher(
            model,
            tokens=batch_tokens,
            images=batch_images,
            wait=wait,
            queue=self.limits.max_queue,
            one=max(share(self.limits.max_queue), self.limits.max_images),
            longest=_LONGEST,
            metrics=self.metrics,
        )
        self._transform = model.preprocessing.evaluation()
        self._workers = Workers(_THREADS, self.limits.pixels // 4)
        self._pixels = Room(int(self.limits.max_pixels_under_way * 1e6), self.limits.request_pixels)

    def close(self) -> None:
        """Finish what was accepted."""
        self._workers.close()
        self.batcher.close()

    @asynccontextmanager
    async def deadline(self, request: Request) -> AsyncIterator[None]:
        """The time-out of a request: 408 while its body arrives, 503 after."""
        try:
            async with asyncio.timeout(self.limits.timeout):
                yield
        except TimeoutError:
            seconds = f"{self.limits.timeout:g} s"
            if not getattr(request.state, "read", False):
                raise Refused(408, f"The request did not arrive within {seconds}.", {"Connection": "close"}) from None
            raise Refused(503, f"There was no answer within {seconds}; try later.", {"Retry-After": "1"}) from None

    async def aside(self, request: Request, cost: int, function: Callable[..., T], *given: Any) -> T:
        """Run in a thread, at the request's turn, what would block the event loop; cost as for Workers."""
        return await self._workers.run(Asker.of(request), cost, function, *given)

    # -- from bytes to images ------------------------------------------------------------------------------------
    async def asked(self, request: Request) -> Asked:
        """The images and options of a request for answers."""
        fields: dict[str, Any]
        kind = content_type(request)
        if kind == "multipart/form-data":
            files, fields = await form(request, self.limits)
        elif kind == "application/json":
            data = await body(request, self.limits)
            fields = await self.aside(request, len(data), read_json, data)
            files = await self.aside(request, len(data), encoded_images, fields.pop("images", None), self.limits)
        else:
            raise Refused(415, "Expected multipart/form-data or application/json.")
        require(bool(files), "Expected at least one image in 'images'.")
        if unknown := sorted(set(fields) - {"top_k", "budget"}):
            raise Refused(422, f"Unknown field {shown(unknown[0])}; known: images, top_k, budget.")
        classes = self.model.shape.outputs
        top_k = whole_number(fields.get("top_k", min(3, classes)), "top_k", 1, classes)
        return Asked(files, top_k, self.budgets(fields.get("budget"), len(files)))

    def budgets(self, given: object, images: int) -> list[Budget | None]:
        """One budget an image, from one for all or a list with one (or null) an image."""
        if not isinstance(given, list):
            return [self._budget(given)] * images
        count = f"budget: expected one for all or one for each of {images} images, got {len(given)}."
        require(len(given) == images, count)
        return [self._budget(one) for one in given]

    def _budget(self, given: object) -> Budget | None:
        """Refused if this model cannot meet it."""
        if given is None:
            return None
        if isinstance(given, str) and len(given) > 40:
            raise Refused(422, f"budget: expected something like '-33%', got {shown(given)}.")
        try:
            budget = parse(given)
            self.model.budget_state.solve(budget, self.batcher.device)
        except UserError as error:
            raise Refused(422, " ".join(str(error).split())) from None
        return budget

    async def tensors(self, request: Request, files: Sequence[bytes]) -> list[Tensor]:
        """[C, H, W] each, as the model reads it. All headers are read before the first image is decoded."""
        named = [(data, f"image {i}", self.limits) for i, data in enumerate(files, 1)]
        pixels = await all_of(request, (self.aside(request, len(one[0]), pixels_of, *one) for one in named))
        most = f"at most {self.limits.max_request_pixels:g} million are taken"
        line = f"The images have too many pixels together; {most}."
        require(sum(pixels) <= self.limits.request_pixels, line, 413)
        client, count = Asker.of(request).client, sum(pixels)
        if not self._pixels.fits(client, count):
            raise busy("Too many pixels wait to be decoded.")
        with self._pixels.held(client, count):
            jobs = zip(pixels, named, strict=True)
            return await all_of(request, (self.aside(request, n, self._tensor, *one) for n, one in jobs))

    def _tensor(self, data: bytes, what: str, limits: Limits) -> Tensor:
        return self._transform(picture(data, what, limits))

    # -- from images to answers ----------------------------------------------------------------------------------
    async def run(
        self, request: Request, images: Sequence[Tensor], given: Sequence[Budget | None], trace: bool = False
    ) -> list[Answer]:
        asker = Asker.of(request)
        jobs = [Job(image, budget, trace, asker) for image, budget in zip(images, given, strict=True)]
        answers = await all_of(request, map(asyncio.wrap_future, self.batcher.submit(jobs)))
        for i, (image, answer) in enumerate(zip(images, answers, strict=True), 1):
            if not bool(answer.logits.isfinite().all()):
                line = f"image {i}: the model's answer is not finite"
                require(float(image.abs().max()) < _WILD, f"{line}; are its numbers normalised?")
                raise Refused(500, f"{line}. The fault is the model's, not the request's.")
        return answers

    def answered(self, answer: Answer, top_k: int) -> dict[str, Any]:
        """An answer as JSON."""
        said = self.task.answer(answer.logits, self.names, top_k)
        return record(said, answer.macs / 1e9, answer.static_macs / 1e9, answer.mean_depth, answer.live)


async def all_of(request: Request, work: Iterable[Awaitable[T]]) -> list[T]:
    """All results. With the first that fails, or when the client has gone, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    gone = asyncio.ensure_future(_gone(request))
    gone.add_done_callback(lambda _: [task.cancel() for task in tasks])
    try:
        return await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        if gone.done():
            raise Refused(499, "The client has gone.") from None
        raise
    finally:
        for task in (*tasks, gone):
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
