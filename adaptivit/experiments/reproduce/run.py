"""What a run and a table are. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Run:
    """One row of a table for each seed."""

    name: str  # in the table
    method: str = ""  # policy[:recipe][,key=value] as in `adaptivit compare`, under what the table has in common; or
    recipe: str = ""  # a recipe with all its own settings
    change: Mapping[str, Any] = field(default_factory=dict)  # fields of TrainConfig
    start: str = ""  # the run of the same seed whose model it starts from; default: --weights
    seed: int | None = None  # the only seed that it is run with; those that start from it have the table's
    weights: str = ""  # a name in the folder --weights; default: the backbone's; `none` for random ones
    train: bool = True  # else the model is evaluated as it is
    share: float | None = None  # a budget of static's MACs, calibrated on validation images
    paper: str = ""  # what the paper reports


@dataclass(frozen=True)
class Table:
    """A table or a figure."""

    name: str
    title: str
    protocol: str  # what all runs have in common, in words
    runs: tuple[Run, ...]
    data: str  # in words; `digits` is a name that needs no file
    source: str = "ours"  # of a paper: which table or figure
    shared: Mapping[str, Any] = field(default_factory=dict)  # fields of TrainConfig for runs that name a method
    seeds: tuple[int, ...] = (0,)
    reference: str = ""  # the run that others are compared to, image by image
    pairs: tuple[tuple[str, str], ...] = ()  # runs to compare with each other too, image by image
    curves: tuple[str, ...] = ()  # figures to draw over the epochs, of the validation (top1, mean_depth)
    training: bool = False  # of the training batches instead (accuracy, mean_depth)
    one_cost: bool = False  # rows differ in accuracy alone: no plot against cost
    time: str = ""  # measured, with the machine

    def __post_init__(self) -> None:
        names = [run.name for run in self.runs]
        assert len(set(names)) == len(names), f"{self.name}: two runs have one name"
        for i, run in enumerate(self.runs):
            assert bool(run.method) != bool(run.recipe), f"{self.name}: {run.name}"
            assert not run.start or run.start in names[:i], f"{self.name}: {run.name} starts from a later run"
        assert {name for pair in self.pairs for name in pair} <= set(names), self.name
        assert not self.reference or self.reference in names, self.name
