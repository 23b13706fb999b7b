"""Run a model over images and keep what it did with every patch, as plain arrays.

Shapes: B images, L blocks, N slots, P = gh x gw patches in row order, S places where patches were scored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from .. import tasks
from ..data.dataset import Images, Labelled, Sample, batches, for_evaluation, in_order
from ..data.image_files import rgb
from ..decision import Drop, Keep, Merge, Trace
from ..errors import DataError, UserError
from ..evaluation.predict import find_images
from ..model import AdaptiveViT
from ..output import Output
from ..policies import get
from ..tasks.protocol import Task

Array = NDArray[Any]
Progress = Callable[[int, int], None]  # done, of
_PLAN = ("plan", "planned", "halt")  # facts of AHT-ViT, in the order of Plans
_BATCH_SECOND = ("attended", "live", "groups", "plan", "planned", "scores")  # arrays [L or S, B, ...]; others [B, ...]


@dataclass(frozen=True)
class Scores:
    """What a policy judged patches by."""

    values: Array  # [S, B, P], NaN where a patch was not scored
    name: str
    blocks: list[int]  # [S] the first block, counted from 0, without a patch that leaves for its score
    stops: bool  # a higher score leaves sooner (halting); else it stays longer


@dataclass(frozen=True)
class Plans:
    """AHT-ViT's planned depths."""

    stages: list[int]  # [S] blocks, counted from 1
    values: Array  # [S, B, P]
    live: Array  # [S, B, P] bool: was alive at that stage, so that the plan counts
    halt: Array  # [B, P] the block, counted from 1, after which each patch halted


@dataclass
class Seen:
    """Images and what a model did with their patches."""

    model: str
    policy: str
    layers: int
    grid: tuple[int, int]
    prefix: int
    names: list[str]  # [B] of the images
    attended: Array  # [L, B, P] bool: took part in the block
    live: Array  # [L, B] tokens in each block's attention, prefix tokens included
    macs: Array  # [B]
    static_macs: float
    captions: list[str]  # [B] the task's answers in words
    predicted: Array | None = None  # [B] class; None where the task predicts no classes
    confidence: Array | None = None  # [B] probability of the predicted class
    groups: Array | None = None  # [L, B, P] after each block: the patch that this one was merged into, -1 for none
    decisions: dict[int, str] = field(default_factory=dict)  # block, from 0 -> Drop, Merge or Skip
    labels: Array | None = None  # [B]
    class_names: list[str] | None = None
    scores: Scores | None = None
    plans: Plans | None = None
    left_out: list[str] = field(default_factory=list)  # files, each with the reason
    budget: str | None = None  # other than the policy's settings
    source: Any = field(default=None, repr=False)  # of the pictures themselves

    def __len__(self) -> int:
        return len(self.names)

    @property
    def skips(self) -> bool:
        """True where patches skip single blocks and come back."""
        return "Skip" in self.decisions.values()

    @property
    def method(self) -> str:
        """The policy as its paper calls it."""
        return get(self.policy).title

    @cached_property
    def depth(self) -> Array:
        """[B, P] blocks that computed each patch."""
        return self.attended.sum(0)

    @cached_property
    def mean_depth(self) -> Array:
        """[B]"""
        return self.depth.mean(-1)

    @property
    def correct(self) -> Array | None:
        """[B] bool, where there are labels."""
        return None if self.labels is None or self.predicted is None else self.predicted == self.labels

    @property
    def equal(self) -> bool:
        """True where all images go equally deep: a policy of fixed counts."""
        return bool(np.ptp(self.mean_depth) < 1e-9)

    def pixels(self, index: int) -> Array:
        """[H, W, 3] uint8: the image as the model saw it, cropped and resized."""
        return self.source.pixels(index)

    def tensor(self, index: int) -> Tensor:
        """[3, H, W] normalised."""
        return self.source.tensor(index)

    def class_name(self, number: int) -> str:
        known = self.class_names
        return known[number] if known is not None and 0 <= number < len(known) else f"class {number}"

    @cached_property
    def titles(self) -> list[str]:
        """[B] file names for captions, with the folder where names repeat."""
        short = [Path(n).stem for n in self.names]
        if len(set(short)) == len(short):
            return short
        return ["/".join(Path(n).with_suffix("").parts[-2:]) for n in self.names]


class _Tensors(Images):
    """Normalised tensors in place of files."""

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.labelled.items[index], self.labelled.labels[index], index)


