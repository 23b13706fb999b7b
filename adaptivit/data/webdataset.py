"""Labelled images in tar files, as WebDataset lays them out: KEY.jpg beside KEY.cls, samples one after another.

The files are looked through once, for where each member lies; an image is then read from its place. So a sample has a
number as a file in a folder has, and everything that holds for folders holds here: a full shuffle, shares of processes
that do not overlap, and a resumed run that goes on at the very sample.
"""

from __future__ import annotations

import functools
import io
import json
import re
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, first_line
from .dataset import SPLITS, SUFFIXES, Items, Labelled

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


@dataclass
class Found:
    """The samples of a split, as they come out of its shards."""

    shards: list[Path]
    keys: list[str] = field(default_factory=list)
    places: list[tuple[int, int, int]] = field(default_factory=list)  # shard, offset, size
    labels: list[Any] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # what is wrong with each sample or shard that was left out

    @property
    def items(self) -> Items:
        """Kept as arrays: a million samples take some 100 MB."""
        places = np.array(self.places, np.int64).reshape(-1, 3)
        return Items(functools.partial(_member, self.shards, self.keys, places), range(len(self.keys)))


def _member(shards: list[Path], keys: list[str], places: Any, number: int) -> Member:
    shard, offset, size = places[number].tolist()
    return Member(shards[shard], keys[number], offset, size)


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


def read(parts: dict[str, list[Path]], source: str, allow_corrupt: bool = False) -> dict[str, Labelled]:
    """The splits in these shards. What is damaged is named, or left out where that is allowed."""
    listed = next(iter(parts.values()))[0].parent / CLASSES
    names = tuple(line.strip() for line in listed.read_text().splitlines()) if listed.is_file() else ()
    names = tuple(filter(None, names))
    made = {}
    for split, shards in parts.items():
        found = _look_through(shards, allow_corrupt)
        where = source if split == "all" else f"{source}:{split}"
        made[split] = Labelled(where, found.items, found.labels, names, tuple(found.skipped))
    return made


def _look_through(shards: list[Path], allow_corrupt: bool) -> Found:
    """The last few answers are kept, since commands ask more than once."""
    for shard in shards:
        if shard.name.endswith(_COMPRESSED):
            raise DataError(f"{shard} is compressed and cannot be read from the middle: unpack it to a plain .tar.")
        if not shard.is_file():
            raise DataError(f"Data not found: {shard}.")
    stamp = tuple((s.stat().st_mtime_ns, s.stat().st_size) for s in shards)
    return _read(tuple(shards), stamp, allow_corrupt)


@functools.lru_cache(maxsize=4)
def _read(shards: tuple[Path, ...], stamp: object, allow_corrupt: bool) -> Found:
    found = Found(list(shards))
    for number, shard in enumerate(shards):
        try:
            _one_shard(shard, number, found, allow_corrupt)
        except (tarfile.TarError, OSError, EOFError) as error:
            _or_skip(found, f"the shard {shard} is damaged ({first_line(error)})", allow_corrupt)
    if not found.keys:
        raise DataError(f"{shards[0].parent}: {len(shards)} shards without a sample that has an image and a label.")
    return found


def _or_skip(found: Found, wrong: str, allow_corrupt: bool) -> None:
    if not allow_corrupt:
        raise DataError(f"{wrong[0].upper()}{wrong[1:]}. Mend it, or pass --allow-corrupt to leave such samples out.")
    found.skipped.append(wrong)


def _one_shard(shard: Path, number: int, found: Found, allow_corrupt: bool) -> None:
    key, members = "", 0
    image: tarfile.TarInfo | None = None
    label: Any = None

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
            if suffix in SUFFIXES:
                image = member
            elif suffix in (".cls", ".json"):
                found_label = _label(file, member, suffix)
                label = label if found_label is None else found_label
        finish()


def _label(file: tarfile.TarFile, member: tarfile.TarInfo, suffix: str) -> Any:
    """A number or text of KEY.cls; any value of KEY.json; None where there is none."""
    assert file.fileobj is not None
    file.fileobj.seek(member.offset_data)
    text = file.fileobj.read(member.size).decode("utf-8", "replace").strip()
    if suffix == ".cls":
        return int(text) if text.isdigit() else text or None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return next((value[k] for k in ("label", "cls") if k in value), None) if isinstance(value, dict) else None
