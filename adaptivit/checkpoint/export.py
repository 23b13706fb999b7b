"""Export: the forward pass as one graph, ONNX or torch.export's, for any number of images.

The loop of forward.py runs on one of three layouts; a file is written only if it answers as the model does. Shapes: B
images, N slots, C outputs. Input `images` [B, 3, H, W]; outputs `logits` [B, C] and `depth` [B, N], how many blocks
computed each token.
"""

from __future__ import annotations

import copy
import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..budget.control import RunSetting
from ..errors import UserError, first_line, unknown
from ..execution.torch import Executor
from ..forward import forward
from ..layouts import Gathered, Layout, Masked
from ..layouts.padded import Padded
from ..model import AdaptiveViT
from ..policies import spec
from ..utils.atomic_io import write_bytes
from .model_card import SAMPLES, pictures_for

LAYOUTS: dict[str, type[Layout]] = {"masked": Masked, "topk": Gathered, "ragged": Padded}
Run = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Exported:
    """The file, and how far it is from the model on the images that it was compared on."""

    path: str
    kind: str
    size: int  # bytes
    images: int
    difference: float  # largest, of a logit
    flipped: float  # share of tokens whose depth differs


class Program(nn.Module):
    """What is exported: images in, logits and depths out, at the model's budget and within its max_macs."""

    def __init__(self, model: AdaptiveViT, kind: str) -> None:
        super().__init__()
        self.model, self.layout = model, LAYOUTS[kind]
        one = torch.zeros(1, model.backbone.in_chans, *model.backbone.image_size)
        (turn,) = model.budget_state.settings(one)
        self.policy = turn.policy
        self.shift, self.limit = (None if t is None else float(t) for t in (turn.shift, turn.limit))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        model, count = self.model, images.shape[0]
        shift = None if self.shift is None else torch.full((count,), self.shift)
        limit = None if self.limit is None else torch.full((count,), self.limit, dtype=torch.float64)
        setting = RunSetting(self.policy, shift, limit)
        output = forward(Executor(model.backbone), self.layout, images, setting)
        return output.logits, output.trace.depth


def export(
    model: AdaptiveViT,
    path: str | Path,
    *,
    format: str = "onnx",
    kind: str = "auto",
    images: Tensor | None = None,
    tolerance: float = 1e-3,
) -> Exported:
    """Write the model to `path` in float32, if the file gives the model's logits on `images` [B, C, H, W].

    format: "onnx" or "pt2". kind: "masked" computes every token and hides those that left, "topk" keeps as many rows of
    every image, "ragged" crops the batch to its longest image, "auto" is the one with the fewest tokens.
    """
    if format not in ("onnx", "pt2"):
        raise unknown("format", format, ("onnx", "pt2"))
    kind, onnx = choose(model, kind), format == "onnx"
    for name in ("onnx", "onnxscript", "onnxruntime") if onnx else ():
        try:
            importlib.import_module(name)
        except ImportError:
            raise UserError(f"ONNX export needs {name}: pip install 'adaptivit[export]'.") from None
    model = copy.deepcopy(model).to("cpu", torch.float32).eval().requires_grad_(False)
    images = sample(model) if images is None else images.to("cpu", torch.float32)
    with torch.no_grad(), _quiet():
        try:
            data = (_as_onnx if onnx else _as_pt2)(_traced(Program(model, kind)), about(model, kind))
        except Exception as error:  # of the exporters: anything
            raise UserError(
                f"{model.policy_name} could not be exported as {format}, {kind} ({first_line(error)}); "
                f"nothing was written. Try {'--kind masked' if kind != 'masked' else '--format pt2'}."
            ) from error
        try:
            run = (run_onnx if onnx else run_pt2)(data)
        except Exception as error:  # of the runtimes: anything
            raise UserError(
                f"The exported file cannot be loaded ({first_line(error)}); nothing was written."
            ) from error
        difference, flipped = compare(model, run, images, tolerance)
    write_bytes(path, data)
    return Exported(str(path), kind, len(data), len(images), difference, flipped)


