"""ToMe, EViT and DynamicViT against what their authors' public code computed. Skipped without ../shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adaptivit
from tests.support.models import assert_close, shared

LAYOUTS = ("masked", "packed", "gathered")
every = pytest.mark.parametrize("layout", LAYOUTS)


def golden(name: str) -> dict[str, Any]:
    return torch.load(shared(f"golden/{name}.pt"), weights_only=True)


def model_of(data: dict[str, Any], policy: str, **settings: Any) -> Any:
    model = adaptivit.create(dict(data["kwargs"]), policy, **settings)
    model.vit.load_state_dict({k: v for k, v in data["state_dict"].items() if "score_predictor" not in k})
    return model


def slots_after(out: Any, layer: int) -> Tensor:
    """[B, N] bool: tokens that went through the MLP of a block."""
    return out.trace.updated[layer]


@every
@torch.no_grad()
def test_tome_is_the_public_code(layout: str) -> None:
    data = golden("tome")
    assert len(data["cases"]) >= 4
    for case in data["cases"].values():
        out = model_of(data, "tome", r=case["r"])(data["input"], layout=layout)
        assert_close(out.logits, case["logits"], 1e-5)
        assert out.trace.live_mlp.T.tolist() == [case["tokens_after_block"]] * len(data["input"])
        if case["size"] is None:
            continue
        # the authors' `source` [B, n, N]: which of the first tokens each one left holds; ours from the decisions
        holder = torch.arange(out.trace.updated.shape[2]).repeat(len(data["input"]), 1)
        for step in out.trace.steps:
            if isinstance(step.decision, adaptivit.Merge):
                holder = step.decision.target.gather(1, holder)
        for b, source in enumerate(case["source"]):
            ours = {frozenset((holder[b] == j).nonzero()[:, 0].tolist()) for j in holder[b].unique()}
            assert ours == {frozenset(row.nonzero()[:, 0].tolist()) for row in source}
            sizes = sorted(len(group) for group in ours)
            assert sizes == sorted(int(s) for s in case["size"][b].flatten())


@every
@pytest.mark.parametrize("fuse", [True, False])
@torch.no_grad()
def test_evit_is_the_public_code(layout: str, fuse: bool) -> None:
    data = golden("evit")
    case = data["cases"][f"fuse_{fuse}"]
    out = model_of(data, "evit", keep=0.7, blocks=(3, 6, 9), fuse=fuse)(data["input"], layout=layout)
    assert_close(out.logits, case["logits"], 1e-5)
    assert out.trace.live_mlp.sub(1).T.tolist() == [case["left_tokens"]] * len(data["input"])
    # who is kept at the first stage: `idxs` are patches, class token left out, before anything has moved
    first = next(i for i in case["idxs"] if i is not None)
    kept = slots_after(out, 3)
    for b, row in enumerate(first):
        patches = set((row + 1).tolist())
        assert patches <= set(kept[b].nonzero()[:, 0].tolist())


@every
@torch.no_grad()
def test_dynamicvit_is_the_public_code(layout: str, tmp_path: Path) -> None:
    """Loaded from a file as the authors publish it: timm's keys and score_predictor.* in one state dict."""
    data = golden("dynamicvit")
    torch.save({"model": data["state_dict"]}, tmp_path / "public.pth")
    model = adaptivit.create(dict(data["kwargs"]), "dynamicvit", weights=tmp_path / "public.pth", keep=0.7)
    out = model(data["input"], layout=layout)
    assert_close(out.logits, data["logits"], 1e-5)
    batch = len(data["input"])
    order = torch.arange(1, out.trace.attended.shape[2]).repeat(batch, 1)  # slots in the authors' order
    for stage, (scores, kept) in enumerate(zip(data["scores"], data["kept"], strict=True)):
        ours = out.trace.fact("scores")[stage].gather(1, order)
        assert_close(ours, scores[..., 0], 1e-6)
        order = order.gather(1, kept[:, 1:] - 1)
        present = out.trace.attended[(3, 6, 9)[stage]]
        for b in range(batch):
            assert set(order[b].tolist()) | {0} == set(present[b].nonzero()[:, 0].tolist())
    assert out.trace.live.sub(1)[[3, 6, 9]].T.tolist() == [[137, 96, 67]] * batch
