"""A model behind its batcher, and what the routes share: from a request's bytes to answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from torch import Tensor

from .. import tasks
from ..budget.curve import Budget, parse
from ..errors import UserError
from ..model import AdaptiveViT
from .batcher import Answer, Batcher, Job
from .config import Limits
from .errors import Refused, require, shown
from .limits import body, content_type, encoded_images, form, picture, read_json, whole_number
from .metrics import Metrics

_DECODERS = 2  # threads
_WILD = 1e3  # no normalised pixel is as large
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
        self.metrics, queue = Metrics(), self.limits.max_queue
        self.batcher = Batcher(
            model, tokens=batch_tokens, images=batch_images, wait=wait, queue=queue, metrics=self.metrics
        )
        self._transform = model.preprocessing.evaluation()
        self._decoders = ThreadPoolExecutor(_DECODERS, thread_name_prefix="adaptivit-decode")

    def close(self) -> None:
        """Finish what was accepted."""
        self._decoders.shutdown()
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

    async def aside(self, function: Callable[..., T], *given: Any) -> T:
        """Run in a thread what would block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, function, *given)

    # -- from bytes to images ------------------------------------------------------------------------------------
    async def asked(self, request: Request) -> Asked:
        """The images and options of a request for answers."""
        fields: dict[str, Any]
        kind = content_type(request)
        if kind == "multipart/form-data":
            files, fields = await form(request, self.limits)
        elif kind == "application/json":
            fields = await self.aside(read_json, await body(request, self.limits))
            files = await self.aside(encoded_images, fields.pop("images", None), self.limits)
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

    def tensor(self, data: bytes, what: str) -> Tensor:
        """[C, H, W] as the model reads it."""
        return self._transform(picture(data, what, self.limits))

    def tensors(self, files: Sequence[bytes]) -> list[Tensor]:
        return [self.tensor(data, f"image {i}") for i, data in enumerate(files, 1)]

    # -- from images to answers ----------------------------------------------------------------------------------
    async def run(self, images: Sequence[Tensor], given: Sequence[Budget | None], trace: bool = False) -> list[Answer]:
        jobs = [Job(image, budget, trace) for image, budget in zip(images, given, strict=True)]
        answers = await asyncio.gather(*(asyncio.wrap_future(f) for f in self.batcher.submit(jobs)))
        for i, (image, answer) in enumerate(zip(images, answers, strict=True), 1):
            if not bool(answer.logits.isfinite().all()):
                line = f"image {i}: the model's answer is not finite"
                require(float(image.abs().max()) < _WILD, f"{line}; are its numbers normalised?")
                raise Refused(500, f"{line}. The fault is the model's, not the request's.")
        return answers

    def answered(self, answer: Answer, top_k: int) -> dict[str, Any]:
        """An answer as JSON."""
        return {
            **self.task.answer(answer.logits, self.names, top_k),
            "gmacs": answer.macs / 1e9,
            "static_gmacs": answer.static_macs / 1e9,
            "saved": 1 - answer.macs / answer.static_macs,
            "mean_depth": answer.mean_depth,
            "live": answer.live,
        }
