"""What a task is. A task is one file that fills Task; classification.py is the example.

Shapes: B images, K outputs of the head. Labels are whatever the data holds; `encode` checks them once, `collate` makes
a tensor of them, and only the task's own methods read that tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from ..errors import UserError

if TYPE_CHECKING:
    from ..data.augment_config import AugmentConfig

Labels = Sequence[Any]  # of a set of images: a list or an array
Mixing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # images, labels -> images, targets


@dataclass(frozen=True)
class Metric:
    """How a metric is shown."""

    title: str
    unit: str = "%"
    digits: int = 2

    def text(self, value: float) -> str:
        return f"{value:.{self.digits}f} {self.unit}".strip()


class Judged(NamedTuple):
    """Predictions of a batch against its labels."""

    scores: Tensor  # [B] one an image: their mean is the first metric, and models are compared by them in pairs
    sums: dict[str, Tensor]  # what the metrics are made of; sums of two batches add up


class Shown(NamedTuple):
    """What pictures show of predictions that are classes."""

    classes: Tensor  # [B] predicted class
    confidence: Tensor  # [B] its probability


class Task(ABC):
    """Labels, head, loss, metrics and answers of one kind of prediction."""

    noun: ClassVar[str] = "outputs"  # what the head's outputs are
    tag: ClassVar[str] = "image-feature-extraction"  # the Hub's name of the task
    verb: ClassVar[str] = "predict"  # its route in serve, /v1/VERB
    schema: ClassVar[Mapping[str, Any]] = {}  # of the fields of `answer`, as JSON Schema
    score: ClassVar[str] = "score"  # what the mean score of training batches is called in the log
    metrics: ClassVar[Mapping[str, Metric]]  # by key of `figures`; the first is the mean of the scores

    def __init__(self, name: str) -> None:
        self.name = name

    # -- labels ----------------------------------------------------------------------------------------------------
    @abstractmethod
    def encode(
        self, labels: Mapping[str, Labels], names: tuple[str, ...], source: str
    ) -> tuple[dict[str, Labels], tuple[str, ...]]:
        """Labels as read, by split, checked and made ready for `collate`; and the names of the outputs.

        `names` are those that the data gives, empty if none. DataError says what is wrong in `source`."""

    def align(
        self, labels: Labels, names: tuple[str, ...], outputs: int, known: Sequence[str] | None, source: str
    ) -> Labels:
        """The labels as a model with these outputs and `known` names counts them; DataError where they do not fit."""
        return labels

    @abstractmethod
    def collate(self, labels: Labels) -> Tensor:
        """[B, ...] labels of a batch."""

    def mixing(self, config: AugmentConfig, outputs: int) -> Mixing | None:
        """Mixup and CutMix, where they are asked for."""
        if config.mixup or config.cutmix:
            raise UserError(f"augment.mixup, augment.cutmix: the task {self.name!r} has none; leave them at 0.")
        return None

    # -- head and loss ---------------------------------------------------------------------------------------------
    @abstractmethod
    def outputs(self, names: tuple[str, ...]) -> int:
        """Outputs of a fresh head for data with these names."""

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """[B] the loss of every image; targets as `collate` or `mixing` gives them."""

    def distance(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """[B] how far every image's outputs are from a teacher's, for distillation."""
        raise UserError(f"The task {self.name!r} has no distillation; leave it out.")

    # -- metrics ---------------------------------------------------------------------------------------------------
    @abstractmethod
    def judge(self, logits: Tensor, labels: Tensor) -> Judged:
        """Predictions against labels as `collate` gives them, on one device."""

    @abstractmethod
    def figures(self, sums: Mapping[str, Tensor], images: int) -> dict[str, float]:
        """The metrics, from sums over all images; keys as in `metrics`."""

    # -- answers ---------------------------------------------------------------------------------------------------
    @abstractmethod
    def answer(self, logits: Tensor, names: Sequence[str] | None, top_k: int = 3) -> dict[str, Any]:
        """One image's prediction as JSON, from its outputs [K]: what predict writes and serve returns."""

    @abstractmethod
    def caption(self, answer: Mapping[str, Any]) -> str:
        """That answer as a few words, for a table or under a picture."""

    def columns(self, answer: Mapping[str, Any]) -> dict[str, str]:
        """That answer as columns of a CSV file."""
        return {name: str(value) for name, value in answer.items()}

    def shown(self, logits: Tensor) -> Shown | None:
        """Predicted classes of a batch [B, K]; None where predictions are no classes."""
        return None