class _Source:
    """Images, decoded when they are needed."""

    def __init__(self, model: AdaptiveViT, labelled: Labelled) -> None:
        kind, expects = _Tensors if isinstance(labelled.items[0], Tensor) else Images, model.preprocessing
        self.images = kind(labelled, expects.evaluation())
        self.to_pixels = expects.to_pixels
        self.order: list[int] = []  # those that could be read

    def tensor(self, index: int) -> Tensor:
        image = self.images[self.order[index]].image
        if image is None:
            raise DataError(f"Cannot read the image {self.images.labelled.name(self.order[index])} any more.")
        return image

    @functools.lru_cache(maxsize=64)  # noqa: B019  the pictures of a report, drawn again and again
    def pixels(self, index: int) -> Array:
        image = self.tensor(index).float().cpu()  # [1 or 3, H, W]
        plain = self.to_pixels(image[None])[0].expand(-1, -1, 3)
        return (plain * 255).round().to(torch.uint8).numpy()

    def name(self, index: int) -> str:
        number, known = self.order[index], self.images.labelled
        return known.name(number) if isinstance(known.items[0], Path) else f"image {number + 1}"


def gather(images: Any) -> Labelled:
    """Images as a caller gives them: a normalised tensor [B, 3, H, W], a Labelled set, paths or PIL images."""
    if isinstance(images, Labelled):
        return images
    several: Any = [images] if isinstance(images, (str, Path)) else images
    items: Any = None
    if isinstance(several, Tensor):
        items = list(several)
    elif isinstance(several, Sequence) and all(isinstance(i, (str, Path)) for i in several):
        others: list[str] = []
        items = find_images(tuple(map(str, several)), others)
        return Labelled("images", items, [0] * len(items), ("",), tuple(others))
    elif isinstance(several, Sequence) and all(isinstance(i, Image.Image) for i in several):
        items = [np.asarray(rgb(i)) for i in several]
    if items is None:
        raise UserError(
            "Expected a tensor [B, 3, H, W], paths of image files and folders, PIL images or a labelled data set, "
            f"got {type(images).__name__}."
        )
    return Labelled("images", items, [0] * len(items), ("",))


def data_set(path: str | Path, model: AdaptiveViT, limit: int | None = None, split: str = "auto") -> Labelled:
    """A labelled data set (a folder of class folders, an .npz, `digits`) with the model's class numbers."""
    found = for_evaluation(path, split, model.task)
    found = found if limit is None else found.spread(limit)
    return found.for_model(model)


