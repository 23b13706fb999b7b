"""Tables and figures as lists of runs: records of the TOML files beside this one. Nothing here imports torch.

A record [NAME] has the fields of Table; `protocol` is a list of sentences, or of their names in [sentences]. Its runs:

    first     rows that stand before all others, each with fields of Run; that others start from
    runs      more of them
    at        methods at shares of static's MACs, by [shares]: {methods, shares, note, compared, fields of Run}; the
              first method is compared with the others, image by image, unless `compared` is false
    recipes   recipe = figure of the paper; {a,b} in a name for each of several; without a figure that of the recipe
    settings  row = settings added to the method `base`
    each      fields of all of these but `first`

`like` names a record of [groups] whose fields it has unless it has its own. {name} in a method stands for one of
[names].
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from ...training.recipes import RECIPES

Record = Mapping[str, Any]
PAPER_TITLES = {"aht": "AHT-ViT", "avit": "A-ViT", "amod": "A-MoD"}
_FORMS = ("protocol", "epochs", "first", "runs", "at", "recipes", "base", "settings", "each", "pairs")


@dataclass(frozen=True)
class Run:
    """One row of a table for each seed."""

    name: str  # in the table
    method: str = ""  # policy[:recipe][,key=value] as in `adaptivit compare`, under what the table has in common; or
    recipe: str = ""  # a recipe with all its own settings
    change: Mapping[str, Any] = field(default_factory=dict)  # settings of training
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
    data: str  # in words; `digits` is a name that needs no file, nothing for a figure that looks at no image
    source: str = "ours"  # of a paper: which table or figure
    shared: Mapping[str, Any] = field(default_factory=dict)  # settings of training for runs that name a method
    seeds: tuple[int, ...] = (0,)
    reference: str = ""  # the run that others are compared to, image by image
    pairs: tuple[tuple[str, str], ...] = ()  # runs to compare with each other too, image by image
    curves: tuple[str, ...] = ()  # figures to draw over the epochs, of the validation (top1, mean_depth)
    training: bool = False  # of the training batches instead (accuracy, mean_depth)
    panels: tuple[str, ...] = ()  # words of rows' names: a panel of curves for the rows of each
    by_policy: bool = False  # rows of one policy have its colour in curves, and are joined in the plot against cost
    one_cost: bool = False  # rows differ in accuracy alone: no plot against cost
    time: str = ""  # measured, with the machine
    figure: str = ""  # what is measured of the rows' models afterwards: a file of figures/
    options: Mapping[str, Any] = field(default_factory=dict)  # of the figure
    ran_on: str = ""  # of a paper, by us: "own" data, "other" (a stand-in for it), "" for neither
    ran: str = ""  # and where its results are: a page of docs/results

    def __post_init__(self) -> None:
        names = [run.name for run in self.runs]
        assert len(set(names)) == len(names), f"{self.name}: two runs have one name"
        for i, run in enumerate(self.runs):
            assert bool(run.method) != bool(run.recipe), f"{self.name}: {run.name}"
            assert not run.start or run.start in names[:i], f"{self.name}: {run.name} starts from a later run"
        assert {name for pair in self.pairs for name in pair} <= set(names), self.name
        assert not self.reference or self.reference in names, self.name
        assert self.ran_on in ("", "own", "other"), self.name

    @property
    def paper(self) -> str:
        """aht, avit or amod; empty for a table of ours."""
        first = self.name.partition("-")[0]
        return first if first in PAPER_TITLES else ""


def saving(share: float) -> str:
    """0.67 -> -33 %."""
    return f"-{round(100 * (1 - share))} %"


class Book:
    """The records of a TOML file."""

    def __init__(self, file: str) -> None:
        records = tomllib.loads(files(__package__).joinpath(file).read_text())
        parts = ("names", "shares", "sentences", "groups")
        self.names, self.shares, self.sentences, self.groups = (records.pop(part, {}) for part in parts)
        self.tables = {name: self._table(name, self._whole(record)) for name, record in records.items()}

    def at(self, key: str, share: float) -> str | None:
        """A method at a share of static's MACs; None where it cannot get there."""
        record, shares = self.shares[key], self.shares["shares"]
        values = dict(zip(shares, record.get("values", [""] * len(shares)), strict=False))
        if share not in values:
            return None
        return self._method(record["method"].replace("{share}", str(share)).replace("{value}", str(values[share])))

    def _whole(self, record: Record) -> dict[str, Any]:
        """The record with the fields of its groups."""
        own = dict(record)
        return {**self._whole(self.groups[own.pop("like")]), **own} if "like" in own else own

    def _table(self, name: str, record: dict[str, Any]) -> Table:
        given = {key: record.pop(key) for key in _FORMS if key in record}
        epochs, base = given.get("epochs", ""), given.get("base", "")
        protocol = [self.sentences.get(part, part).format(epochs=epochs) for part in given["protocol"]]
        at = [self._at_shares(dict(entry)) for entry in given.get("at", [])]
        settings = given.get("settings", {}).items()
        rows: list[Record] = [row for entry, _ in at for row in entry]
        rows += [*given.get("runs", []), *_recipes(given.get("recipes", {}))]
        rows += [{"name": row, "method": f"{base},{more}" if more else base} for row, more in settings]
        runs = [*given.get("first", []), *(_with(given.get("each", {}), row) for row in rows)]
        pairs = [*(pair for _, compared in at for pair in compared), *map(tuple, given.get("pairs", []))]
        lists: dict[str, Any] = {key: tuple(record.pop(key)) for key in ("seeds", "curves", "panels") if key in record}
        return Table(
            name, protocol=" ".join(protocol), runs=tuple(map(self._run, runs)), pairs=tuple(pairs), **lists, **record
        )

    def _run(self, row: Record) -> Run:
        return Run(**{**row, "method": self._method(row.get("method", ""))})

    def _method(self, method: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda found: self.names[found[1]], method)

    def _at_shares(self, entry: dict[str, Any]) -> tuple[list[Record], list[tuple[str, str]]]:
        """Rows of methods at shares, and the pairs of them."""
        methods, shares, note = entry.pop("methods"), entry.pop("shares"), entry.pop("note", "")
        compared, rows, pairs = entry.pop("compared", True), list[Record](), list[tuple[str, str]]()
        for share, key in itertools.product(shares, methods):
            method = self.at(key, share)
            if method is None:
                continue
            name, first = (f"{self.shares[k]['title']} {saving(share)}{note}" for k in (key, methods[0]))
            matched = {"share": share} if self.shares[key].get("matched") else {}
            rows.append({"name": name, "method": method, **matched, **entry})
            pairs += [(first, name)] * (compared and key != methods[0])
        return rows, pairs


def _with(each: Record, row: Record) -> Record:
    return {**each, **row, "change": {**each.get("change", {}), **row.get("change", {})}}


def _recipes(rows: Mapping[str, str]) -> Iterator[Record]:
    for pattern, paper in rows.items():
        for name in _expanded(pattern):
            yield {"name": name, "recipe": name, "paper": paper or RECIPES[name].paper}


def _expanded(pattern: str) -> list[str]:
    """`{a,b}-c` as a-c, b-c."""
    parts = [part[1:-1].split(",") if part[:1] == "{" else [part] for part in re.split(r"(\{.*?\})", pattern)]
    return ["".join(words) for words in itertools.product(*parts)]


OURS, PAPERS = Book("ours.toml"), Book("papers.toml")
TABLES: dict[str, Table] = OURS.tables | PAPERS.tables
