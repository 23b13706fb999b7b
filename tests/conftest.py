"""What the proofs share: tiny models with weights wild enough to make tokens differ, and how two runs are compared."""

from __future__ import annotations

import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor, nn

import adaptivit
from adaptivit.decision import AppliedDecision, Decision, Drop, Keep, Merge, Skip, Trace, When
from adaptivit.evaluation.evaluate import Result
from adaptivit.experiments.sweep import report, run
from adaptivit.output import Output
from adaptivit.training.config import TrainConfig

# Where Python is told to keep no bytecode, each of the many processes that tests start would compile torch again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

torch.set_num_threads(1)  # tensors are so small that a second thread only waits
settings.register_profile(
    "proofs",
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
settings.load_profile("proofs")

SHARED = Path(__file__).parents[2] / "shared"
LAYOUTS = ("masked", "packed")
ALL_LAYOUTS = (*LAYOUTS, "gathered")  # where every image keeps as many tokens
TINY: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 6,
    "num_heads": 3,
    "num_classes": 10,
}
# Every way a supported backbone can differ from a plain DeiT, as arguments of timm's VisionTransformer.
BACKBONES: dict[str, dict[str, Any]] = {
    "class": {},
    "deit3": {"no_embed_class": True, "init_values": 1e-1},
    "registers": {"reg_tokens": 4, "no_embed_class": True, "init_values": 1e-1},
    "average": {"class_token": False, "global_pool": "avg", "fc_norm": True},
    "average_with_class": {"global_pool": "avg", "fc_norm": False},
    "average_prefix": {"global_pool": "avg", "reg_tokens": 2, "pool_include_prefix": True},
    "max": {"class_token": False, "global_pool": "max"},
    "distilled": {"distilled": True},
    "qk_norm": {"qk_norm": True},
    "scale_norms": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "pre_norm": {"pre_norm": True},
    "no_bias": {"qkv_bias": False, "proj_bias": False},
    "map": {"class_token": False, "global_pool": "map"},
    "map_with_class": {"global_pool": "map"},
    "map_prefix": {"global_pool": "map", "reg_tokens": 2, "pool_include_prefix": True},
    "no_position": {"pos_embed": "none"},
    "no_classifier": {"num_classes": 0},
}
SIDES = ("class", "distilled", "registers", "average")  # where the head reads: one slot, two, one of five, all


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no worker ends with it; xdist itself puts groups before all else."""
    items.sort(key=lambda item: item.path.stem != "test_interpreter")


def shared(name: str) -> Path:
    """A file of ../shared, or a skip that says so: the proofs must run in a bare checkout."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {path}, which is not here")
    return path


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 0) -> None:
    """Weights of ordinary size: timm's own start is so small that all tokens would behave alike."""
    g = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        if name.endswith("gamma") or (p.ndim == 1 and "norm" in name and name.endswith("weight")):
            p.copy_(1 + 0.2 * noise)
        elif p.ndim >= 2 and name.endswith("weight"):
            p.copy_(noise / p[0].numel() ** 0.5)
        else:
            p.copy_(0.3 * noise)


def tiny(policy: str = "static", kind: str = "class", *, seed: int = 0, more: Any = None, **given: Any) -> Any:
    """A tiny model of a kind of backbone; a policy's gate keeps its settings, its planners get random weights."""
    model = adaptivit.create(TINY | BACKBONES[kind] | (more or {}), policy, **given)
    randomise(model.vit, seed)
    if hasattr(model.policy, "planners"):
        randomise(model.policy.planners, seed + 1)
    return model