def choose(model: AdaptiveViT, kind: str) -> str:
    """The kind of graph for a policy; `auto` is the one that computes the fewest tokens."""
    if kind not in (*LAYOUTS, "auto"):
        raise unknown("kind", kind, (*LAYOUTS, "auto"))
    if model.policy_name == "replay":
        raise UserError("A replay belongs to one batch and cannot be exported.")
    equal = model.policy.traits.fixed_counts
    best = "topk" if equal else "ragged"
    if kind in ("auto", "masked", best):
        return best if kind == "auto" else kind
    why = "keeps as many tokens in every image" if equal else "keeps more tokens of some images than others"
    raise UserError(f"kind: {model.policy_name} {why}: expected {best} or masked, got {kind}.")


def _traced(program: Program) -> Any:
    """torch.export's graph, for any number of images."""
    backbone = program.model.backbone
    example = torch.randn(3, backbone.in_chans, *backbone.image_size, generator=torch.Generator().manual_seed(0))
    batch = torch.export.Dim("batch", min=1, max=65536)
    return torch.export.export(program, (example,), dynamic_shapes={"images": {0: batch}}, strict=False)


def _as_pt2(program: Any, about: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"adaptivit.json": json.dumps(about)})
    return buffer.getvalue()


def _as_onnx(program: Any, about: dict[str, Any]) -> bytes:
    names: Any = {"input_names": ["images"], "output_names": ["logits", "depth"]}
    table: dict[Any, Any] = {torch.ops.aten.sort.stable: _sort}
    made: Any = torch.onnx.export(program, dynamo=True, verbose=False, custom_translation_table=table, **names)
    proto = made.model_proto  # made anew whenever it is asked for
    for name, value in about.items():
        proto.metadata_props.add(key=name, value=value if isinstance(value, str) else json.dumps(value))
    return bytes(proto.SerializeToString())


def _sort(self: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    """ONNX has no stable sort, but its TopK takes the lower index of equals first, which is one."""
    from onnxscript import opset18 as op

    size = op.Shape(self, start=-1) if dim == -1 else op.Shape(self, start=dim, end=dim + 1)
    return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)


def about(model: AdaptiveViT, kind: str) -> dict[str, Any]:
    """What a server needs beside the graph; it goes into the file."""
    return {
        "adaptivit": __version__,
        "policy": spec.spec(model.policy_name, model.policy.settings),
        "kind": kind,
        "budget": model.budget or "none",
        "max_macs": model.max_macs or "none",
        "preprocessing": model.preprocessing.to_config(),
        "task": model.task,
        "class_names": model.class_names,
    }


def run_onnx(data: bytes, threads: int = 0) -> Run:
    """The file in onnxruntime on a CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        logits, depth = session.run(None, {"images": images.numpy()})
        return torch.from_numpy(logits), torch.from_numpy(depth)

    return run


def run_pt2(data: bytes) -> Run:
    """The file, loaded again."""
    module: Run = torch.export.load(io.BytesIO(data)).module()
    return module


def compare(model: AdaptiveViT, run: Run, images: Tensor, tolerance: float) -> tuple[float, float]:
    """The largest difference of a logit and the share of tokens of another depth: for all images at once, and for the
    first two one by one, since the number of images is free."""
    worst, flipped = 0.0, 0.0
    for batch in filter(len, (images, images[:1], images[1:2])):
        expected = model(batch, layout="masked")
        try:
            logits, depth = run(batch)
        except Exception as error:  # of the runtimes: anything
            raise UserError(
                f"The exported file does not run with {len(batch)} images ({first_line(error)})."
            ) from error
        if logits.shape != expected.logits.shape or not bool(logits.isfinite().all()):
            raise UserError(f"The exported file gives no finite logits of {list(expected.logits.shape)}.")
        allowed = tolerance * max(1.0, float(expected.logits.abs().max()))
        difference = float((logits - expected.logits).abs().max())
        flipped = max(flipped, float((depth != expected.trace.depth).double().mean()))
        worst = max(worst, difference)
        if not difference <= allowed:  # nor is it where the model's own answer is not finite
            raise UserError(
                f"The exported file differs from the model by {difference:.3g} in a logit (allowed: {allowed:.3g}), "
                f"and in the depth of {100 * flipped:.2f} % of the tokens; nothing was written."
            )
    return worst, flipped


def sample(model: AdaptiveViT) -> Tensor:
    """scikit-learn's two photos if the model reads pictures, and two images of noise."""
    shape = (2, model.backbone.in_chans, *model.backbone.image_size)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return torch.cat([pictures_for(model, SAMPLES), noise]) if model.backbone.in_chans in (1, 3) else noise


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' own messages."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
