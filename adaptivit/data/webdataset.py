"""Labelled images in tar files, as WebDataset lays them out: KEY.jpg beside KEY.cls, samples one after another.

The files are read with the standard library and are looked through once, for where each member lies; an image is then
read from its place. So a sample has a number as a file in a folder has, and everything that holds for folders holds
here: a full shuffle, shares of processes that do not overlap, and a resumed run that goes on at the very sample.
"""

from __future__ import annotations

import functools
import io
import json
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np

from ..errors import DataError, first_line

SPLITS = {"train": "train", "val": "val", "validation": "val", "valid": "val", "test": "test"}
CLASSES = "classes.txt"
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


@dataclass(frozen=True)
class Member:
    """A file inside a tar file."""

    shard: Path
    key: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.shard}:{self.key}"

    def open(self) -> io.BytesIO:
        with self.shard.open("rb") as file:
            file.seek(self.offset)
            return io.BytesIO(file.read(self.size))


class Members(Sequence[Member]):
    """Many of them, held as arrays: a million takes some 100 MB."""

    def __init__(self, shards: list[Path], keys: Sequence[str], places: Any) -> None:
        self.shards, self.keys, self.places = shards, keys, places  # places [n, 3]: shard, offset, size

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Member: ...
    @overload
    def __getitem__(self, index: slice) -> Members: ...
    def __getitem__(self, index: int | slice) -> Member | Members:
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        shard, offset, size = self.places[index].tolist()
        return Member(self.shards[shard], self.keys[index], offset, size)

    def take(self, indices: Sequence[int]) -> Members:
        return Members(self.shards, [self.keys[i] for i in indices], self.places[np.asarray(indices, np.int64)])


@dataclass
class Found:
    """The samples of a split, as they come out of its shards."""

    shards: list[Path]
    keys: list[str] = field(default_factory=list)
    places: list[tuple[int, int, int]] = field(default_factory=list)
    labels: list[str | int] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # what is wrong with each sample or shard that was left out

    @property
    def items(self) -> Members:
        return Members(self.shards, self.keys, np.array(self.places, np.int64).reshape(-1, 3))


def named(path: str) -> bool:
    """Whether these words name tar files: one, or a range such as train-{000..009}.tar."""
    return path.endswith((".tar", *_COMPRESSED))


