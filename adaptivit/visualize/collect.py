"""Run a model over images and keep what it did with every patch, as plain arrays for pictures, charts and the report.

Shapes: B images, L blocks, N slots, P = gh x gw patches in row order, S places where patches were scored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..data.dataset import Images, Labelled, batches, for_evaluation, in_order, rgb
from ..decision import AppliedDecision, Drop, Merge, Skip, Trace
from ..errors import DataError, UserError
from ..evaluation.predict import find_images
from ..model import AdaptiveViT
from ..output import Output

Array = NDArray[Any]
Progress = Callable[[int, int], None]  # done, of
METHODS = {
    "aht": "AHT-ViT",
    "avit": "A-ViT",
    "mod": "MoD",
    "amod": "A-MoD",
    "dynamicvit": "DynamicViT",
    "evit": "EViT",
    "tome": "ToMe",
    "act": "ACT",
    "pondernet": "PonderNet",
}
_BATCH_SECOND = ("attended", "live", "groups", "plan", "planned", "scores")  # arrays [L or S, B, ...]; others [B, ...]


@dataclass(frozen=True)
class Scores:
    """What a policy judged patches by."""

    name: str
    values: Array  # [S, B, P], NaN where a patch was not scored
    blocks: list[int]  # [S] the first block, counted from 0, without a patch that leaves for its score
    stops: bool  # a higher score leaves sooner (halting); else it stays longer


@dataclass(frozen=True)
class Plans:
    """AHT-ViT's planned depths."""

    values: Array  # [S, B, P]
    live: Array  # [S, B, P] bool: was alive at that stage, so that the plan counts
    stages: list[int]  # [S] blocks, counted from 1
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
    predicted: Array  # [B]
    confidence: Array  # [B] probability of the predicted class
    macs: Array  # [B]
    static_macs: float
    groups: Array | None = None  # [L, B, P] after each block: the patch that this one was merged into, -1 for none
    skips: bool = False  # patches skip single blocks and come back
    labels: Array | None = None  # [B]
    class_names: list[str] | None = None
    scores: Scores | None = None
    plans: Plans | None = None
    unreadable: int = 0
    budget: str | None = None  # other than the policy's settings
    source: Any = field(default=None, repr=False)  # of the pictures themselves

    def __len__(self) -> int:
        return len(self.names)

    @property
    def method(self) -> str:
        """The policy as its paper calls it."""
        return METHODS.get(self.policy, self.policy)

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
        return None if self.labels is None else self.predicted == self.labels

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


class _Source:
    """Pictures, decoded when they are needed."""

    def __init__(self, model: AdaptiveViT, items: Labelled | Tensor) -> None:
        self.items, self.mean, self.std = items, model.preprocessing.mean, model.preprocessing.std
        self.images = None if isinstance(items, Tensor) else Images(items, model.preprocessing.evaluation())
        self.order: list[int] = []  # those that could be read

    def tensor(self, index: int) -> Tensor:
        if isinstance(self.items, Tensor):
            return self.items[index]
        assert self.images is not None
        image = self.images[self.order[index]].image
        if image is None:
            raise DataError(f"Cannot read the image {self.items.name(self.order[index])} any more.")
        return image

    @functools.lru_cache(maxsize=64)  # noqa: B019  the pictures of a report, drawn again and again
    def pixels(self, index: int) -> Array:
        image = self.tensor(index).float().cpu()
        if len(image) == 1:
            image = image.expand(3, -1, -1)
        mean, std = (torch.tensor(v).reshape(-1, 1, 1) for v in (self.mean, self.std))
        plain = (image * std + mean).clamp(0, 1).permute(1, 2, 0)
        return (plain * 255).round().to(torch.uint8).numpy()

    def batches(
        self, labels: Sequence[int] | None, size: int
    ) -> Iterator[tuple[Tensor, list[int], list[int], list[int]]]:
        """(images, their numbers, their labels, numbers of those that cannot be read)"""
        order = in_order(len(self.items), size)
        if isinstance(self.items, Tensor):
            for part in order:
                yield self.items[part], part, [0 if labels is None else labels[i] for i in part], []
            return
        assert self.images is not None
        for loaded in batches(self.images, order):
            numbers = loaded.indices.tolist()
            truth = loaded.labels.tolist() if labels is None else [labels[i] for i in numbers]
            yield loaded.images, numbers, truth, loaded.unreadable


