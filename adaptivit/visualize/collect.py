"""From images and a model to what there is to see: run the model and keep what it did with every patch.

Shapes: B images, L blocks, N slots, P patches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.dataset import Images, Labelled, batches, for_evaluation, in_order, rgb
from ..decision import AppliedDecision, Drop, Merge, Skip, Trace
from ..errors import DataError, UserError
from ..evaluation.predict import find_images
from ..model import AdaptiveViT
from ..output import Output
from .seen import Array, Plans, Scores, Seen

Progress = Callable[[int, int], None]  # done, of


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


def gather(images: Any) -> Labelled | Tensor:
    """Whatever a caller may give: a normalised tensor [B, 3, H, W]; a Labelled set; a path, or several, of image files
    and folders; PIL images."""
    if isinstance(images, (Tensor, Labelled)):
        return images
    several = isinstance(images, Sequence) and not isinstance(images, str)
    if several and images and all(isinstance(i, Image.Image) for i in images):
        return Labelled("images", [np.asarray(rgb(i)) for i in images], [0] * len(images), ("",))
    if isinstance(images, (str, Path)):
        return _files([images])
    if several and all(isinstance(i, (str, Path)) for i in images):
        return _files(images)
    raise UserError(
        "Expected a tensor [B, 3, H, W], paths of image files and folders, PIL images or a labelled data set, "
        f"got {type(images).__name__}."
    )


def _files(paths: Sequence[str | Path]) -> Labelled:
    files = find_images(tuple(str(p) for p in paths))
    return Labelled("images", files, [0] * len(files), ("",))


def data_set(path: str | Path, model: AdaptiveViT, limit: int | None = None, split: str = "auto") -> Labelled:
    """A labelled data set (a folder of class folders, an .npz, `digits`) with the model's class numbers."""
    found = for_evaluation(path, split)
    found = found if limit is None else found.spread(limit)
    return found.for_model(model.vit.num_classes, model.class_names)


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
    source, parts = _Source(model, given), _Parts()
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    was_training = model.training
    model.eval()
    for batch, numbers, truth, bad in _batches(source, labels, batch_size):
        if bad and not labelled:
            raise DataError(f"Cannot read the image {source.items.name(bad[0])}.")  # type: ignore[union-attr]
        parts.unreadable += len(bad)
        if len(numbers):
            output = model(batch.to(device, dtype), aux=("plan", "keep_scores"))
            parts.add(output, truth)
            source.order += numbers
        if progress:
            progress(len(source.order) + parts.unreadable, len(given))
    model.train(was_training)
    if not source.order:
        raise DataError(f"No image could be read ({parts.unreadable} unreadable).")
    known = [f"image {i + 1}" for i in source.order]
    if isinstance(given, Labelled) and isinstance(given.items[0], Path):
        known = [given.name(i) for i in source.order]
    sides = tuple(source.tensor(0).shape[-2:])
    patch = model.vit.patch_embed.patch_size
    return parts.seen(
        model=name or model.backbone_name or "ViT",
        policy=model.policy_name,
        budget=model.budget,
        layers=model.shape.layers,
        grid=(-(-sides[0] // patch[0]), -(-sides[1] // patch[1])),
        names=known,
        labelled=labelled,
        class_names=list(class_names) if class_names is not None else model.class_names,
        static_macs=parts.static(model),
        source=source,
    )


def _batches(source: _Source, labels: Sequence[int] | None, size: int) -> Any:
    """(images, their numbers, their labels, numbers of those that cannot be read)"""
    order = in_order(len(source.items), size)
    if isinstance(source.items, Tensor):
        for part in order:
            yield source.items[part], part, [0 if labels is None else labels[i] for i in part], []
        return
    assert source.images is not None
    for loaded in batches(source.images, order):
        truth = loaded.labels.tolist() if labels is None else [labels[i] for i in loaded.indices.tolist()]
        yield loaded.images, loaded.indices.tolist(), truth, loaded.unreadable


def folded(trace: Trace) -> Tensor | None:
    """[L, B, N] the slot that every slot has become part of after each block, -1 where it has left for good.

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


class _Parts:
    """What is collected of every batch."""

    def __init__(self) -> None:
        self.unreadable, self.prefix, self.skips = 0, 0, False
        self.lists: dict[str, list[Array]] = {}
        self.stages: list[int] = []
        self.blocks: list[int] = []
        self.score_name, self.stops = "", False
        self.output: Output | None = None

    def _keep(self, name: str, value: Tensor) -> None:
        self.lists.setdefault(name, []).append(value.detach().cpu().numpy())

    def static(self, model: AdaptiveViT) -> float:
        assert self.output is not None
        return model.static_macs(self.output)

    def add(self, output: Output, labels: list[int]) -> None:
        trace, facts = output.trace, output.trace.facts
        self.output, prefix = output, trace.num_prefix_tokens
        self.prefix = prefix
        self.skips |= any(isinstance(s.decision, Skip) for s in trace.steps)
        self._keep("attended", trace.attended[..., prefix:])
        self._keep("live", trace.live)
        top = output.logits.float().softmax(-1).max(-1)
        self._keep("predicted", top.indices)
        self._keep("confidence", top.values)
        self._keep("macs", output.macs_deployed)
        self._keep("labels", torch.tensor(labels))
        groups = folded(trace)
        if groups is not None:
            self._keep("groups", (groups[..., prefix:] - prefix).clamp_min(-1).to(torch.int32))
        if "plan" in facts:
            self.stages = [int(s) for s in facts["stages"]]
            self._keep("plan", facts["plan"][..., prefix:])
            self._keep("planned", facts["planned"][..., prefix:])
            self._keep("halt", facts["halt"][..., prefix:])
        self._scores(trace, facts)

    def _scores(self, trace: Trace, facts: dict[str, Tensor]) -> None:
        live = trace.attended[:-1, :, trace.num_prefix_tokens :]
        last = len(trace.attended)
        if "keep_scores" in facts:
            kept = [i for i, b in enumerate(facts["keep_blocks"].tolist()) if b < last]
            self.score_name, self.stops = "score for staying", False
            self.blocks = [int(facts["keep_blocks"][i]) for i in kept]
            if kept:
                self._keep("scores", facts["keep_scores"][kept][..., trace.num_prefix_tokens :])
        elif "halt" in facts or facts.get("chance", live[..., :0]).shape[-1:] == trace.attended.shape[-1:]:
            name = "scores" if "halt" in facts else "chance"
            self.score_name, self.stops = ("halting score" if name == "scores" else "chance of stopping"), True
            self.blocks = list(range(1, last))
            values = facts[name][: last - 1, :, trace.num_prefix_tokens :].float()
            self._keep("scores", torch.where(live, values, torch.full_like(values, float("nan"))))

    def seen(self, *, labelled: bool, **known: Any) -> Seen:
        joined = {name: np.concatenate(parts, _axis(name)) for name, parts in self.lists.items()}
        plans = scores = None
        if "plan" in joined:
            plans = Plans(joined["plan"], joined["planned"], self.stages, joined["halt"])
        if "scores" in joined:
            scores = Scores(self.score_name, joined["scores"], self.blocks, self.stops)
        return Seen(
            attended=joined["attended"],
            live=joined["live"],
            groups=joined.get("groups"),
            predicted=joined["predicted"],
            confidence=joined["confidence"],
            macs=joined["macs"],
            labels=joined["labels"] if labelled else None,
            prefix=self.prefix,
            skips=self.skips,
            scores=scores,
            plans=plans,
            unreadable=self.unreadable,
            **known,
        )


def _axis(name: str) -> int:
    """Where B stands."""
    return 1 if name in ("attended", "live", "groups", "plan", "planned", "scores") else 0