def expand(path: str) -> list[Path]:
    """train-{000..002}.tar -> train-000.tar, train-001.tar, train-002.tar"""
    found = _RANGE.search(path)
    if found is None:
        return [Path(path)]
    first, last = found.groups()
    if int(first) > int(last):
        raise DataError(f"{path}: expected a rising range, got {{{first}..{last}}}.")
    numbers = (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    return [p for n in numbers for p in expand(path[: found.start()] + n + path[found.end() :])]


def in_folder(path: Path) -> dict[str, list[Path]]:
    """Shards of a folder by split: train-*.tar, val-*.tar, or train/*.tar, val/*.tar; `all` where no name says more."""
    found: dict[str, list[Path]] = {}
    for file in sorted([*path.glob("*.tar"), *(f for d in SPLITS for f in (path / d).glob("*.tar"))]):
        words = [file.parent.name] if file.parent != path else re.split(r"[-_.]", file.stem)
        split = next((SPLITS[w] for w in words if w in SPLITS), "all")
        found.setdefault(split, []).append(file)
    if len(found) > 1 and "all" in found:
        raise DataError(f"{path}: {found['all'][0].name} is neither train, val nor test, and other shards are.")
    return found


def read(shards: list[Path], images: set[str], allow_corrupt: bool = False) -> Found:
    """Look through the shards. What is damaged is named, or left out where that is allowed. The last few answers are
    kept, since commands ask more than once."""
    for shard in shards:
        if shard.name.endswith(_COMPRESSED):
            raise DataError(f"{shard} is compressed and cannot be read from the middle: unpack it to a plain .tar.")
        if not shard.is_file():
            raise DataError(f"Data not found: {shard}.")
    stamp = tuple((s.stat().st_mtime_ns, s.stat().st_size) for s in shards)
    return _read(tuple(shards), stamp, frozenset(images), allow_corrupt)


@functools.lru_cache(maxsize=4)
def _read(shards: tuple[Path, ...], stamp: object, images: frozenset[str], allow_corrupt: bool) -> Found:
    found = Found(list(shards))
    for number, shard in enumerate(shards):
        try:
            _look_through(shard, number, images, found, allow_corrupt)
        except (tarfile.TarError, OSError, EOFError) as error:
            _or_skip(found, f"the shard {shard} is damaged ({first_line(error)})", allow_corrupt)
    if not found.keys:
        raise DataError(f"{shards[0].parent}: {len(shards)} shards without a sample that has an image and a label.")
    return found


def _or_skip(found: Found, wrong: str, allow_corrupt: bool) -> None:
    if not allow_corrupt:
        raise DataError(f"{wrong[0].upper()}{wrong[1:]}. Mend it, or pass --allow-corrupt to leave such samples out.")
    found.skipped.append(wrong)


def _look_through(shard: Path, number: int, images: frozenset[str], found: Found, allow_corrupt: bool) -> None:
    key, image, label = "", None, None
    members = 0

    def finish() -> None:
        if not members:
            return
        if image is None or label is None:
            what = "image" if image is None else "label (KEY.cls, or `label` in KEY.json)"
            _or_skip(found, f"the sample {shard}:{key} has no {what}", allow_corrupt)
            return
        found.keys.append(key)
        found.places.append((number, image.offset_data, image.size))
        found.labels.append(label)

    with tarfile.open(shard, "r:") as file:
        for member in file:
            if not member.isfile():
                continue
            folder, _, base = member.name.rpartition("/")
            stem, _, ending = base.partition(".")
            if not stem:
                continue  # hidden files that some archivers add
            own = f"{folder}/{stem}" if folder else stem
            if own != key:
                finish()
                key, image, label, members = own, None, None, 0
            members += 1
            suffix = "." + ending.rpartition(".")[2].lower()
            if suffix in images:
                image = member
            elif suffix in (".cls", ".json"):
                said = _label(file, member, suffix)
                label = said if said is not None else label
        finish()


def _label(file: tarfile.TarFile, member: tarfile.TarInfo, suffix: str) -> str | int | None:
    assert file.fileobj is not None
    file.fileobj.seek(member.offset_data)
    text = file.fileobj.read(member.size).decode("utf-8", "replace").strip()
    if suffix == ".json":
        try:
            value = json.loads(text)
        except ValueError:
            return None
        value = next((value[k] for k in ("label", "cls") if k in value), None) if isinstance(value, dict) else None
        return value if isinstance(value, (int, str)) and not isinstance(value, bool) else None
    if not text:
        return None
    return int(text) if text.isdigit() else text


def classes_of(found: dict[str, Found], place: Path) -> tuple[str, ...]:
    """The class names of all splits together: of classes.txt, else the numbers up to the largest, else the names."""
    labels = {label for part in found.values() for label in part.labels}
    numbers = {label for label in labels if isinstance(label, int)}
    listed = place / CLASSES
    if numbers and len(numbers) < len(labels):
        odd = sorted(str(label) for label in labels - numbers)[0]
        raise DataError(f"{place}: some labels are numbers and some are names (for example {odd!r}).")
    if listed.is_file():
        names = tuple(line.strip() for line in listed.read_text().splitlines() if line.strip())
        unknown = sorted(labels - set(names), key=str) if not numbers else []
        if unknown:
            raise DataError(f"{listed} has no line {unknown[0]!r}, which is a label.")
        if numbers and (max(numbers) >= len(names) or min(numbers) < 0):
            raise DataError(f"{listed} has {len(names)} names, the labels go up to {max(numbers)}.")
        return names
    if numbers and min(numbers) < 0:
        raise DataError(f"{place}: expected class numbers from 0 on, got {min(numbers)}.")
    return tuple(map(str, range(max(numbers) + 1))) if numbers else tuple(sorted(str(label) for label in labels))
