"""Images and labels: an image folder, arrays (an .npz, mosaics), tar shards or a Hugging Face data set, with what is
wrong said by name.

A folder holds CLASS/*.jpg, or train/ and val/ (or test/) of that form. An .npz holds train_x, train_y and maybe
test_x, test_y (or val_x, val_y), images as uint8 [n, h, w, 3] or [n, h, w], and maybe `classes`. The name `digits`
stands for the embedded handwritten digits where there is no such file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import DataError
from . import hf_datasets, mosaics, webdataset
from .npz import read as _npz

if TYPE_CHECKING:
    from .gpu_pipeline import OnDevice

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff", ".gif"}
SPLITS = {"train": ("train",), "val": ("val", "validation", "valid"), "test": ("test",)}
# An image that PIL cannot read raises one of these.
_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


def _turned(image: Image.Image) -> bool:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
    except Exception:  # a camera's faulty note does not make the picture unreadable
        return False


def rgb(image: Image.Image) -> Image.Image:
    """The image upright, as its EXIF says, in three channels of 8 bits. PIL cuts greys of 16 bits off at 255, and all
    is white; here they keep their upper 8, as those of coloured images of 16 bits do."""
    if _turned(image):
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


@dataclass(frozen=True)
class Labelled:
    """Labelled images, not yet decoded."""

    source: str
    items: Sequence[Any]  # paths, arrays [h, w, 3] uint8, or what has a name and a method open()
    labels: Sequence[int]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what was left out on reading

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        item = self.items[index]
        return f"{self.source}[{index}]" if isinstance(item, np.ndarray) else str(item)

    def image(self, index: int) -> Image.Image:
        item = self.items[index]
        if isinstance(item, np.ndarray):
            return rgb(Image.fromarray(item))
        with _opened(item) as file:
            return rgb(file)

    def part(self, indices: Sequence[int]) -> Labelled:
        if isinstance(self.items, np.ndarray):
            items: Any = self.items[np.asarray(indices, np.int64)]
        elif hasattr(self.items, "take"):
            items = self.items.take(indices)
        else:
            items = [self.items[i] for i in indices]
        return replace(self, items=items, labels=[self.labels[i] for i in indices])

    def for_model(self, classes: int, names: list[str] | None) -> Labelled:
        """The same images with the labels that a model uses: matched by class name where the model knows its names,
        by number where the names are numbers, by order where there are just as many."""
        if names is not None and set(self.classes) <= set(names):
            number = {name: names.index(name) for name in self.classes}
        elif names is None and all(c.isdigit() and int(c) < classes for c in self.classes):
            number = {name: int(name) for name in self.classes}
        elif names is None and len(self.classes) == classes:
            return self
        else:
            known = names or []
            odd = next((c for c in self.classes if c not in known), self.classes[0])
            raise DataError(
                f"{self.source} has {len(self.classes)} classes, the model {classes}, and their names do not match "
                f"(for example {odd!r})."
            )
        return replace(self, labels=[number[self.classes[label]] for label in self.labels])

    def spread(self, limit: int) -> Labelled:
        """At most `limit` images, evenly spread over the set."""
        if limit >= len(self):
            return self
        return self.part([i * len(self) // limit for i in range(limit)])


def _opened(item: Any) -> Image.Image:
    return Image.open(item if isinstance(item, Path) else item.open())


def splits(path: str | Path, allow_corrupt: bool = False) -> dict[str, Labelled]:
    """All the splits that the data has; a set without any is called `all`. `allow_corrupt` leaves damaged shards and
    samples out."""
    if str(path).startswith(hf_datasets.PREFIX):
        return {
            split: Labelled(part.source, part.rows, part.labels, part.classes)
            for split, part in hf_datasets.read(str(path)).items()
        }
    if webdataset.named(str(path)):
        return _shards({"all": webdataset.expand(str(path))}, str(path), allow_corrupt)
    path = Path(path)
    if not path.exists():
        if str(path) == "digits":
            from . import digits

            return dict(digits.splits())
        raise DataError(f"Data not found: {path}.")
    if path.is_file():
        if path.suffix != ".npz":
            raise DataError(f"Expected an image folder, an .npz file or .tar shards, got {path}.")
        return arrays_of(_npz(path), path)
    if (path / mosaics.LABELS).is_file():
        return arrays_of(mosaics.read(path), path)
    if tars := webdataset.in_folder(path):
        return _shards(tars, str(path), allow_corrupt)
    found: dict[str, Labelled] = {}
    for split, names in SPLITS.items():
        for name in names:
            if (path / name).is_dir():
                found[split] = _folder(path / name)
                break
    if not found:
        return {"all": _folder(path)}
    first = next(iter(found.values()))
    for split, labelled in found.items():
        if labelled.classes != first.classes:
            odd = sorted(set(labelled.classes) ^ set(first.classes))
            raise DataError(f"{path}: the splits have different classes ({split}: {', '.join(odd[:4])}).")
    return found


def _shards(parts: dict[str, list[Path]], source: str, allow_corrupt: bool) -> dict[str, Labelled]:
    found = {split: webdataset.read(files, SUFFIXES, allow_corrupt) for split, files in parts.items()}
    classes = webdataset.classes_of(found, next(iter(parts.values()))[0].parent)
    number = {name: i for i, name in enumerate(classes)}
    return {
        split: Labelled(
            source if split == "all" else f"{source}:{split}",
            part.items,
            [label if isinstance(label, int) else number[label] for label in part.labels],
            classes,
            tuple(part.skipped),
        )
        for split, part in found.items()
    }


def for_training(
    path: str | Path, val_split: float, seed: int, allow_corrupt: bool = False
) -> tuple[Labelled, Labelled]:
    """Training and validation images. The test split is never touched; without val, a share of train is held out."""
    found = splits(path, allow_corrupt)
    train = found.get("train") or found.get("all")
    if train is None:
        raise DataError(f"{path} has no training images (found: {', '.join(found)}).")
    if "val" in found:
        return train, found["val"]
    held = round(len(train) * val_split)
    if not 0 < held < len(train):
        raise DataError(f"{path}: {len(train)} images cannot be split with val_split={val_split}.")
    order = np.random.default_rng(seed).permutation(len(train))
    return train.part(sorted(order[held:].tolist())), train.part(sorted(order[:held].tolist()))


def for_evaluation(path: str | Path, split: str) -> Labelled:
    found = splits(path)
    wanted = ("test", "val", "all", "train") if split == "auto" else (split,)
    for name in wanted:
        if name in found:
            return found[name]
    raise DataError(f"{path} has no split {split!r} (found: {', '.join(found)}).")


def _folder(path: Path) -> Labelled:
    classes = sorted(d.name for d in path.iterdir() if d.is_dir() and not d.name.startswith("."))
    if all(name.isdigit() for name in classes):
        classes.sort(key=int)  # 2 before 10: folders named by number are class numbers
    if not classes:
        raise DataError(f"{path} has no class folders (expected {path.name}/CLASS/*.jpg).")
    items: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = sorted(f for f in (path / name).rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
        if not files:
            raise DataError(f"The class folder {path / name} has no images ({', '.join(sorted(SUFFIXES))}).")
        items += files
        labels += [label] * len(files)
    return Labelled(str(path), items, labels, tuple(classes))


def unlabelled(path: Path) -> dict[str, Labelled]:
    """The splits of an .npz file whose labels do not matter, and need not be there."""
    arrays = _npz(path)
    images = {k: v for k, v in arrays.items() if k in ("x", "train_x", "val_x", "test_x")}
    return arrays_of(
        images | {f"{k[:-1]}y": np.zeros(len(np.atleast_1d(v)), np.int64) for k, v in images.items()}, path
    )


def arrays_of(arrays: dict[str, Any], path: Path) -> dict[str, Labelled]:
    """The splits that these arrays hold: train_x, train_y and so on."""
    found: dict[str, tuple[Any, Any]] = {}
    for split, prefix in (("train", "train_"), ("val", "val_"), ("test", "test_"), ("all", "")):
        if f"{prefix}x" in arrays:
            x, y = (np.atleast_1d(arrays.get(f"{prefix}{k}", np.empty(0))) for k in "xy")
            if len(x) != len(y) or len(x) == 0:
                raise DataError(f"{path}: {prefix}x has {len(x)} images, {prefix}y {len(y)} labels.")
            if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[-1] != 3):
                wanted = "uint8 [n, h, w, 3] or [n, h, w]"
                raise DataError(f"{path}: {prefix}x: expected {wanted}, got {x.dtype} {x.shape}.")
            if not np.issubdtype(y.dtype, np.integer) or y.ndim != 1 or y.min() < 0:
                raise DataError(f"{path}: {prefix}y: expected class numbers from 0 on, got {y.dtype} {y.shape}.")
            found[split] = (x, y)
    if not found:
        raise DataError(f"{path} has none of train_x, val_x, test_x, x (found: {', '.join(arrays) or 'nothing'}).")
    count = 1 + max(int(y.max()) for _, y in found.values())
    names = tuple(str(c) for c in np.atleast_1d(arrays.get("classes", np.arange(count))))
    if len(names) < count:
        raise DataError(f"{path}: classes has {len(names)} names, the labels go up to {count - 1}.")
    return {s: Labelled(f"{path}:{s}", x, [int(v) for v in y], names) for s, (x, y) in found.items()}


def verify(labelled: Labelled, most: int = 50_000) -> list[int]:
    """Indices of files that are not images, by a look at their headers; very large sets are read when used."""
    bad = []
    if len(labelled) <= most:
        for index, item in enumerate(labelled.items):
            if not isinstance(item, np.ndarray):
                try:
                    with _opened(item) as file:
                        file.verify()
                except _UNREADABLE:
                    bad.append(index)
    return bad


@dataclass(frozen=True)
class Sample:
    image: Tensor | None  # [3, H, W]; None where the file cannot be read
    label: int
    index: int


class Images(Dataset[Sample]):
    """Decoded and transformed; what is random about a sample follows from (seed, epoch, index) alone."""

    def __init__(self, labelled: Labelled, transform: Callable[[Image.Image], Tensor], seed: int | None = None) -> None:
        self.labelled, self.transform, self.seed, self.epoch = labelled, transform, seed, 0

    def __len__(self) -> int:
        return len(self.labelled)

    def __getitem__(self, index: int) -> Sample:
        label = int(self.labelled.labels[index])
        try:
            image = self.labelled.image(index)
        except _UNREADABLE:
            return Sample(None, label, index)
        if self.seed is None:
            return Sample(self.transform(image), label, index)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mix(self.seed, self.epoch, index))
            return Sample(self.transform(image), label, index)


def mix(*numbers: int) -> int:
    """One well-spread seed out of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(2, np.uint32).astype(np.uint64) @ [1, 2**31]) % 2**63


