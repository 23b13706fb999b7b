"""The settings of a benchmark. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...errors import UserError, unknown
from ...evaluation import halting_profiles
from ...policies import spec
from ...utils.coerce import at_least, check_size, require
from ...utils.settings import command

DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("auto", "masked", "packed", "gathered", "captured", "padded")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
GRAPH = "+graph"  # after a mode: captured as a CUDA graph by us


@dataclass(frozen=True)
class BenchmarkConfig:
    """Throughput and latency of any policies, layouts, batch sizes, dtypes and backbones, next to static baselines.

    Example: adaptivit benchmark --backbones deit_tiny_patch16_224 --policies tome:r=13 --batch-sizes 1 16 --profile 65.
    Without any file, and quick: --backbones digits_vit --skip-compiled --profile halting.
    """

    backbones: tuple[str, ...] = ("deit_tiny_patch16_224",)
    """timm names of VisionTransformers; `digits_vit` for the small one of the quickstart."""
    policies: tuple[str, ...] = ()
    """Policies and settings, e.g. tome:r=13 aht:threshold=0.9 (listed below), each on every one of --layouts."""
    profile: tuple[str, ...] = ()
    """Replay how many tokens live in each block, where there are no trained weights: none, 90, 65, 50, halting, or
    replay:FILE with a trace saved by adaptivit.save_trace."""
    layouts: tuple[str, ...] = ()
    """auto, masked, packed, gathered, captured (CUDA), padded (to the longest image). Default: captured on a GPU,
    auto on a CPU."""
    batch_sizes: tuple[int, ...] = (1, 16)
    """Images in a batch."""
    dtypes: tuple[str, ...] = ("auto",)
    """float32, bfloat16, float16 of weights and images; auto: bfloat16 on a GPU, float32 on a CPU."""
    img_size: int | None = None
    """Image size in pixels; default: the backbone's."""
    weights: str | None = None
    """Weights of all contenders: .safetensors or .pth in timm's keys, or a checkpoint directory of ours. Default:
    random ones from --seed."""
    checkpoint: str | None = None
    """Directory of a run of `train`, or saved by save_pretrained: one contender more, beside the backbone that it
    holds."""
    data: str | None = None
    """Data to take the batch from, as for train; default: random images from --seed."""

    static_modes: tuple[str, ...] = ()
    """How the best static model may run; the fastest is taken. eager, or a mode of torch.compile, with +graph behind it
    for a CUDA graph of ours. Default: default+graph max-autotune-no-cudagraphs+graph reduce-overhead on a GPU, eager
    default on a CPU."""
    skip_compiled: bool = False
    """Leave torch.compile out, which takes long to compile: the static baselines are then eager."""
    repeats: int = 20
    """Turns in which every contender is measured once."""
    warm_up: int = 3
    """Turns before them that do not count."""
    inner: int | None = None
    """Calls in one measurement; default: so many that it lasts 2 ms."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    threads: int | None = None
    """CPU threads of torch; default: as many as torch takes."""
    seed: int = 0
    """Of random weights, random images and drawn profiles."""
    out: str = "runs/benchmark"
    """Where the results go: rows are added to benchmark.csv, table and charts are those of the last run."""
    plot: bool = False
    """Also draw speed against MACs, with the line of perfect scaling."""

    def __post_init__(self) -> None:
        for name in ("backbones", "batch_sizes", "dtypes"):
            require(bool(getattr(self, name)), name, "at least one value", getattr(self, name))
        _known("dtype", self.dtypes, ("auto", *DTYPES))
        _known("layout", self.layouts, LAYOUTS)
        _known("static mode", [mode.removesuffix(GRAPH) for mode in self.static_modes], ("eager", *COMPILE_MODES))
        check_size(self.img_size)
        least = {"repeats": 1, "inner": 1, "threads": 1, "warm_up": 0, "seed": 0}
        values = [("batch_sizes", size, 1) for size in self.batch_sizes]
        for name, value, low in [*values, *((name, getattr(self, name), low) for name, low in least.items())]:
            at_least(name, low if value is None else value, low)
        if any(spec.parse(policy)[0] == "replay" for policy in self.policies):
            raise UserError("policies: a trace is replayed by --profile replay:FILE, not by a policy.")
        for profile in self.profile:
            halting_profiles.check(profile)
        if self.weights is not None and len(self.backbones) > 1:
            raise UserError(f"weights: one file fits one backbone, got {len(self.backbones)} backbones.")

    def layouts_on(self, device: str) -> tuple[str, ...]:
        """The layouts that are run on a `cpu` or `cuda` device."""
        chosen = self.layouts or (("captured",) if device == "cuda" else ("auto",))
        if "captured" in chosen and device != "cuda":
            raise UserError("layouts: captured records a CUDA graph and needs a GPU; use packed or auto on a CPU.")
        return tuple(dict.fromkeys(chosen))

    def modes_on(self, device: str) -> tuple[str, ...]:
        """The ways to run the best static model that are tried."""
        usual: tuple[str, ...] = ("eager", "default")
        if device == "cuda":
            usual = ("default+graph", "max-autotune-no-cudagraphs+graph", "reduce-overhead")
            usual = ("eager+graph",) if self.skip_compiled else usual
        chosen = self.static_modes or usual
        if device != "cuda" and (wrong := [mode for mode in chosen if mode.endswith(GRAPH)]):
            raise UserError(f"static_modes: {wrong[0]} is a CUDA graph and needs a GPU; use eager or default on a CPU.")
        kept = [m for m in chosen if not self.skip_compiled or m.removesuffix(GRAPH) == "eager"]
        if not kept:
            raise UserError(f"static_modes: {' '.join(chosen)} are all compiled, and --skip-compiled leaves those out.")
        return tuple(dict.fromkeys(kept))

    def dtypes_on(self, device: str) -> tuple[str, ...]:
        """The dtypes with `auto` made out."""
        auto = "bfloat16" if device == "cuda" else "float32"
        return tuple(dict.fromkeys(auto if dtype == "auto" else dtype for dtype in self.dtypes))

    def command(self) -> str:
        """The command line that says the same."""
        return command("benchmark", self)


def _known(kind: str, given: Sequence[str], valid: Sequence[str]) -> None:
    for name in given:
        if name not in valid:
            raise unknown(kind, name, valid)
