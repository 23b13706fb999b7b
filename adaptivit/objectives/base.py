"""What a loss term is, and their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..errors import NotFiniteError
from ..output import Output


@dataclass(frozen=True)
class Batch:
    """What a loss may know beside the output."""

    targets: Tensor | None = None  # [B] class indices, or [B, classes] probabilities (mixup)
    teacher_logits: Tensor | None = None  # [B, classes] of the static model
    teacher_patches: Tensor | None = None  # [B, patches, D] of the static model after the final norm


class Term(Protocol):
    """One loss term."""

    @property
    def needs(self) -> frozenset[str]:
        """Facts to ask the model for: model(images, ask=objective.needs)."""
        ...

    def __call__(self, output: Output, batch: Batch) -> Tensor: ...


@dataclass(frozen=True)
class Losses:
    total: Tensor
    terms: dict[str, Tensor]  # unweighted, detached

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

    def __call__(self, output: Output, batch: Batch) -> Losses:
        values = {name: term(output, batch) for name, (_, term) in self.terms.items()}
        total = sum(
            (self.terms[name][0] * value for name, value in values.items()), start=output.logits.new_zeros(()).float()
        )
        return Losses(total, {name: value.detach() for name, value in values.items()})
