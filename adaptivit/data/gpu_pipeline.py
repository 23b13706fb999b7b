"""Array data on the device: batches are gathered, resized, augmented and normalised there, without a sync.

Shapes: pixels uint8 [n, h, w, 3] or [n, h, w] of the whole set; B images of a batch, [H, W] as the model reads them.
Evaluation equals PIL's bit for bit (resample.py). Training follows the rules of augment.py with other random numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import tasks
from ..backbones.preprocessing import Preprocessing
from ..errors import UserError
from .augment import PAD, training_transform
from .augment_config import AugmentConfig
from .dataset import Images, Labelled, Loaded
from .gpu_augment import Array, Draws, draw
from .pixel_ops import AFFINE, IDENTITY, OPERATIONS, affine
from .resample import FILTERS, resize, weights

_AHEAD = 16  # batches whose draws are made at once
_ROOM = 0.5  # of the free memory of a GPU: what the array may take


def evaluation_images(labelled: Labelled, preprocessing: Preprocessing, device: torch.device | str) -> Source:
    """The images for evaluation; the device changes nothing but the time."""
    device = torch.device(device)
    if device.type == "cuda" and _hindrance(labelled, preprocessing, device) is None:
        return OnDevice(labelled, preprocessing, device)
    return Images(labelled, preprocessing.evaluation())


def training_images(
    labelled: Labelled, preprocessing: Preprocessing, config: AugmentConfig, seed: int, device: torch.device
) -> Source:
    """The images as a configuration augments them, on the CPU or on the device."""
    hindrance = _hindrance(labelled, preprocessing, device)
    if config.on == "device" and hindrance is not None:
        raise UserError(f"augment.on: device was asked for, but {hindrance}. Leave it at auto or cpu.")
    if hindrance is None and (config.on == "device" or (config.on == "auto" and device.type == "cuda")):
        return OnDevice(labelled, preprocessing, device, config, seed)
    return Images(labelled, training_transform(preprocessing, config), seed)


def _hindrance(labelled: Labelled, preprocessing: Preprocessing, device: torch.device) -> str | None:
    """Why these images cannot be prepared on the device."""
    items = labelled.items
    if not isinstance(items, np.ndarray):
        return f"{labelled.source} is not an array"
    if preprocessing.interpolation not in FILTERS:
        return f"the model's images are resized by {preprocessing.interpolation}, not by {' or '.join(FILTERS)}"
    if device.type == "cuda" and items.nbytes > _ROOM * torch.cuda.mem_get_info(device)[0]:
        return f"{labelled.source} takes {items.nbytes / 2**30:.1f} GiB, more than half of the GPU's free memory"
    return None


@dataclass(frozen=True)
class _Moved:
    """The draws of one batch on the device."""

    groups: list[list[tuple[int, Tensor]]]  # by slot: (operation, positions in the batch)
    box: Tensor  # [B, 4]
    mirror: Tensor  # [B]
    amounts: Tensor  # [B, S, 6]
    erase: Tensor  # [B, 4]


class OnDevice:
    """Pictures in the device's memory and their augmentation; `config` is None for evaluation."""

    def __init__(
        self,
        labelled: Labelled,
        preprocessing: Preprocessing,
        device: torch.device,
        config: AugmentConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.labelled, self.preprocessing, self.device, self.config = labelled, preprocessing, device, config
        self.seed, self.epoch = seed, 0
        items = np.require(labelled.items, requirements=["C", "W"])  # torch takes over no memory that is read-only
        self.pixels = torch.from_numpy(items).to(device)
        self.labels = tasks.get(labelled.task).collate(labelled.labels).to(device)
        self.source = (int(items.shape[1]), int(items.shape[2]))
        self.mean, self.std = (
            torch.tensor(v, device=device)[:, None, None] for v in (preprocessing.mean, preprocessing.std)
        )
        self.fill = torch.tensor(preprocessing.fill, dtype=torch.float32, device=device)

    def __len__(self) -> int:
        return len(self.labelled)

    def batches(self, order: Sequence[Sequence[int]]) -> Iterator[Loaded]:
        """Batches of the given indices. Draws are made for several at a time, while the device is still busy."""
        for start in range(0, len(order), _AHEAD):
            yield from self._several(order[start : start + _AHEAD])

    def _several(self, order: Sequence[Sequence[int]]) -> Iterator[Loaded]:
        indices, sizes = np.array([i for batch in order for i in batch], np.int64), [len(batch) for batch in order]
        rows = _sent(indices, self.device)
        moved: Iterator[_Moved | None] = itertools.repeat(None)
        if self.config is not None:
            draws = draw(self.config, self.seed, self.epoch, indices, self.source, self.preprocessing.size)
            moved = _moved(draws, np.array(sizes), self.device)
        for part, own, chosen in zip(torch.from_numpy(indices).split(sizes), moved, rows.split(sizes), strict=False):
            images = self._evaluation(chosen) if own is None else self._training(chosen, own)
            yield Loaded(images, self.labels[chosen], part, [])

    def _pictures(self, rows: Tensor) -> Tensor:
        """uint8 [B, 3, h, w]"""
        found = self.pixels[rows]
        if found.ndim == 3:
            return found[:, None].expand(-1, 3, -1, -1)
        return found.permute(0, 3, 1, 2)

    def _evaluation(self, rows: Tensor) -> Tensor:
        """Preprocessing.evaluation for a batch."""
        images, (h, w) = self._pictures(rows), self.source
        if (h, w) != self.preprocessing.size:
            shorter = self.preprocessing.shorter
            total = (shorter, int(shorter * w / h)) if h <= w else (int(shorter * h / w), shorter)
            images = resize(
                images, *(self._centre(*axis) for axis in zip(total, self.preprocessing.size, (h, w), strict=True))
            )
        return self._normalised(images)

    def _centre(self, total: int, size: int, source: int) -> Tensor:
        """[1, size, source]: the middle `size` pixels of `total`, black around where there are too few."""
        start = round((total - size) / 2) if total >= size else -((size - total) // 2)
        low, length = torch.zeros(1, device=self.device), torch.full((1,), source, device=self.device)
        wanted = torch.arange(start, start + size, device=self.device)
        return weights(low, length, total, wanted, source, self.preprocessing.interpolation)

    def _training(self, rows: Tensor, moved: _Moved) -> Tensor:
        assert self.config is not None
        images, size = self._pictures(rows), self.preprocessing.size
        if self.config.kind == "pad":
            down, across = self.source[0] // PAD, self.source[1] // PAD
            images = F.pad(images, (across, across, down, down))
        top, left, height, width = moved.box.unbind(1)
        rows_wanted, columns = (torch.arange(n, device=self.device) for n in size)
        mirrored = torch.where(moved.mirror[:, None], size[1] - 1 - columns, columns)
        kind = self.preprocessing.interpolation
        images = resize(
            images,
            weights(top, height, size[0], rows_wanted, images.shape[2], kind),
            weights(left, width, size[1], mirrored, images.shape[3], kind),
        )
        for slot, groups in enumerate(moved.groups):
            for code, members in groups:
                part, amounts = images[members], moved.amounts[members, slot]
                part = affine(part, amounts, self.fill) if code == AFFINE else OPERATIONS[code](part, amounts)
                images.index_copy_(0, members, part)
        images = self._normalised(images)
        if self.config.erasing:
            images.masked_fill_(_inside(moved.erase, rows_wanted, columns), 0.0)
        return images

    def _normalised(self, images: Tensor) -> Tensor:
        return (
            images.to(torch.float32, memory_format=torch.contiguous_format).mul_(1 / 255).sub_(self.mean).div_(self.std)
        )


def _inside(box: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """[B, 1, H, W] bool"""
    top, left, height, width = box[:, :, None].unbind(1)
    down = (rows >= top) & (rows < top + height)
    across = (columns >= left) & (columns < left + width)
    return down[:, None, :, None] & across[:, None, None, :]


def _sent(array: Array, device: torch.device) -> Tensor:
    """An array on the device, without a wait: from pinned memory, which torch keeps until it has been copied."""
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _moved(draws: Draws, sizes: Array, device: torch.device) -> Iterator[_Moved]:
    """The draws of several batches of these sizes, one after another."""
    ends = np.cumsum(sizes)
    batch, starts = np.repeat(np.arange(len(sizes)), sizes), ends - sizes
    sent = [_sent(array, device) for array in (draws.box, draws.mirror, draws.amounts, draws.erase)]
    kinds = 1 + max((*OPERATIONS, AFFINE))
    slots = []  # images of each (batch, operation); their positions in the batch, sorted by both
    for codes in draws.codes.T:
        key = batch * kinds + codes
        counts = np.bincount(key, minlength=len(sizes) * kinds).reshape(-1, kinds)
        slots.append((counts, _sent(np.argsort(key, kind="stable") - starts[batch], device)))
    for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        parts = [members[start:end].split(counts[number].tolist()) for counts, members in slots]
        groups = [[(code, p) for code, p in enumerate(slot) if code != IDENTITY and len(p)] for slot in parts]
        yield _Moved(groups, *(tensor[start:end] for tensor in sent))


Source = Images | OnDevice
