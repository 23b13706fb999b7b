"""Hugging Face data sets that lie on this machine: hf:PATH, with PATH as save_to_disk wrote it, or parquet files.

Needs the extra `datasets`. Images stay encoded until they are used, and rows are read from their place, so the set need
not fit into memory. hf:PATH?image=COLUMN&label=COLUMN names the columns where they are not clear.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload
from urllib.parse import parse_qsl

from ..errors import DataError, UserError, first_line

PREFIX = "hf:"
SPLITS = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test"}


@dataclass(frozen=True)
class Row:
    source: str
    number: int
    value: Any  # {"bytes": ..., "path": ...}

    def __str__(self) -> str:
        return f"{self.source}[{self.number}]"

    def open(self) -> io.BytesIO:
        value = self.value or {}
        if value.get("bytes") is not None:
            return io.BytesIO(value["bytes"])
        if value.get("path"):
            return io.BytesIO(Path(value["path"]).read_bytes())
        raise OSError("an empty cell")


class Rows(Sequence[Row]):
    """The images of a table, not yet decoded."""

    def __init__(self, table: Any, column: str, source: str, numbers: Sequence[int] | None = None) -> None:
        self.table, self.column, self.source = table, column, source
        self.numbers = range(len(table)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        number = self.numbers[index]
        return Row(self.source, number, self.table[number][self.column])

    def take(self, indices: Sequence[int]) -> Rows:
        return Rows(self.table, self.column, self.source, [self.numbers[i] for i in indices])


@dataclass(frozen=True)
class Part:
    source: str
    rows: Rows
    labels: list[int]
    classes: tuple[str, ...]


def read(name: str) -> dict[str, Part]:
    """The splits of hf:PATH; one without splits is called `all`."""
    datasets = _package()
    place, _, query = name[len(PREFIX) :].partition("?")
    wanted = dict(parse_qsl(query))
    if odd := set(wanted) - {"image", "label"}:
        raise DataError(f"{name}: expected ?image=COLUMN&label=COLUMN, got {', '.join(sorted(odd))}.")
    tables = _tables(datasets, Path(place))
    image = _column(datasets, tables, place, "image", wanted.get("image"))
    label = _column(datasets, tables, place, "label", wanted.get("label"))
    classes = _classes(datasets, tables, place, label)
    found = {}
    for split, table in tables.items():
        source = f"{PREFIX}{place}" + ("" if split == "all" else f":{split}")
        labels = _numbers(table[label][:], classes, source, label)
        found[split] = Part(
            source, Rows(table.cast_column(image, datasets.Image(decode=False)), image, source), labels, classes
        )
    return found


def _package() -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError("hf: needs the package datasets: pip install 'adaptivit[datasets]'.") from None
    datasets.disable_progress_bars()
    return datasets


def _tables(datasets: Any, place: Path) -> dict[str, Any]:
    """Tables by split name. Nothing is downloaded: what is not here is an error."""
    if not place.exists():
        raise DataError(f"Data not found: {place} (hf: reads what lies on this machine, and downloads nothing).")
    try:
        if place.is_dir() and any((place / n).exists() for n in ("dataset_info.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(str(place))
            tables = dict(loaded.items()) if isinstance(loaded, datasets.DatasetDict) else {"all": loaded}
        else:
            files = sorted(place.rglob("*.parquet")) if place.is_dir() else [place]
            if not files or any(f.suffix != ".parquet" for f in files):
                raise DataError(f"{place}: expected what save_to_disk wrote, or .parquet files.")
            parts: dict[str, list[str]] = {}
            for file in files:
                parts.setdefault(file.stem.split("-")[0], []).append(str(file))
            if not set(parts) <= set(SPLITS):
                parts = {"all": [str(f) for f in files]}
            tables = {split: datasets.Dataset.from_parquet(names) for split, names in parts.items()}
    except DataError:
        raise
    except Exception as error:  # a damaged table can raise anything
        raise DataError(f"Cannot read the data set {place} ({first_line(error)}).") from None
    return {SPLITS.get(split, "all" if len(tables) == 1 else split): table for split, table in tables.items()}


def _column(datasets: Any, tables: dict[str, Any], place: str, what: str, name: str | None) -> str:
    features = next(iter(tables.values())).features
    if name is not None:
        if name not in features:
            raise DataError(f"{place} has no column {name!r} (found: {', '.join(features)}).")
        return name
    kind = datasets.Image if what == "image" else datasets.ClassLabel
    found = [n for n, feature in features.items() if isinstance(feature, kind)]
    if len(found) != 1 and what in features:
        return what
    if len(found) != 1:
        raise DataError(
            f"{place} has {len(found)} {what} columns of {', '.join(features)}: name it, as hf:{place}?{what}=COLUMN."
        )
    return found[0]


def _classes(datasets: Any, tables: dict[str, Any], place: str, label: str) -> tuple[str, ...]:
    feature = next(iter(tables.values())).features[label]
    if isinstance(feature, datasets.ClassLabel):
        return tuple(feature.names)
    values = {v for table in tables.values() for v in table[label][:]}
    if all(isinstance(v, int) for v in values):
        return tuple(map(str, range(max(values) + 1)))
    if all(isinstance(v, str) for v in values):
        return tuple(sorted(values))
    raise DataError(f"{place}: the column {label} holds neither class numbers nor names alone.")


def _numbers(values: list[Any], classes: tuple[str, ...], source: str, label: str) -> list[int]:
    number = {name: i for i, name in enumerate(classes)}
    found = [number.get(v, -1) if isinstance(v, str) else v for v in values]
    bad = next((i for i, v in enumerate(found) if not isinstance(v, int) or not 0 <= v < len(classes)), None)
    if bad is not None:
        raise DataError(f"{source}: row {bad} has no class in the column {label} (got {values[bad]!r}).")
    return found