@torch.inference_mode()
def look(
    model: AdaptiveViT,
    images: Any,
    *,
    labels: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    name: str = "",
    batch_size: int = 32,
    progress: Progress | None = None,
) -> Seen:
    """Run a model over images and keep what it did with every patch."""
    given = _checked(model, gather(images), labels)
    source, labelled = _Source(model, given), labels is not None or isinstance(images, Labelled)
    was_training, parts, captions = model.training, list[dict[str, Array]](), list[str]()
    task, known = tasks.get(model.task), list(class_names) if class_names is not None else model.class_names
    for output, truth in _outputs(model.eval(), source, labelled, batch_size, progress):
        parts.append(_arrays(output, task) | {"labels": truth})
        captions += [task.caption(task.answer(logits, known, 1)) for logits in output.logits.float().cpu()]
    model.train(was_training)
    if not parts:
        raise DataError(f"No image could be read ({len(given)} unreadable).")
    arrays = {key: np.concatenate([part[key] for part in parts], int(key in _BATCH_SECOND)) for key in parts[0]}
    trace, shape, patch = output.trace, source.tensor(0).shape, model.backbone.patch_size
    fields = ("attended", "live", "groups", "predicted", "confidence", "macs")
    return Seen(
        model=name or model.backbone_name or "ViT",
        policy=model.policy_name,
        budget=model.budget,
        layers=model.shape.layers,
        grid=(-(-shape[-2] // patch[0]), -(-shape[-1] // patch[1])),
        prefix=trace.num_prefix_tokens,
        names=[source.name(i) for i in range(len(source.order))],
        static_macs=model.static_macs(output),
        decisions={s.layer: type(s.decision).__name__ for s in trace.steps if not isinstance(s.decision, Keep)},
        captions=captions,
        labels=arrays["labels"] if labelled and "predicted" in arrays else None,
        class_names=known,
        scores=Scores(arrays["scores"], *_scored(trace)) if "scores" in arrays else None,
        plans=Plans(trace.facts["stages"].tolist(), *(arrays[key] for key in _PLAN)) if "plan" in arrays else None,
        left_out=list(given.without(set(range(len(given))) - set(source.order))),
        source=source,
        **{key: arrays[key] for key in fields if key in arrays},
    )


def _checked(model: AdaptiveViT, given: Labelled, labels: Sequence[int] | None) -> Labelled:
    """The images with the labels that were given with them."""
    if labels is not None and len(labels) != len(given):
        raise UserError(f"Expected one label an image: {len(given)} images, {len(labels)} labels.")
    if len(given) == 0:
        raise UserError("Expected at least one image, got none.")
    if not model.shape.num_classifiers:
        raise UserError("This model has no classifier (num_classes = 0), so there is no prediction to show.")
    return given if labels is None else replace(given, labels=labels)


def _outputs(
    model: AdaptiveViT, source: _Source, labelled: bool, size: int, progress: Progress | None
) -> Iterator[tuple[Output, Array]]:
    """Batch by batch what the model gives, and the labels."""
    first, images, done = next(model.parameters()), source.images, 0
    for loaded in batches(images, in_order(len(images), size)):
        if loaded.unreadable and not labelled:
            raise DataError(f"Cannot read the image {images.labelled.name(loaded.unreadable[0])}.")
        done += len(loaded.indices) + len(loaded.unreadable)
        source.order += loaded.indices.tolist()
        if len(loaded.indices):
            yield model(loaded.images.to(first.device, first.dtype), aux=("plan", "keep_scores")), loaded.labels.numpy()
        if progress:
            progress(done, len(images))


def _arrays(output: Output, task: Task) -> dict[str, Array]:
    """What is kept of a batch."""
    trace, facts, prefix = output.trace, output.trace.facts, output.trace.num_prefix_tokens
    layers, shown = len(trace.attended), task.shown(output.logits)
    kept = {
        "attended": trace.attended[..., prefix:],
        "live": trace.live,
        "macs": output.macs_deployed,
    }
    if shown is not None:
        kept |= {"predicted": shown.classes, "confidence": shown.confidence}
    groups = merged(trace)
    if groups is not None:
        kept["groups"] = (groups[..., prefix:] - prefix).clamp_min(-1).to(torch.int32)
    if "plan" in facts:
        kept |= {name: facts[name][..., prefix:] for name in _PLAN}
    _, blocks, stops = _scored(trace)
    if stops:
        values = facts["scores" if "halt" in facts else "chance"][: layers - 1, :, prefix:].float()
        kept["scores"] = values.masked_fill(~trace.attended[:-1, :, prefix:], float("nan"))
    elif blocks:
        kept["scores"] = facts["keep_scores"][: len(blocks), ..., prefix:]
    return {key: value.cpu().numpy() for key, value in kept.items()}


def _scored(trace: Trace) -> tuple[str, list[int], bool]:
    """Name, blocks and direction of what patches were judged by (see Scores); no blocks where they were not."""
    facts, layers, slots = trace.facts, len(trace.attended), trace.attended.shape[-1]
    if "keep_scores" in facts:
        return "score for staying", [b for b in facts["keep_blocks"].tolist() if b < layers], False
    if "halt" in facts:
        return "halting score", list(range(1, layers)), True
    of_patches = "chance" in facts and facts["chance"].shape[-1] == slots
    return "chance of stopping", list(range(1, layers)) if of_patches else [], of_patches


def merged(trace: Trace) -> Tensor | None:
    """[L, B, N] the slot that holds each slot's content after every block; None for a policy that never merges.

    -1 where a slot was dropped.
    """
    if not any(isinstance(s.decision, Merge) for s in trace.steps):
        return None
    layers, images, slots = trace.attended.shape
    own = torch.arange(slots, device=trace.attended.device).expand(images, slots)
    now, after = own, []
    for layer in range(layers):
        for decision in (step.decision for step in trace.steps if step.layer == layer):
            if isinstance(decision, (Merge, Drop)):
                goes = decision.target if isinstance(decision, Merge) else torch.where(decision.leaving, -1, own)
                now = torch.where(now < 0, now, goes.gather(1, now.clamp_min(0)))
        after.append(now)
    return torch.stack(after)