def gather(images: Any) -> Labelled | Tensor:
    """Images as a caller gives them: a normalised tensor [B, 3, H, W], a Labelled set, paths or PIL images."""
    if isinstance(images, (Tensor, Labelled)):
        return images
    several: Any = [images] if isinstance(images, (str, Path)) else images
    items: Any = None
    if isinstance(several, Sequence):
        if all(isinstance(i, (str, Path)) for i in several):
            items = find_images(tuple(map(str, several)))
        elif all(isinstance(i, Image.Image) for i in several):
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
    given = gather(images)
    labelled = labels is not None or isinstance(images, Labelled)
    if labels is not None and len(labels) != len(given):
        raise UserError(f"Expected one label an image: {len(given)} images, {len(labels)} labels.")
    if len(given) == 0:
        raise UserError("Expected at least one image, got none.")
    if not model.shape.num_classifiers:
        raise UserError("This model has no classifier (num_classes = 0), so there is no prediction to show.")
    source, parts, unreadable = _Source(model, given), list[dict[str, Array]](), 0
    first, was_training = next(model.parameters()), model.training
    model.eval()
    for batch, numbers, truth, bad in source.batches(labels, batch_size):
        if bad and not labelled:
            raise DataError(f"Cannot read the image {source.items.name(bad[0])}.")  # type: ignore[union-attr]
        unreadable += len(bad)
        if numbers:
            output = model(batch.to(first.device, first.dtype), aux=("plan", "keep_scores"))
            kept = _kept(output) | {"labels": torch.tensor(truth)}
            parts.append({key: value.detach().cpu().numpy() for key, value in kept.items()})
            source.order += numbers
        if progress:
            progress(len(source.order) + unreadable, len(given))
    model.train(was_training)
    if not source.order:
        raise DataError(f"No image could be read ({unreadable} unreadable).")
    joined = {key: np.concatenate([p[key] for p in parts], int(key in _BATCH_SECOND)) for key in parts[0]}
    sides, patch = source.tensor(0).shape[-2:], model.vit.patch_embed.patch_size
    files = isinstance(given, Labelled) and isinstance(given.items[0], Path)
    trace, scored = output.trace, _scores(output.trace)
    plans = None
    if "plan" in joined:
        plans = Plans(joined["plan"], joined["planned"], trace.facts["stages"].tolist(), joined["halt"])
    arrays = ("attended", "live", "groups", "predicted", "confidence", "macs")
    return Seen(
        model=name or model.backbone_name or "ViT",
        policy=model.policy_name,
        budget=model.budget,
        layers=model.shape.layers,
        grid=(-(-sides[0] // patch[0]), -(-sides[1] // patch[1])),
        prefix=trace.num_prefix_tokens,
        names=[given.name(i) if files else f"image {i + 1}" for i in source.order],  # type: ignore[union-attr]
        static_macs=model.static_macs(output),
        skips=bool(joined["skips"].any()),
        labels=joined["labels"] if labelled else None,
        class_names=list(class_names) if class_names is not None else model.class_names,
        scores=Scores(scored[0], joined["scores"], scored[1], scored[2]) if scored and "scores" in joined else None,
        plans=plans,
        unreadable=unreadable,
        source=source,
        **{key: joined[key] for key in arrays if key in joined},
    )


def _kept(output: Output) -> dict[str, Tensor]:
    """What is kept of a batch, by the names of Seen's fields."""
    trace, facts, prefix = output.trace, output.trace.facts, output.trace.num_prefix_tokens
    top = output.logits.float().softmax(-1).max(-1)
    kept = {
        "attended": trace.attended[..., prefix:],
        "live": trace.live,
        "predicted": top.indices,
        "confidence": top.values,
        "macs": output.macs_deployed,
        "skips": torch.tensor([any(isinstance(s.decision, Skip) for s in trace.steps)]),
    }
    groups, scores = folded(trace), _scores(trace)
    if groups is not None:
        kept["groups"] = (groups[..., prefix:] - prefix).clamp_min(-1).to(torch.int32)
    if "plan" in facts:
        kept |= {name: facts[name][..., prefix:] for name in ("plan", "planned", "halt")}
    if scores is not None:
        kept["scores"] = scores[3]
    return kept


def _scores(trace: Trace) -> tuple[str, list[int], bool, Tensor] | None:
    """Name, blocks, whether a higher score leaves sooner, and values [S, B, P] of what patches were judged by."""
    facts, last, prefix = trace.facts, len(trace.attended), trace.num_prefix_tokens
    if "keep_scores" in facts:
        kept = [i for i, block in enumerate(facts["keep_blocks"].tolist()) if block < last]
        blocks = [int(facts["keep_blocks"][i]) for i in kept]
        return ("score for staying", blocks, False, facts["keep_scores"][kept][..., prefix:]) if kept else None
    name = "scores" if "halt" in facts else "chance"
    if name == "chance" and (name not in facts or facts[name].shape[-1] != trace.attended.shape[-1]):
        return None
    live, values = trace.attended[:-1, :, prefix:], facts[name][: last - 1, :, prefix:].float()
    title = "halting score" if name == "scores" else "chance of stopping"
    return title, list(range(1, last)), True, torch.where(live, values, torch.full_like(values, float("nan")))


def folded(trace: Trace) -> Tensor | None:
    """[L, B, N] the slot that every slot was merged into after each block, -1 where it has left for good.

    None for a policy that never merges.
    """
    if not any(isinstance(s.decision, Merge) for s in trace.steps):
        return None
    layers, images, slots = trace.attended.shape
    own = torch.arange(slots, device=trace.attended.device).expand(images, slots)
    now, after = own, []
    for layer in range(layers):
        for step in trace.steps:
            if step.layer == layer:
                now = _moved(now, own, step)
        after.append(now)
    return torch.stack(after)


def _moved(now: Tensor, own: Tensor, step: AppliedDecision) -> Tensor:
    decision = step.decision
    if isinstance(decision, Merge):
        goes = decision.target
    elif isinstance(decision, Drop):
        goes = torch.where(decision.leaving, -1, own)
    else:
        return now
    return torch.where(now < 0, now, goes.gather(1, now.clamp_min(0)))
