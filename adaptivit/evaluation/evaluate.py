"""Metrics, cost and depth of a model on labelled images: a plain function of a model and batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import tasks
from ..data.dataset import Loaded
from ..errors import DataError
from ..model import AdaptiveViT
from ..output import Output
from ..tasks.protocol import Metric, Task


@dataclass
class Result:
    """What was measured. GMACs are per image; the papers call them GFLOPs."""

    images: int
    unreadable: int
    metrics: dict[str, float]  # by the task's keys: top1 and top5 in %
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
    scores: list[float] = field(default_factory=list, repr=False)  # by image, in order; models are compared by them
    indices: list[int] = field(default_factory=list, repr=False)
    task: str = tasks.DEFAULT

    @property
    def saved(self) -> float:
        """Share of static's MACs that did not run."""
        return 1 - self.gmacs / self.gmacs_static

    @property
    def score(self) -> float:
        """The first metric, which models are compared by."""
        return self.shown()[0][1]

    def shown(self) -> list[tuple[Metric, float]]:
        """The metrics with how they are shown."""
        return [(metric, self.metrics[key]) for key, metric in tasks.get(self.task).metrics.items()]

    @property
    def text(self) -> str:
        """The first metric in words, e.g. `top-1 93.20 %`."""
        metric, value = self.shown()[0]
        return f"{metric.title} {metric.text(value)}"

    def row(self) -> dict[str, float]:
        """The metrics as columns of a table; timm's error columns beside those in %."""
        found = {}
        for key, metric in tasks.get(self.task).metrics.items():
            found[key] = round(self.metrics[key], 4)
            if metric.unit == "%":
                found[f"{key}_err"] = round(100 - self.metrics[key], 4)
        return found

    def summary(self) -> dict[str, Any]:
        """Everything but the single images, metrics under their own names."""
        values = {k: v for k, v in asdict(self).items() if k not in ("scores", "indices", "task")}
        head = {k: values.pop(k) for k in ("images", "unreadable")}
        return head | values.pop("metrics") | values


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
    """Run a model over batches. `progress` is called with the images done and their mean score. With `shared` every
    process (torchrun) has batches of its own, and all of them get the result over all images."""
    was_training = model.training
    model.eval()
    sums, task = _Sums(), tasks.get(model.task)
    ask = model.policy.traits.optional_aux & {"plan"}
    dtype = next(model.parameters()).dtype
    for batch in batches:
        sums.unreadable += len(batch.unreadable)
        if len(batch.labels) == 0:
            continue
        images, labels = batch.images.to(device, dtype), batch.labels.to(device)
        start = time.perf_counter()
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # fp32 means fp32, in the patch embedding too
            output = model(images, layout=layout, aux=ask)
        judged = task.judge(output.logits, labels)
        scores = judged.scores.tolist()  # waits for the device
        sums.seconds += time.perf_counter() - start
        sums.scores += scores
        sums.indices += batch.indices.tolist()
        sums.layout, sums.static = output.layout, model.static_macs(output) / 1e9
        sums.add(_costs(output), judged.sums)
        if progress:
            progress(len(sums.scores), sum(sums.scores) / len(sums.scores))
    model.train(was_training)
    return (_everywhere(sums) if shared else sums).result(task)


def _costs(output: Output) -> dict[str, Tensor]:
    """Sums over the images, and of planned depths, if there are any, [6]: count, and sums of N, N_target, their squares
    and their product over planned pairs."""
    trace = output.trace
    costs = {
        "gmacs": output.macs_deployed.sum() / 1e9,
        "gmacs_blocks": output.macs_blocks.sum() / 1e9,
        "mean_depth": trace.mean_depth.sum(),
        "live": trace.live.double().sum(1),
        "live_mlp": trace.live_mlp.double().sum(1),
    }
    if "plan" in trace.facts:
        planned = trace.facts["planned"]
        halt = trace.facts["halt"].expand_as(planned)[planned].double()
        plan = trace.facts["plan"][planned].double()
        costs["plan"] = torch.stack([torch.ones_like(plan), halt, plan, halt**2, plan**2, halt * plan]).sum(1)
    return costs


@dataclass
class _Sums:
    unreadable: int = 0
    seconds: float = 0.0
    static: float = 0.0
    layout: str = ""
    scores: list[float] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    costs: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)  # what the task adds up

    def add(self, costs: Mapping[str, Tensor], metrics: Mapping[str, Tensor]) -> None:
        for totals, values in ((self.costs, costs), (self.metrics, metrics)):
            for name, value in values.items():
                totals[name] = totals[name] + value.cpu() if name in totals else value.cpu()

    def result(self, task: Task) -> Result:
        count = len(self.scores)
        if count == 0:
            raise DataError(f"No image could be read ({self.unreadable} unreadable).")
        gap = correlation = None
        moments = self.costs.pop("plan", None)
        if moments is not None and moments[0] > 1:
            n, halt, plan, halt2, plan2, both = moments.tolist()
            gap = (halt - plan) / n
            spread = (halt2 - halt**2 / n) * (plan2 - plan**2 / n)
            correlation = (both - halt * plan / n) / math.sqrt(spread) if spread > 1e-9 else None
        means: dict[str, Any] = {name: (total / count).tolist() for name, total in self.costs.items()}
        return Result(
            images=count,
            unreadable=self.unreadable,
            metrics=task.figures(self.metrics, count),
            gmacs_static=self.static,
            layout=self.layout,
            images_per_second=count / max(self.seconds, 1e-9),
            plan_gap=gap,
            plan_correlation=correlation,
            scores=self.scores,
            indices=self.indices,
            task=task.name,
            **means,
        )


def _everywhere(own: _Sums) -> _Sums:
    """The sums of all processes; images in the order of their indices, as one process would have them."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    both = _Sums(seconds=max(s.seconds for s in every), static=max(s.static for s in every))
    both.layout = next((s.layout for s in every if s.layout), "")
    for sums in every:
        both.unreadable += sums.unreadable
        both.add(sums.costs, sums.metrics)
    pairs = sorted(pair for sums in every for pair in zip(sums.indices, sums.scores, strict=True))
    both.indices, both.scores = [i for i, _ in pairs], [score for _, score in pairs]
    return both


def paired_difference(first: Result, second: Result) -> tuple[float, float, int]:
    """Mean score of `first` minus `second` on the same images, of top-1 in points: (difference, half width of the
    95 % interval, images). The standard error is that of the paired differences."""
    other = dict(zip(second.indices, second.scores, strict=True))
    differences = [a - other[i] for i, a in zip(first.indices, first.scores, strict=True) if i in other]
    if not differences:
        raise DataError("The two models have no image in common.")
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