@dataclass(frozen=True)
class Loaded:
    images: Tensor  # [B, 3, H, W]
    labels: Tensor  # [B]
    indices: Tensor  # [B]
    unreadable: list[int]

    def pin_memory(self) -> Loaded:
        """The loader asks for it: from there a GPU fetches the images by itself, and the host does not wait."""
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory())


def collate(samples: list[Sample]) -> Loaded:
    good = [s for s in samples if s.image is not None]
    images = torch.stack([s.image for s in good if s.image is not None]) if good else torch.empty(0)
    return Loaded(
        images,
        torch.tensor([s.label for s in good], dtype=torch.long),
        torch.tensor([s.index for s in good], dtype=torch.long),
        [s.index for s in samples if s.image is None],
    )


def batches(data: Images | OnDevice, order: Sequence[Sequence[int]], workers: int = 0) -> Iterator[Loaded]:
    """Batches of the given indices, in that order."""
    if not isinstance(data, Images):
        yield from data.batches(order)
        return
    pinned = workers > 0 and torch.cuda.is_available()
    loader: DataLoader[Any] = DataLoader(
        data,
        batch_sampler=order,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pinned,
    )
    yield from loader


def in_order(count: int, batch_size: int) -> list[list[int]]:
    return [list(range(i, min(i + batch_size, count))) for i in range(0, count, batch_size)]