def pictures(batch: int = 3, size: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_same_run(a: Output, b: Output, tolerance: float = 1e-5) -> None:
    """Two runs of the same model computed the same tokens at the same cost and say the same."""
    assert torch.equal(a.trace.attended, b.trace.attended), "other tokens in attention"
    assert torch.equal(a.trace.updated, b.trace.updated), "other tokens in an MLP"
    for part in a.parts:
        assert torch.equal(a.parts[part], b.parts[part]), f"other cost: {part}"
    assert a.logits.isfinite().all()
    assert_close(a.logits, b.logits, tolerance)
    assert_close(a.features, b.features, tolerance)


# -- random sequences of answers, for replay ------------------------------------------------------------------------
KINDS = ("none", "keep", "share", "drop", "drop_zeroed", "drop_all", "drop_weight", "skip", "gate", "skip_all")
KINDS = (*KINDS, "merge", "merge_nowhere", "merge_unsized")


def merging(seed: int, live: Tensor, *, equal: bool = False, nowhere: bool = False, sized: bool = True) -> Merge:
    """Random tokens fold into other live ones, or into nobody; with `equal` as many in every image."""
    g = torch.Generator().manual_seed(seed)
    into = torch.arange(live.shape[1]).repeat(len(live), 1)
    for b, alive in enumerate(live):
        slots = alive.nonzero()[torch.randperm(int(alive.sum()), generator=g), 0].tolist()
        stay = slots[: math.ceil(len(slots) / 2)]
        for n, i in enumerate(slots[len(stay) :]):
            if n % 3 < 2 if equal else torch.rand((), generator=g) < 0.7:
                lost = nowhere and torch.rand((), generator=g) < 0.5
                into[b, i] = -1 if lost else stay[int(torch.randint(len(stay), (), generator=g))]
    size = 0.5 + 2 * torch.rand(live.shape, generator=g)
    return Merge(into, 0.2 + torch.rand(live.shape, generator=g), size if sized else None)


def choice(live: Tensor, share: float, g: torch.Generator) -> Tensor:
    """[B, N] bool: a share of the live tokens, as many in every image, which has as many of them."""
    order = torch.rand(live.shape, generator=g).masked_fill(~live, 2.0).argsort(-1).argsort(-1)
    return order < round(share * int(live[0].sum()))


def random_trace(
    kinds: list[str], seed: int, images: int = 3, slots: int = 17, prefix: int = 1, equal: bool = False
) -> Trace:
    """Answers to 3 questions a layer; Drop and Merge wait while tokens sit out, Skip is only said before a block.

    With `equal` all images drop, skip and merge equally many tokens, though other ones.
    """
    g = torch.Generator().manual_seed(seed)
    live, skipping, steps = torch.ones(images, slots, dtype=torch.bool), False, []

    def rand() -> Tensor:
        return torch.rand(images, slots, generator=g)

    def some(share: float) -> Tensor:
        return choice(live, share, g) if equal else rand() < share

    for position, kind in enumerate(kinds):
        layer, when = position // 3, get_args(When)[position % 3]
        skipping = skipping and when == "between"
        share = rand() if kind == "share" or rand()[0, 0] < 0.15 else None
        told = equal and bool(rand()[0, 0] < 0.5)  # say the count beforehand, or let the layout look
        decision: Decision = Keep(share)
        if kind in ("skip", "gate", "skip_all") and when == "before":
            sitting = some(1.0 if kind == "skip_all" else 0.5)
            count = int((live & ~sitting)[0].sum()) if told else None
            decision, skipping = (
                Skip(sitting, 2 * rand() if kind == "gate" else None, readout_weight=share, tokens_left=count),
                True,
            )
        elif "drop" in kind and not skipping:
            whole = rand()[:, :1] < 0.6
            leaving = some(0.3) if kind != "drop_all" else whole[:1].expand_as(live) if equal else whole.expand_as(live)
            live = live & ~leaving
            weight = live.float() if kind == "drop_weight" else None
            count = int(live[0].sum()) if told else None
            decision = Drop(
                leaving, key_weight=weight, zero_on_exit=kind == "drop_zeroed", readout_weight=share, tokens_left=count
            )
        elif "merge" in kind and not skipping:
            nowhere, sized = kind == "merge_nowhere", kind != "merge_unsized"
            m = merging(seed + position, live, equal=equal, nowhere=nowhere, sized=sized)
            live = live & (m.target == torch.arange(slots))
            decision = replace(m, readout_weight=share, tokens_left=int(live[0].sum()) if told else None)
        if kind != "none":
            steps.append(AppliedDecision(layer, when, decision))
    shape = torch.zeros(len(kinds) // 3, images, slots, dtype=torch.bool)
    return Trace(shape, shape, prefix, tuple(steps))


def literal_forward(vit: Any, trace: Trace, images: Tensor) -> tuple[Tensor, Tensor]:
    """The loop without any layout: every image a dictionary of tokens. Returns the readout and who attended."""
    answer = {(s.layer, s.when): s.decision for s in trace.steps}
    everything = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    readouts, computed = [], torch.zeros(len(vit.blocks), *everything.shape[:2], dtype=torch.bool)
    for b, x in enumerate(everything):
        value, weight, shares = dict(enumerate(x)), dict.fromkeys(range(len(x)), 1.0), None
        for layer, block in enumerate(vit.blocks):
            here, gate, start = list(weight), None, dict(value)
            for when in ("before", "between", "after"):
                if when == "after":
                    for i in here if gate is not None else ():
                        value[i] = start[i] + gate[b, i] * (value[i] - start[i])
                    here = list(weight)
                said = answer.get((layer, when), Keep())
                if said.readout_weight is not None:
                    part = torch.stack([said.readout_weight[b, i] * value[i] for i in value])
                    shares = part if shares is None else shares + part
                if isinstance(said, Skip):
                    here, gate = [i for i in here if not said.skipped[b, i]], said.gate
                elif isinstance(said, Drop):
                    for i in [i for i in here if said.leaving[b, i]]:
                        value[i] = torch.zeros_like(value[i]) if said.zero_on_exit else value[i]
                        del weight[i]
                    here = list(weight)
                elif isinstance(said, Merge):
                    size = weight if said.size is None else said.size[b]
                    old, weight = dict(value), {j: float(size[j]) for j in here if said.target[b, j] == j}
                    for j in weight:
                        value[j] = torch.stack(
                            [said.source_weight[b, i] * old[i] for i in here if said.target[b, i] == j]
                        ).sum(0)
                    here = list(weight)
                if when == "after" or not here:
                    continue
                rows = torch.stack([value[i] for i in here])
                if when == "before":
                    computed[layer, b, here] = True
                    q, k, v = block.attn.qkv(block.norm1(rows)).reshape(len(here), 3, 3, 8).permute(1, 2, 0, 3)
                    a = (q @ k.mT / 8**0.5 + torch.tensor([weight[i] for i in here]).log()).softmax(-1)
                    rows = rows + block.ls1(block.attn.proj((a @ v).transpose(0, 1).flatten(1)))
                else:
                    rows = rows + block.ls2(block.mlp(block.norm2(rows)))
                value |= dict(zip(here, rows, strict=True))
        readouts.append(torch.stack([value[i] for i in range(len(x))]) if shares is None else shares)
    return torch.stack(readouts), computed


# -- trials of a sweep that only say that they ran ------------------------------------------------------------------
def result(top1: float, share: float) -> Result:
    figures: dict[str, Any] = {"gmacs": 2 * share, "gmacs_blocks": 2 * share, "gmacs_static": 2.0, "mean_depth": 6.0}
    return Result(10, 0, top1, 100.0, live=[5.0], live_mlp=[5.0], layout="masked", images_per_second=1.0, **figures)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Trials that only say that they ran: the higher lr, the better and the dearer."""
    ran: list[TrainConfig] = []

    def trial(config: TrainConfig, show: bool = True) -> Result:
        ran.append(config)
        return result(50 + 1e4 * config.lr - config.ponder, 0.5 + 400 * config.lr)

    monkeypatch.setattr(run, "run_trial", trial)
    monkeypatch.setattr(run, "_check", lambda *_: None)
    monkeypatch.setattr(report, "draw", lambda *_: None)
    return ran


@pytest.fixture(scope="module")
def browser() -> Any:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright (a development dependency)")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    with api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()
