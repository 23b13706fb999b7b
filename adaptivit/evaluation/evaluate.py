"""Accuracy, cost and depth of a model on labelled images: a plain function of a model and batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.dataset import Loaded
from ..errors import DataError
from ..model import AdaptiveViT


@dataclass
class Result:
    """What was measured. GMACs are per image; the papers call them GFLOPs."""

    images: int
    unreadable: int
    top1: float  # %
    top5: float
    gmacs: float  # what runs when deployed: planners that act, routers and evidence included
    gmacs_blocks: float  # what the papers count: embedding, blocks, head
    gmacs_static: float
    mean_depth: float  # blocks computed per patch
    live: list[float]  # mean tokens that entered each block's attention
    live_mlp: list[float]
    layout: str
    images_per_second: float
    plan_gap: float | None = None  # AHT: mean N - N_target over planned pairs
    plan_correlation: float | None = None  # AHT: Pearson correlation of N and N_target
    correct: list[bool] = field(default_factory=list, repr=False)  # by image, in order
    indices: list[int] = field(default_factory=list, repr=False)

    @property
    def saved(self) -> float:
        """Share of static's MACs that did not run."""
        return 1 - self.gmacs / self.gmacs_static

    def summary(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k not in ("correct", "indices")}


@torch.inference_mode()
def evaluate(
    model: AdaptiveViT,
    batches: Iterable[Loaded],
    *,
    layout: str = "auto",
    device: torch.device | str = "cpu",
    progress: Callable[[int, float], None] | None = None,
    shared: bool = False,
) -> Result:
    """Run a model over batches. `progress` is called with the images done and the accuracy so far. With `shared` every
    process (torchrun) has batches of its own, and all of them get the result over all images."""
    was_training = model.training
    model.eval()
    sums = _Sums()
    ask = model.policy.optional_aux & {"plan"}
    dtype = next(model.parameters()).dtype
    for batch in batches:
        sums.unreadable += len(batch.unreadable)
        if len(batch.labels) == 0:
            continue
        images, labels = batch.images.to(device, dtype), batch.labels.to(device)
        start = time.perf_counter()
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # fp32 means fp32, in the patch embedding too
            output = model(images, layout=layout, aux=ask)
        top = output.logits.topk(min(5, output.logits.shape[1]), dim=1).indices
        hit = (top == labels[:, None]).cpu()  # waits for the device
        sums.seconds += time.perf_counter() - start
        sums.layout = output.layout
        sums.correct += hit[:, 0].tolist()
        sums.indices += batch.indices.tolist()
        sums.top5 += int(hit.any(1).sum())
        trace = output.trace
        sums.add("gmacs", output.macs_deployed.sum() / 1e9)
        sums.add("gmacs_blocks", output.macs_blocks.sum() / 1e9)
        sums.add("mean_depth", trace.mean_depth.sum())
        sums.add("live", trace.live.double().sum(1))
        sums.add("live_mlp", trace.live_mlp.double().sum(1))
        sums.static = model.static_macs(output) / 1e9
        if "plan" in trace.facts:
            planned = trace.facts["planned"]
            halt = trace.facts["halt"].expand_as(planned)[planned].double()
            plan = trace.facts["plan"][planned].double()
            sums.add("plan", torch.stack([torch.ones_like(plan), halt, plan, halt**2, plan**2, halt * plan]).sum(1))
        if progress:
            progress(len(sums.correct), sum(sums.correct) / len(sums.correct))
    model.train(was_training)
    return (_everywhere(sums) if shared else sums).result()


@dataclass
class _Sums:
    unreadable: int = 0
    seconds: float = 0.0
    top5: int = 0
    static: float = 0.0
    layout: str = ""
    correct: list[bool] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    totals: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        value = value.cpu()
        self.totals[name] = self.totals[name] + value if name in self.totals else value

    def result(self) -> Result:
        count = len(self.correct)
        if count == 0:
            raise DataError(f"No image could be read ({self.unreadable} unreadable).")
        mean: dict[str, Any] = {name: (total / count).tolist() for name, total in self.totals.items() if name != "plan"}
        gap = correlation = None
        if "plan" in self.totals and self.totals["plan"][0] > 1:
            n, halt, plan, halt2, plan2, both = self.totals["plan"].tolist()
            gap = (halt - plan) / n
            spread = (halt2 - halt**2 / n) * (plan2 - plan**2 / n)
            correlation = (both - halt * plan / n) / math.sqrt(spread) if spread > 1e-9 else None
        return Result(
            images=count,
            unreadable=self.unreadable,
            top1=100 * sum(self.correct) / count,
            top5=100 * self.top5 / count,
            gmacs_static=self.static,
            layout=self.layout,
            images_per_second=count / max(self.seconds, 1e-9),
            plan_gap=gap,
            plan_correlation=correlation,
            correct=self.correct,
            indices=self.indices,
            **mean,
        )


def _everywhere(own: _Sums) -> _Sums:
    """The sums of all processes; images in the order of their indices, as one process would have them."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    both = _Sums(seconds=max(s.seconds for s in every), static=max(s.static for s in every))
    both.layout = next((s.layout for s in every if s.layout), "")
    for sums in every:
        both.unreadable += sums.unreadable
        both.top5 += sums.top5
        for name, value in sums.totals.items():
            both.add(name, value)
    pairs = sorted((i, hit) for sums in every for i, hit in zip(sums.indices, sums.correct, strict=True))
    both.indices, both.correct = [i for i, _ in pairs], [hit for _, hit in pairs]
    return both


def paired_difference(first: Result, second: Result) -> tuple[float, float, int]:
    """Top-1 of `first` minus `second` on the same images, in points: (difference, half width of the 95 % interval,
    images). The standard error is that of the paired differences."""
    other = dict(zip(second.indices, second.correct, strict=True))
    pairs = [(a, other[i]) for i, a in zip(first.indices, first.correct, strict=True) if i in other]
    if not pairs:
        raise DataError("The two models have no image in common.")
    differences = [100.0 * (a - b) for a, b in pairs]
    n = len(differences)
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / max(n - 1, 1)
    return mean, 1.96 * math.sqrt(variance / n), n


@torch.inference_mode()
def flipped_decisions(model: AdaptiveViT, other: AdaptiveViT, images: Tensor) -> float:
    """Share of tokens whose depth differs between two precisions of one model."""
    dtypes = [next(m.parameters()).dtype for m in (model, other)]
    depths = [m(images.to(d)).trace.depth for m, d in zip((model, other), dtypes, strict=True)]
    return float((depths[0] != depths[1]).double().mean())
