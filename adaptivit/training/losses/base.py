"""What a loss term is, and their weighted sum.

A term is a function of sums over images: `loss(sums)`. Sums of two halves of a batch add up, the losses of two halves
do not: a mean over kept tokens, or the square of a mean, is not the mean of two such. So several processes, or the
parts of an accumulated batch, add up their sums first (shares.py), and the loss is that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ... import tasks
from ...errors import NotFiniteError
from ...output import Output

Sums = dict[str, Tensor]  # by term
CLASSIFICATION = tasks.get(tasks.DEFAULT)


@dataclass(frozen=True)
class Batch:
    """What a loss may know beside the output."""

    targets: Tensor | None = None  # [B, ...] as the task gives them: classes [B], or probabilities [B, classes] (mixup)
    teacher_logits: Tensor | None = None  # [B, classes] of the static model
    teacher_patches: Tensor | None = None  # [B, patches, D] of the static model after the final norm


class Term(Protocol):
    """One loss term: any callable with `needs`. One that is not Summed is taken for a mean over images."""

    @property
    def needs(self) -> frozenset[str]:
        """Facts to ask the model for: model(images, aux=objective.needs)."""
        ...

    def __call__(self, output: Output, batch: Batch) -> Tensor: ...


class Summed:
    """A term that says which sums it is made of."""

    plain: ClassVar[bool] = True  # a mean over images: its gradient needs to know nothing of the others

    def sums(self, output: Output, batch: Batch) -> Tensor:
        """[K] sums over these images."""
        raise NotImplementedError

    def loss(self, sums: Tensor) -> Tensor:
        """The loss of the images that were summed: by default their mean."""
        return mean(sums)

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        return self.loss(self.sums(output, batch))


def mean(sums: Tensor) -> Tensor:
    """[2] a sum and a number -> the mean, 0 where there is nothing."""
    return sums[0] / sums[1].clamp_min(1)


def over_images(values: Tensor) -> Tensor:
    """[B] one value an image -> [2] their sum and their number."""
    return torch.stack([values.sum(), values.new_full((), len(values))])


def over_mask(values: Tensor, mask: Tensor) -> Tensor:
    """[2] the sum of values over mask and its size; a true 0 (with a gradient of 0) where it is empty."""
    return torch.stack([torch.where(mask, values, torch.zeros_like(values)).sum(), mask.sum().to(values.dtype)])


@dataclass(frozen=True)
class Losses:
    total: Tensor
    terms: dict[str, Tensor]  # unweighted, detached
    sums: Sums  # that they were made of, detached

    def check_finite(self, step: int) -> None:
        """Stop with the name of the term that is not finite."""
        for name, value in {**self.terms, "total": self.total.detach()}.items():
            if not bool(value.isfinite()):
                raise NotFiniteError(
                    f"The loss term {name!r} became {float(value)} at step {step + 1}. "
                    "Lower the learning rate or its weight; the last good checkpoint was kept."
                )


class Objective:
    """A weighted sum of named terms; a term of weight 0 is not computed."""

    def __init__(self, terms: Mapping[str, tuple[float, Term]]) -> None:
        self.terms = {name: (weight, term) for name, (weight, term) in terms.items() if weight != 0}

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(term.needs for _, term in self.terms.values()))

    @property
    def plain(self) -> bool:
        """Whether every term is a plain mean over images."""
        return all(term.plain for _, term in self.terms.values() if isinstance(term, Summed))

    def sums(self, output: Output, batch: Batch) -> Sums:
        count = len(output.logits)
        return {
            name: term.sums(output, batch)
            if isinstance(term, Summed)
            else over_images(term(output, batch).expand(count))
            for name, (_, term) in self.terms.items()
        }

    def losses(self, sums: Sums) -> Losses:
        """The losses of all the images that went into the sums."""
        values = {
            name: term.loss(sums[name]) if isinstance(term, Summed) else mean(sums[name])
            for name, (_, term) in self.terms.items()
        }
        weighted = [self.terms[name][0] * value for name, value in values.items()]
        total = sum(weighted[1:], start=weighted[0]) if weighted else torch.zeros(())
        known = {name: value.detach() for name, value in values.items()}
        return Losses(total, known, {name: value.detach() for name, value in sums.items()})

    def __call__(self, output: Output, batch: Batch, whole: Callable[[Sums], Sums] | None = None) -> Losses:
        """`whole` makes of the sums of these images those of the batch that they are a part of."""
        sums = self.sums(output, batch)
        return self.losses(sums if whole is None else whole(sums))
