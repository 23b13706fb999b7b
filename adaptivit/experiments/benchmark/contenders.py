"""The contenders of a benchmark: timm's model as it is, compiled, the best static one, and ours on every layout.

Shapes: B images of C x H x W pixels, D width. All contenders of one configuration share the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ...budget.control import RunSetting
from ...decision import Trace, detached
from ...evaluation import halting_profiles
from ...execution.torch import Executor
from ...factory import create, load
from ...forward import forward
from ...layouts.padded import Padded
from ...model import AdaptiveViT
from ...output import Output
from ...policies import spec as settings
from .config import GRAPH, BenchmarkConfig

TIMM, COMPILED, BEST, OWN = "timm", "timm compiled", "best static", "ours, nothing halted"
BASELINES = (TIMM, COMPILED, BEST, OWN)
_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # modes in which torch.compile records CUDA graphs itself

Call = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Contender:
    """Something to time: `call` takes the batch [B, C, H, W] and returns logits [B, classes] or an Output."""

    call: Call
    model: AdaptiveViT  # whose weights run
    recording: Call | None = None  # the same with all decisions in its trace, where `call` leaves them out
    adaptive: bool = True  # checked against a masked replay of its decisions; else against timm's model
    layout: str = ""  # where the output does not say it
    static_mode: str = ""
    graph: bool = False  # holds the memory of a CUDA graph
    plan: str = ""  # what was captured


@dataclass(frozen=True)
class Entry:
    """A row to come. Of several candidates the fastest is taken."""

    name: str
    makes: tuple[Callable[[], Contender], ...]
    policy: str = ""
    layout: str = ""

    @property
    def label(self) -> str:
        """Unique among the contenders of a configuration."""
        return self.name if self.name in BASELINES else f"{self.name} ({self.layout})"


@dataclass(frozen=True)
class Setting:
    """One configuration: the static model and the images on their device, in their dtype."""

    backbone: str
    dtype: str
    images: Tensor  # [B, C, H, W]
    base: AdaptiveViT
    traces: dict[str, Trace]  # of every profile, on the device
    models: Mapping[str, AdaptiveViT] = field(default_factory=dict)  # more contenders, by name
    references: dict[int, Any] = field(default_factory=dict)  # float32 copies of backbones

    @property
    def batch(self) -> int:
        return len(self.images)

    def in_float(self, vit: Any) -> Any:
        """The backbone with its weights as they are, in float32."""
        if next(vit.parameters()).dtype == torch.float32:
            return vit
        if id(vit) not in self.references:
            self.references[id(vit)] = copy.deepcopy(vit).float()
        return self.references[id(vit)]


def entries(config: BenchmarkConfig, at: Setting) -> list[Entry]:
    """Every contender of a configuration: the static baselines first."""
    device, vit, compiled = at.images.device.type, at.base.vit, not config.skip_compiled
    own, mode = ("captured", "reduce-overhead") if device == "cuda" else ("packed", "default")
    layouts, best = config.layouts_on(device), with_product(vit)

    def on_layouts(name: str, policy: str, make: Callable[[], AdaptiveViT], trace: Trace | None = None) -> list[Entry]:
        return [Entry(name, (partial(_on_layout, at, x, compiled, make, trace),), policy, x) for x in layouts]

    found = [Entry(TIMM, (partial(Contender, vit, at.base, adaptive=False),))]
    if compiled:
        found.append(Entry(COMPILED, (partial(_static, at, mode, vit),)))
    found.append(Entry(BEST, tuple(partial(_static, at, mode, best) for mode in config.modes_on(device))))
    found.append(Entry(OWN, (partial(_on_layout, at, own, compiled, partial(_nothing_left, at)),), "static", own))
    for spec in dict.fromkeys(config.policies):
        found += on_layouts(spec, spec, partial(_model, config, at, spec))
    for profile, trace in at.traces.items():
        name = "replay " + (Path(profile).stem if profile.startswith(halting_profiles.REPLAY) else profile)
        found += on_layouts(name, "replay", partial(_replaying, at, trace), trace)
    for name, model in at.models.items():
        spec = settings.spec(model.policy_name, model.policy.settings)
        found += on_layouts(name, spec, partial(_itself, model))
    return found


def checkpoint_for(config: BenchmarkConfig, base: AdaptiveViT) -> AdaptiveViT | None:
    """The model of --checkpoint, where this is the backbone that it holds."""
    if config.checkpoint is None:
        return None
    model = load(config.checkpoint)
    here, there = (replace(m.shape, classes=0, num_classifiers=0) for m in (model, base))
    return model if here == there else None


def _itself(model: AdaptiveViT) -> AdaptiveViT:
    return model


def _model(config: BenchmarkConfig, at: Setting, spec: str) -> AdaptiveViT:
    """A policy on the common weights."""
    policy, values = settings.parse(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.weights is None:
            model = create(at.base.vit, policy, **values)
        else:  # which may hold the policy's own parameters
            model = create(at.backbone, policy, weights=config.weights, img_size=config.img_size, **values)
            if model.shape == at.base.shape:
                model.vit = at.base.vit
    return model.to(at.images.device, at.images.dtype).eval()


def _nothing_left(at: Setting) -> AdaptiveViT:
    """Ours with every token everywhere: in the last MLP too, whose patches no head reads."""
    model = AdaptiveViT(at.base.vit, "static", {}).eval()
    model.full_last_mlp = True
    return model


def _replaying(at: Setting, trace: Trace) -> AdaptiveViT:
    return AdaptiveViT(at.base.vit, "replay", {"trace": trace}).eval()


def _on_layout(
    at: Setting, layout: str, compiled: bool, make: Callable[[], AdaptiveViT], trace: Trace | None = None
) -> Contender:
    """The model on a layout; `captured` as a CUDA graph for the trace's profile or that of the batch."""
    model = make()
    if layout == "padded":
        return Contender(partial(_padded, model), model)
    if layout != "captured":
        return Contender(partial(model, layout=layout), model)
    captured = model.capture(at.batch, profile=at.images if trace is None else trace, compile=compiled)
    return Contender(captured, model, captured.record, layout="captured", graph=True, plan=captured.explain())


