"""Hugging Face data sets on this machine: hf:PATH, a directory of save_to_disk or parquet files.

Needs the extra `datasets`. Images stay encoded until they are used and rows are read from their place, so the set need
not fit into memory. hf:PATH?image=COLUMN&label=COLUMN names the columns if they are not clear.
"""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from ..errors import DataError, UserError, first_line
from .dataset import SPLITS, Items, Labelled
from .image_files import Stored

PREFIX = "hf:"


def _stored(table: Any, column: str, source: str, number: int) -> Stored:
    return Stored(f"{source}[{number}]", functools.partial(_bytes, table[number][column] or {}))


def _bytes(cell: dict[str, Any]) -> io.BytesIO:
    if cell.get("bytes") is not None:
        return io.BytesIO(cell["bytes"])
    if cell.get("path"):
        return io.BytesIO(Path(cell["path"]).read_bytes())
    raise OSError("an empty cell")


def read(name: str) -> dict[str, Labelled]:
    """The splits of hf:PATH; one without splits is called `all`."""
    datasets = _package()
    place, _, query = name[len(PREFIX) :].partition("?")
    wanted = dict(parse_qsl(query))
    if odd := set(wanted) - {"image", "label"}:
        raise DataError(f"{name}: expected ?image=COLUMN&label=COLUMN, got {', '.join(sorted(odd))}.")
    tables = _tables(datasets, Path(place))
    features = next(iter(tables.values())).features
    image = _column(features, datasets.Image, place, "image", wanted.get("image"))
    label = _column(features, datasets.ClassLabel, place, "label", wanted.get("label"))
    names = tuple(features[label].names) if isinstance(features[label], datasets.ClassLabel) else ()
    found = {}
    for split, table in tables.items():
        source = f"{PREFIX}{place}" + ("" if split == "all" else f":{split}")
        encoded = table.cast_column(image, datasets.Image(decode=False))
        items = Items(functools.partial(_stored, encoded, image, source), range(len(table)))
        found[split] = Labelled(source, items, table[label][:], names)
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
                parts = {"all": list(map(str, files))}
            tables = {split: datasets.Dataset.from_parquet(names) for split, names in parts.items()}
    except DataError:
        raise
    except Exception as error:  # a damaged table can raise anything
        raise DataError(f"Cannot read the data set {place} ({first_line(error)}).") from None
    return {SPLITS.get(split, "all" if len(tables) == 1 else split): table for split, table in tables.items()}


def _column(features: Any, kind: type, place: str, what: str, name: str | None) -> str:
    if name is not None:
        if name not in features:
            raise DataError(f"{place} has no column {name!r} (found: {', '.join(features)}).")
        return name
    found = [n for n, feature in features.items() if isinstance(feature, kind)]
    if len(found) == 1:
        return found[0]
    if what in features:
        return what
    raise DataError(
        f"{place} has {len(found)} {what} columns of {', '.join(features)}: name it, as hf:{place}?{what}=COLUMN."
    )
