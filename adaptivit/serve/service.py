"""What the routes share: a model behind its batcher, and the way from a request's bytes to answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import python_multipart  # noqa: F401  starlette reads forms by it, and says so only then
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from .. import tasks
from ..budget.curve import Budget
from ..errors import UserError
from ..model import AdaptiveViT
from . import limits as checks
from .batcher import Answer, Batcher, Job, QueueFull
from .config import Limits
from .errors import Refused, busy, shown
from .metrics import Metrics

_FIELDS = 16  # of a form, beside its files
_DECODERS = 2  # threads
T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """A request for classification, read."""

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
            metrics=self.metrics,
        )
        self._transform = model.preprocessing.evaluation()
        self._decoders = ThreadPoolExecutor(_DECODERS, thread_name_prefix="adaptivit-decode")

    def close(self) -> None:
        """Finish what was accepted."""
        self._decoders.shutdown()
        self.batcher.close()

    async def within(self, request: Request, answer: Callable[[], Awaitable[T]]) -> T:
        """An answer within the time-out."""
        try:
            async with asyncio.timeout(self.limits.timeout):
                return await answer()
        except TimeoutError:
            seconds = f"{self.limits.timeout:g} s"
            if not getattr(request.state, "read", False):
                raise Refused(408, f"The request did not arrive within {seconds}.", {"Connection": "close"}) from None
            raise Refused(503, f"There was no answer within {seconds}; try later.", {"Retry-After": "1"}) from None

    # -- from bytes to images ------------------------------------------------------------------------------------
    async def aside(self, function: Callable[..., T], *given: Any) -> T:
        """Work that would hold up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, function, *given)

    async def body(self, request: Request) -> bytes:
        try:
            data = await checks.body(request.stream(), request.headers.get("content-length"), self.limits)
        except ClientDisconnect:
            raise Refused(400, "The request ended before its body did.") from None
        request.state.read = True  # from here on it is we who are slow
        return data

    async def form(self, request: Request) -> tuple[list[bytes], dict[str, str]]:
        """Files named `images` or `image`, and fields, of a multipart form."""
        data = await self.body(request)

        async def once() -> Any:
            yield data

        most = self.limits.max_images
        parser = MultiPartParser(request.headers, once(), max_files=most, max_fields=_FIELDS, max_part_size=10_000)
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError, ValueError) as error:
            if "Too many files" in str(error):
                raise Refused(413, f"Too many images: at most {most} a request are taken.") from None
            raise Refused(400, "The body is not a multipart form with a boundary.") from None
        files: list[bytes] = []
        fields: dict[str, str] = {}
        try:
            for key, value in form.multi_items():
                if isinstance(value, UploadFile):
                    if key not in ("images", "image"):
                        raise Refused(422, f"Expected files in the field 'images', got {shown(key)}.")
                    files.append(await value.read())
                elif key in ("images", "image"):
                    raise Refused(422, f"{key}: expected a file, got a text field.")
                else:
                    fields[key] = value
        finally:
            await form.close()
        return files, fields

    async def asked(self, request: Request) -> Asked:
        """The images and options of POST /v1/classify."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        given: dict[str, Any]
        if kind == "multipart/form-data":
            files, fields = await self.form(request)
            given = dict(fields)
        elif kind == "application/json":
            given = await self.aside(checks.read_json, await self.body(request))
            files = await self.aside(self._base64, given.pop("images", None))
        else:
            raise Refused(415, "Expected multipart/form-data or application/json.")
        if not files:
            raise Refused(422, "Expected at least one image in 'images'.")
        unknown = sorted(set(given) - {"top_k", "budget"})
        if unknown:
            raise Refused(422, f"Unknown field {shown(unknown[0])}; known: images, top_k, budget.")
        classes = self.model.vit.num_classes
        top_k = checks.whole_number(given.get("top_k", min(3, classes)), "top_k", 1, classes)
        return Asked(files, top_k, self.budgets(given.get("budget"), len(files)))

    def _base64(self, given: object) -> list[bytes]:
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts:
            raise Refused(422, "images: expected a list of at least one base64 string.")
        if len(texts) > self.limits.max_images:
            raise Refused(413, f"Too many images: at most {self.limits.max_images} a request are taken.")
        return [checks.decoded(text, f"image {i}") for i, text in enumerate(texts, 1)]

    def budgets(self, given: object, images: int) -> list[Budget | None]:
        """One for all, or a list with one (or null) an image."""
        if isinstance(given, list):
            if len(given) != images:
                raise Refused(
                    422, f"budget: expected one for all or one for each of {images} images, got {len(given)}."
                )
            return [self._budget(one) for one in given]
        return [self._budget(given)] * images

    def _budget(self, given: object) -> Budget | None:
        if isinstance(given, str) and len(given) > 40:
            raise Refused(422, f"budget: expected something like '-33%', got {shown(given)}.")
        try:
            return self.batcher.budget(given)
        except UserError as error:
            raise Refused(422, " ".join(str(error).split())) from None

    def tensor(self, data: bytes, what: str) -> Tensor:
        """[C, H, W] as the model reads it."""
        return self._transform(checks.picture(data, what, self.limits))

    def tensors(self, files: Sequence[bytes]) -> list[Tensor]:
        return [self.tensor(data, f"image {i}") for i, data in enumerate(files, 1)]

    # -- from images to answers ----------------------------------------------------------------------------------
    async def run(self, images: Sequence[Tensor], given: Sequence[Budget | None], trace: bool = False) -> list[Answer]:
        jobs = [Job(image, budget, trace) for image, budget in zip(images, given, strict=True)]
        try:
            waiting = [asyncio.wrap_future(f) for f in self.batcher.submit(jobs)]
        except QueueFull as error:
            raise busy(str(error)) from None
        answers = await asyncio.gather(*waiting)
        for i, answer in enumerate(answers, 1):
            if not bool(answer.logits.isfinite().all()):
                raise Refused(422, f"image {i}: the model's answer is not finite; are its numbers normalised?")
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
