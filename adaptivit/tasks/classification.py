"""Classification: one class an image; cross-entropy; top-1 and top-5.

Shapes: B images, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError
from .protocol import Judged, Labels, Metric, Mixing, Shown, Task

if TYPE_CHECKING:
    from ..data.augment_config import AugmentConfig


class Classification(Task):
    noun: ClassVar[str] = "classes"
    tag: ClassVar[str] = "image-classification"
    verb: ClassVar[str] = "classify"
    schema: ClassVar[Mapping[str, Any]] = {
        "classes": {
            "type": "array",
            "description": "The top_k classes, the most probable first",
            "items": {
                "type": "object",
                "required": ["class", "name", "probability"],
                "properties": {
                    "class": {"type": "integer"},
                    "name": {"type": "string"},
                    "probability": {"type": "number", "description": "In 0..1"},
                },
            },
        }
    }
    score: ClassVar[str] = "accuracy"
    metrics: ClassVar[Mapping[str, Metric]] = {"top1": Metric("top-1"), "top5": Metric("top-5")}

    # -- labels ----------------------------------------------------------------------------------------------------
    def encode(
        self, labels: Mapping[str, Labels], names: tuple[str, ...], source: str
    ) -> tuple[dict[str, Labels], tuple[str, ...]]:
        """Class numbers. Labels are numbers from 0 on or names; names that the data does not list are sorted."""
        lists = {split: _plain(values, f"{source}:{split}") for split, values in labels.items()}
        distinct = set().union(*lists.values())
        if not distinct:
            raise DataError(f"{source}: expected labelled images, got none.")
        numbers = {label for label in distinct if isinstance(label, int)}
        if numbers and min(numbers) < 0:
            raise DataError(f"{source}: expected class numbers from 0 on, got {min(numbers)}.")
        if words := distinct - numbers:
            if numbers:
                raise DataError(
                    f"{source}: expected class numbers or names, got both ({min(numbers)}, {sorted(words)[0]!r})."
                )
            names = names or tuple(sorted(words))
            if unknown := sorted(words - set(names)):
                raise DataError(f"{source}: expected one of the {len(names)} classes listed, got {unknown[0]!r}.")
        names = names or tuple(map(str, range(max(numbers) + 1)))
        if numbers and max(numbers) >= len(names):
            raise DataError(
                f"{source}: expected labels below {len(names)}, the number of class names, got {max(numbers)}."
            )
        if not words:
            return dict(lists), names
        number = {name: i for i, name in enumerate(names)}
        return {s: [v if isinstance(v, int) else number[v] for v in values] for s, values in lists.items()}, names

    def align(
        self, labels: Labels, names: tuple[str, ...], outputs: int, known: Sequence[str] | None, source: str
    ) -> Labels:
        """Match by name where the model knows its classes, else by number where names are numbers, else by order."""
        if known is not None and set(names) <= set(known):
            number = [list(known).index(name) for name in names]
        elif known is None and all(name.isdigit() and int(name) < outputs for name in names):
            number = [int(name) for name in names]
        elif known is None and len(names) == outputs:
            return labels
        else:
            odd = next((name for name in names if name not in (known or [])), names[0])
            raise DataError(
                f"{source} has {len(names)} classes, the model {outputs}, and their names do not match "
                f"(for example {odd!r})."
            )
        return [number[label] for label in labels]

    def collate(self, labels: Labels) -> Tensor:
        """[B] int64"""
        return torch.tensor(np.asarray(labels), dtype=torch.long)

    def mixing(self, config: AugmentConfig, outputs: int) -> Mixing | None:
        if not (config.mixup or config.cutmix):
            return None
        from timm.data.mixup import Mixup

        mixing: Mixing = Mixup(config.mixup, config.cutmix, label_smoothing=0.0, num_classes=outputs)
        return mixing

    # -- head and loss ---------------------------------------------------------------------------------------------
    def outputs(self, names: tuple[str, ...]) -> int:
        return len(names)

    def loss(self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Cross-entropy; targets [B], or [B, C] probabilities (mixup)."""
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="none")

    def distance(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """KL(teacher || student)"""
        teacher, student = F.log_softmax(teacher, dim=-1), F.log_softmax(logits, dim=-1)
        return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)

    # -- metrics ---------------------------------------------------------------------------------------------------
    def judge(self, logits: Tensor, labels: Tensor) -> Judged:
        """Scores are 100 for a right answer and 0 for a wrong one."""
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hit = top == labels[:, None]
        return Judged(100.0 * hit[:, 0].double(), {"top1": hit[:, 0].sum(), "top5": hit.any(1).sum()})

    def figures(self, sums: Mapping[str, Tensor], images: int) -> dict[str, float]:
        return {name: 100 * int(sums[name]) / images for name in self.metrics}

    # -- answers ---------------------------------------------------------------------------------------------------
    def answer(self, logits: Tensor, names: Sequence[str] | None, top_k: int = 3) -> dict[str, Any]:
        top = logits.float().softmax(-1).topk(min(top_k, len(logits)))
        found = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return {"classes": [{"class": c, "name": _name(c, names), "probability": p} for c, p in found]}

    def caption(self, answer: Mapping[str, Any]) -> str:
        return "\n".join(f"{100 * c['probability']:5.1f} %  {c['name']}" for c in answer["classes"])

    def columns(self, answer: Mapping[str, Any]) -> dict[str, str]:
        columns: dict[str, str] = {}
        for rank, found in enumerate(answer["classes"], start=1):
            columns |= {f"class_{rank}": found["name"], f"probability_{rank}": f"{found['probability']:.6f}"}
        return columns

    def shown(self, logits: Tensor) -> Shown | None:
        top = logits.float().softmax(-1).max(-1)
        return Shown(top.indices, top.values)


def _plain(labels: Labels, source: str) -> list[Any]:
    """Python's numbers and names."""
    expected = "class numbers from 0 on, or names"
    if isinstance(labels, np.ndarray):
        if labels.ndim != 1 or labels.dtype.kind not in "iuU":
            raise DataError(f"{source}: expected {expected}, got {labels.dtype} {labels.shape}.")
        return list(labels.tolist())
    for row, label in enumerate(labels):
        if not isinstance(label, (int, str)) or isinstance(label, bool):
            raise DataError(f"{source}: expected {expected}, got {label!r} in row {row}.")
    return list(labels)


def _name(number: int, names: Sequence[str] | None) -> str:
    return names[number] if names and number < len(names) else str(number)
