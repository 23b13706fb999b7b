"""Labelled images in tar files, as WebDataset lays them out: KEY.jpg beside KEY.cls, samples one after another.

The headers are read once, for the offset of each image, which is then read from its place. So a sample has a number as
a file in a folder has, and shards behave as folders do: full shuffle, disjoint shares of processes, exact resume.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, first_line
from .dataset import SPLITS, Items, Labelled
from .image_files import SUFFIXES, Stored

CLASSES = "classes.txt"
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def _stored(shards: tuple[Path, ...], keys: list[str], places: Any, number: int) -> Stored:
    shard, offset, size = places[number].tolist()
    return Stored(f"{shards[shard]}:{keys[number]}", functools.partial(_bytes, shards[shard], offset, size))


def _bytes(shard: Path, offset: int, size: int) -> io.BytesIO:
    with shard.open("rb") as file:
        file.seek(offset)
        return io.BytesIO(file.read(size))


def named(path: str) -> bool:
    """True for the name of a tar file, or of a range such as train-{000..009}.tar."""
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
    """The splits in these shards. What is damaged is an error, or left out if that is allowed."""
    listed = next(iter(parts.values()))[0].parent / CLASSES
    lines = listed.read_text().splitlines() if listed.is_file() else []
    names = tuple(filter(None, map(str.strip, lines)))
    made = {}
    for split, shards in parts.items():
        for shard in shards:
            if shard.name.endswith(_COMPRESSED):
                raise DataError(f"{shard} is compressed and cannot be read from the middle: unpack it to a plain .tar.")
            if not shard.is_file():
                raise DataError(f"Data not found: {shard}.")
        stamp = tuple((s.stat().st_mtime_ns, s.stat().st_size) for s in shards)
        items, labels, skipped = _read(tuple(shards), stamp, allow_corrupt)
        made[split] = Labelled(source if split == "all" else f"{source}:{split}", items, labels, names, skipped)
    return made


@functools.lru_cache(maxsize=4)
def _read(shards: tuple[Path, ...], stamp: object, allow_corrupt: bool) -> tuple[Items, list[Any], tuple[str, ...]]:
    """(images, labels, what is wrong with each sample or shard that was left out), kept as commands ask twice."""
    keys: list[str] = []
    places: list[tuple[int, int, int]] = []  # shard, offset, size
    labels: list[Any] = []
    skipped: list[str] = []

    def skip(wrong: str) -> None:
        if not allow_corrupt:
            advice = "Mend it, or pass --allow-corrupt to leave such samples out."
            raise DataError(f"{wrong[0].upper()}{wrong[1:]}. {advice}")
        skipped.append(wrong)

    for number, shard in enumerate(shards):
        try:
            with tarfile.open(shard, "r:") as file:
                for key, image, label in _samples(file):
                    if image is None or label is None:
                        what = "image" if image is None else "label (KEY.cls, or `label` in KEY.json)"
                        skip(f"the sample {shard}:{key} has no {what}")
                        continue
                    keys.append(key)
                    places.append((number, image.offset_data, image.size))
                    labels.append(label)
        except (tarfile.TarError, OSError, EOFError) as error:
            skip(f"the shard {shard} is damaged ({first_line(error)})")
    if not keys:
        raise DataError(f"{shards[0].parent}: {len(shards)} shards without a sample that has an image and a label.")
    packed = np.array(places, np.int64).reshape(-1, 3)  # a million samples take some 100 MB
    return Items(functools.partial(_stored, shards, keys, packed), range(len(keys))), labels, tuple(skipped)


def _samples(file: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo | None, Any]]:
    """(key, image, label) of each sample, None for a part that is missing. Its files follow one another."""
    files = (member for member in file if member.isfile() and _key(member))
    for key, members in itertools.groupby(files, _key):
        image, label = None, None
        for member in members:
            suffix = Path(member.name).suffix.lower()
            if suffix in SUFFIXES:
                image = member
            elif suffix in (".cls", ".json") and (found := _label(file, member, suffix)) is not None:
                label = found
        yield key, image, label


def _key(member: tarfile.TarInfo) -> str:
    """The path up to the first dot of the name; empty for hidden files, which some archivers add."""
    folder, slash, base = member.name.rpartition("/")
    stem = base.partition(".")[0]
    return stem and f"{folder}{slash}{stem}"


def _label(file: tarfile.TarFile, member: tarfile.TarInfo, suffix: str) -> Any:
    """The number or text of KEY.cls; any value of KEY.json; None if there is none."""
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
