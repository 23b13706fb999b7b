"""Array data on the device: batches are gathered, resized, augmented and normalised there, without a wait.

Shapes: pixels uint8 [n, h, w, 3] or [n, h, w] of the whole set; B images of a batch, [H, W] what the model reads.
Evaluation gives what PIL gives, bit for bit (resample.py). Training draws other random numbers than the CPU's way
does, to the same rules (augment.py).
"""

from __future__ import annotations

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
    """The images as a model is judged by them; which way they take changes the time alone."""
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
        raise UserError(f"augment_on: device was asked for, but {hindrance}. Leave it at auto or cpu.")
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
    """The draws of one batch on the device, and for every slot which images each operation is for."""

    box: Tensor  # [B, 4]
    mirror: Tensor  # [B]
    amounts: Tensor  # [B, S, 6]
    erase: Tensor  # [B, 4]
    groups: list[list[tuple[int, Tensor]]]  # by slot: (operation, positions in the batch)


class OnDevice:
    """A set of pictures in the device's memory, and what is done to them: `config` is None for evaluation."""

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
        """Batches of the given indices, in that order. Draws are made for several at a time, while the device is
        still busy with the ones before."""
        for start in range(0, len(order), _AHEAD):
            yield from self._several(order[start : start + _AHEAD])

    def _several(self, order: Sequence[Sequence[int]]) -> Iterator[Loaded]:
        indices = np.array([i for batch in order for i in batch], np.int64)
        rows, ends = _sent(indices, self.device), np.cumsum([len(batch) for batch in order])
        plan = None
        if self.config is not None:
            draws = draw(self.config, self.seed, self.epoch, indices, self.source, self.preprocessing.size)
            plan = _Plan(draws, ends, self.device)
        for number, end in enumerate(ends):
            begin = int(end) - len(order[number])
            chosen = rows[begin:end]
            images = self._evaluation(chosen) if plan is None else self._training(chosen, plan.batch(number))
            yield Loaded(images, self.labels[chosen], torch.from_numpy(indices[begin:end]), [])

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


class _Plan:
    """The draws of several batches on the device."""

    def __init__(self, draws: Draws, ends: Array, device: torch.device) -> None:
        self.ends = ends
        self.box, self.mirror, self.amounts, self.erase = (
            _sent(a, device) for a in (draws.box, draws.mirror, draws.amounts, draws.erase)
        )
        batch = np.searchsorted(ends, np.arange(len(draws.mirror)), side="right")
        start = np.concatenate([[0], ends])[batch]
        kinds = 1 + max((*OPERATIONS, AFFINE))
        self.counts, self.members = [], []  # by slot: images of each (batch, operation); positions, sorted by both
        for codes in draws.codes.T:
            key = batch * kinds + codes
            sorted_by = np.argsort(key, kind="stable")
            self.counts.append(np.bincount(key, minlength=len(ends) * kinds).reshape(-1, kinds))
            self.members.append(_sent(sorted_by - start[sorted_by], device))

    def batch(self, number: int) -> _Moved:
        end = int(self.ends[number])
        begin = int(self.ends[number - 1]) if number else 0
        groups = []
        for counts, members in zip(self.counts, self.members, strict=True):
            parts = members[begin:end].split(counts[number].tolist())
            groups.append([(c, p) for c, p in enumerate(parts) if c != IDENTITY and len(p)])
        some = slice(begin, end)
        return _Moved(self.box[some], self.mirror[some], self.amounts[some], self.erase[some], groups)


Source = Images | OnDevice