def _padded(model: AdaptiveViT, images: Tensor) -> Output:
    """A pass on a rectangle as wide as the longest image, with a key mask: halting without ragged kernels."""
    return forward(Executor(model.backbone), Padded, images, RunSetting(model.policy))


# -- static baselines -----------------------------------------------------------------------------------------------
class Product(nn.Module):
    """timm's patch embedding as one matrix product: [B, C, H, W] -> [B, patches, D]."""

    def __init__(self, embed: Any) -> None:
        super().__init__()
        self.proj, self.norm = embed.proj, embed.norm

    def forward(self, images: Tensor) -> Tensor:
        high, wide = self.proj.kernel_size
        batch, channels, height, width = images.shape
        x = images.reshape(batch, channels, height // high, high, width // wide, wide)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * high * wide)
        return self.norm(F.linear(x, self.proj.weight.flatten(1), self.proj.bias))


def with_product(vit: Any) -> Any:
    """The same model and weights with its patch convolution as a product; itself where that is no plain one."""
    if not isinstance(vit, VisionTransformer):
        return vit
    embed: Any = vit.patch_embed
    conv = embed.proj
    plain = conv.kernel_size == conv.stride and conv.padding in (0, (0, 0)) and conv.groups == 1
    if not plain or conv.dilation not in (1, (1, 1)) or vit.dynamic_img_size or not embed.flatten:
        return vit
    twin = copy.copy(vit)
    twin._modules = dict(vit._modules) | {"patch_embed": Product(embed)}
    return twin


def _static(at: Setting, mode: str, vit: Any) -> Contender:
    """A static model run in one of the modes of --static-modes."""
    kind = mode.removesuffix(GRAPH)
    call: Call = vit
    if kind != "eager":
        compiled: Any = torch.compile(vit, mode=None if kind == "default" else kind, dynamic=False)
        call = compiled
    own = kind in _GRAPH_MODES and at.images.is_cuda
    if own:
        call = partial(_new_step, call)
    if mode.endswith(GRAPH):
        call = graphed(call, at.images)
    return Contender(call, at.base, adaptive=False, static_mode=mode, graph=own or mode.endswith(GRAPH))


def _new_step(call: Call, images: Tensor) -> Any:
    torch.compiler.cudagraph_mark_step_begin()  # outputs of earlier graphs may be overwritten
    return call(images)


@torch.inference_mode()
def graphed(call: Call, images: Tensor) -> Call:
    """The call as one CUDA graph. Copying the batch to where the graph reads it is part of every call."""
    batch = images.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(batch)

    def replayed(images: Tensor) -> Any:
        batch.copy_(images)
        graph.replay()
        return out

    return replayed


# -- profiles -------------------------------------------------------------------------------------------------------
def _on_device(trace: Trace, device: torch.device) -> Trace:
    steps = tuple(replace(step, decision=detached(step.decision, device)) for step in trace.steps)
    return replace(trace, attended=trace.attended.to(device), updated=trace.updated.to(device), steps=steps)


def traces_for(config: BenchmarkConfig, base: AdaptiveViT, batch: int, device: torch.device) -> dict[str, Trace]:
    """The trace of every profile for this batch size, on the device, so that replaying it copies nothing."""
    shape = base.shape
    sizes = {"layers": shape.layers, "tokens": shape.tokens, "prefix": shape.num_prefix_tokens, "batch": batch}
    return {
        name: _on_device(halting_profiles.trace_of(name, seed=config.seed, **sizes), device)
        for name in dict.fromkeys(config.profile)
    }
