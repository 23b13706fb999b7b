"""Images and labels: an image folder, arrays (an .npz, mosaics), tar shards or a Hugging Face data set.

A folder holds CLASS/*.jpg, or train/ and val/ (or test/) of that form. An .npz holds train_x, train_y and maybe
test_x, test_y (or val_x, val_y), images as uint8 [n, h, w, 3] or [n, h, w], and maybe `classes`. The name `digits`
stands for the embedded handwritten digits if there is no such file. Readers give labels as they are stored; the task
checks and encodes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .. import tasks
from ..errors import DataError
from ..tasks.protocol import Labels, Task
from .image_files import SUFFIXES, open_image, opened

if TYPE_CHECKING:
    from ..model import AdaptiveViT
    from .gpu_pipeline import OnDevice

SPLITS = {"train": "train", "val": "val", "validation": "val", "valid": "val", "test": "test"}


class Items(Sequence[Any]):
    """Items that are made when they are used, each from its number."""

    def __init__(self, make: Callable[[int], Any], numbers: Sequence[int]) -> None:
        self.make, self.numbers = make, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return Items(self.make, self.numbers[index]) if isinstance(index, slice) else self.make(self.numbers[index])

    def take(self, indices: Sequence[int]) -> Items:
        return Items(self.make, [self.numbers[i] for i in indices])


@dataclass(frozen=True)
class Labelled:
    """Labelled images, not yet decoded."""

    source: str
    items: Sequence[Any]  # Path, Stored, or arrays [h, w, 3] uint8
    labels: Labels
    classes: tuple[str, ...] = ()  # names of the outputs; empty while not known
    left_out: tuple[str, ...] = ()  # files and samples, each with the reason
    task: str = tasks.DEFAULT

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        item = self.items[index]
        return f"{self.source}[{index}]" if isinstance(item, np.ndarray) else str(item)

    def image(self, index: int) -> Image.Image:
        item = self.items[index]
        return open_image(Image.fromarray(item) if isinstance(item, np.ndarray) else item)

    def part(self, indices: Sequence[int]) -> Labelled:
        items, labels = (_taken(values, indices) for values in (self.items, self.labels))
        return replace(self, items=items, labels=labels)

    def for_model(self, model: AdaptiveViT) -> Labelled:
        """The same images with the labels as a model's outputs count them."""
        if model.task != self.task:
            raise DataError(f"{self.source} was read for the task {self.task!r}, the model has {model.task!r}.")
        task, outputs = tasks.get(self.task), model.shape.outputs
        return replace(self, labels=task.align(self.labels, self.classes, outputs, model.class_names, self.source))

    def without(self, bad: Iterable[int]) -> tuple[str, ...]:
        """What was left out on reading, and these images, which could not be read."""
        return (*self.left_out, *(f"{self.name(i)}: cannot be read as an image" for i in sorted(bad)))

    def spread(self, limit: int) -> Labelled:
        """At most `limit` images, evenly spread over the set."""
        if limit >= len(self):
            return self
        return self.part([i * len(self) // limit for i in range(limit)])


def _taken(values: Any, indices: Sequence[int]) -> Any:
    if isinstance(values, np.ndarray):
        return values[np.asarray(indices, np.int64)]
    return values.take(indices) if isinstance(values, Items) else [values[i] for i in indices]


def splits(path: str | Path, allow_corrupt: bool = False, task: str = tasks.DEFAULT) -> dict[str, Labelled]:
    """All splits, with labels checked by the task; a set without splits is called `all`.

    allow_corrupt: leave damaged shards and samples out."""
    found = read(path, allow_corrupt)
    names = next(iter(found.values())).classes
    labels, classes = tasks.get(task).encode({split: part.labels for split, part in found.items()}, names, str(path))
    return {split: replace(p, labels=labels[split], classes=classes, task=task) for split, p in found.items()}


def unlabelled(path: str | Path) -> dict[str, Labelled]:
    """All splits, without their labels, which arrays need not have."""
    return {split: replace(p, labels=[0] * len(p)) for split, p in read(path, labelled=False).items()}


def read(path: str | Path, allow_corrupt: bool = False, labelled: bool = True) -> dict[str, Labelled]:
    """All splits, with labels as they are stored; arrays need none if `labelled` is false."""
    from . import arrays, digits, hf_datasets, webdataset

    if str(path).startswith(hf_datasets.PREFIX):
        return hf_datasets.read(str(path))
    if webdataset.named(str(path)):
        return webdataset.read({"all": webdataset.expand(str(path))}, str(path), allow_corrupt)
    path = Path(path)
    if not path.exists():
        if str(path) == "digits":
            return dict(digits.splits())
        raise DataError(f"Data not found: {path}.")
    if path.is_file():
        if path.suffix != ".npz":
            raise DataError(f"Expected an image folder, an .npz file or .tar shards, got {path}.")
        return arrays.splits(arrays.read(path), path, labelled)
    if (path / arrays.LABELS).is_file():
        return arrays.splits(arrays.mosaics(path), path)
    if tars := webdataset.in_folder(path):
        return webdataset.read(tars, str(path), allow_corrupt)
    return _folders(path)


def for_training(
    path: str | Path, val_split: float, seed: int, allow_corrupt: bool = False, task: str = tasks.DEFAULT
) -> tuple[Labelled, Labelled]:
    """Training and validation images. The test split is never touched; without val, a share of train is held out."""
    found = splits(path, allow_corrupt, task)
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


def for_evaluation(path: str | Path, split: str, task: str = tasks.DEFAULT) -> Labelled:
    """The split asked for; `auto` is the first of test, val, all and train."""
    found = splits(path, task=task)
    for name in ("test", "val", "all", "train") if split == "auto" else (split,):
        if name in found:
            return found[name]
    raise DataError(f"{path} has no split {split!r} (found: {', '.join(found)}).")


def _folders(path: Path) -> dict[str, Labelled]:
    """CLASS/*.jpg, or train/, val/ and test/ of that form."""
    inside = {SPLITS[name]: path / name for name in reversed(SPLITS) if (path / name).is_dir()}
    beside = [f for f in sorted(path.iterdir()) if f not in inside.values() and not f.name.startswith(".")]
    strays = tuple(f"{f}: beside the splits {', '.join(sorted(inside))}" for f in beside)
    found: dict[str, Labelled] = {s: _folder(inside[s], strays) for s in ("train", "val", "test") if s in inside}
    classes = {split: set(part.classes) for split, part in found.items()}
    for split, names in classes.items():
        if odd := sorted(names ^ next(iter(classes.values()))):
            raise DataError(f"{path}: the splits have different classes ({split}: {', '.join(odd[:4])}).")
    return found or {"all": _folder(path)}


def _folder(path: Path, left_out: tuple[str, ...] = ()) -> Labelled:
    classes = sorted(d.name for d in path.iterdir() if d.is_dir() and not d.name.startswith("."))
    if all(name.isdigit() for name in classes):
        classes.sort(key=int)  # 2 before 10: folders named by number are class numbers
    if not classes:
        raise DataError(f"{path} has no class folders (expected {path.name}/CLASS/*.jpg).")
    items: list[Path] = []
    labels: list[str] = []
    odd = [f for f in sorted(path.iterdir()) if f.is_file() and not f.name.startswith(".")]
    left_out += tuple(f"{f}: beside the class folders" for f in odd)
    for name in classes:
        files, others = image_files(path / name)
        if not files:
            raise DataError(f"The class folder {path / name} has no images{instead(others)}.")
        items += files
        labels += [name] * len(files)
        left_out += others
    return Labelled(str(path), items, labels, tuple(classes), left_out)


def image_files(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The images below a folder, by their suffix, and its other files, each with the reason; hidden ones go unsaid."""
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    images = [f for f in files if f.suffix.lower() in SUFFIXES]
    others = [f for f in files if f.suffix.lower() not in SUFFIXES and not f.name.startswith(".")]
    return images, tuple(f"{f}: no image by its suffix" for f in others)


def instead(others: Sequence[str]) -> str:
    """What a folder without images has."""
    return f", but {len(others)} other files, such as {others[0]}" if others else ""


def verify(labelled: Labelled, most: int = 50_000) -> list[int]:
    """Indices of files that are no images by their headers; more than `most` are read when used."""
    if len(labelled) > most or isinstance(labelled.items, np.ndarray):
        return []
    bad = []
    for index, item in enumerate(labelled.items):
        try:
            with opened(item) as file:
                file.verify()
        except Exception:  # as for open_image
            bad.append(index)
    return bad


@dataclass(frozen=True)
class Sample:
    image: Tensor | None  # [3, H, W]; None where the file cannot be read
    label: Any
    index: int


class Images(Dataset[Sample]):
    """Decoded and transformed images; their random numbers follow from (seed, epoch, index) alone."""

    def __init__(self, labelled: Labelled, transform: Callable[[Image.Image], Tensor], seed: int | None = None) -> None:
        self.labelled, self.transform, self.seed, self.epoch = labelled, transform, seed, 0

    def __len__(self) -> int:
        return len(self.labelled)

    def __getitem__(self, index: int) -> Sample:
        label = self.labelled.labels[index]
        try:
            image = self.labelled.image(index)
        except DataError:
            return Sample(None, label, index)
        with torch.random.fork_rng(devices=[], enabled=self.seed is not None):
            if self.seed is not None:
                torch.manual_seed(mix(self.seed, self.epoch, index))
            return Sample(self.transform(image), label, index)


def mix(*numbers: int) -> int:
    """One well-spread seed out of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(2, np.uint32).astype(np.uint64) @ [1, 2**31]) % 2**63


@dataclass(frozen=True)
class Loaded:
    images: Tensor  # [B, 3, H, W]
    labels: Tensor  # [B, ...] as the task collates them
    indices: Tensor  # [B]
    unreadable: list[int]

    def pin_memory(self) -> Loaded:
        """Called by the loader: a GPU copies from pinned memory while the host goes on."""
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory())


def collate(samples: list[Sample], task: Task) -> Loaded:
    """A batch of the samples that could be read."""
    good = [s for s in samples if s.image is not None]
    images = torch.stack([s.image for s in good if s.image is not None]) if good else torch.empty(0)
    return Loaded(
        images,
        task.collate([s.label for s in good or samples])[: len(good)],
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
        collate_fn=functools.partial(collate, task=tasks.get(data.labelled.task)),
        pin_memory=pinned,
    )
    yield from loader


def in_order(count: int, batch_size: int) -> list[list[int]]:
    return [list(range(i, min(i + batch_size, count))) for i in range(0, count, batch_size)]
