"""removal=merge of AHT-ViT, A-ViT and DynamicViT: a leaving patch merges into its most similar one, by size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivit.decision import Merge
from tests.support.models import LAYOUTS, assert_close, pictures
from tests.support.policies import PAPERS
from tests.support.reference_vit import (
    attention,
    best,
    embedded,
    logits_of,
    mean,
    most_similar,
    predicted,
    randomised,
    sigmoid,
)


def fold(x: Tensor, size: list[float], keys: Tensor, leaving: list[int], stay: list[int]) -> tuple[Tensor, list[float]]:
    """Rows [n, D]: those of `leaving` join their most similar of the patches in `stay`; row 0 (class) as it is."""
    goes = {i: most_similar(keys, i, stay) for i in leaving} if stay else {}
    rows, sizes = [x[0]], [size[0]]
    for j in stay:
        group = [j, *(i for i in goes if goes[i] == j)]
        rows.append(mean([x[i] for i in group], [size[i] for i in group]))
        sizes.append(sum(size[i] for i in group))
    return torch.stack(rows), sizes


@pytest.mark.parametrize("beta", [-1.5, -0.5, 20.0])
@torch.no_grad()
def test_aht(beta: float) -> None:
    """Patches halt as always, by a cumulative score; at beta = 20 all at once, and they join no other."""
    model = randomised("aht_merge", **PAPERS | {"beta": beta})
    with torch.no_grad():
        model.policy.beta.fill_(beta), model.policy.gamma.fill_(1.0)
    for layout in LAYOUTS:
        out = model(pictures(), layout=layout)
        for b, image in enumerate(pictures()):
            x, size, slots, c = embedded(model.vit, image), [1.0] * 17, list(range(17)), dict.fromkeys(range(17), 0.0)
            for layer, block in enumerate(model.vit.blocks):
                assert out.trace.attended[layer, b].nonzero()[:, 0].tolist() == slots
                x, _, keys = attention(block, x, torch.tensor(size))
                feature = block.mlp.fc1(block.norm2(x))[:, 0]
                x = x + block.ls2(block.mlp(block.norm2(x)))
                if layer == 5:
                    break
                for n, i in enumerate(slots[1:], 1):
                    c[i] += sigmoid(float(feature[n]) + beta)
                stay = [n for n, i in enumerate(slots) if n and c[i] < 0.99]
                leaving = [n for n, i in enumerate(slots) if n and c[i] >= 0.99]
                x, size = fold(x, size, keys, leaving, stay)
                slots = [0, *(slots[n] for n in stay)]
            assert_close(out.logits[b], logits_of(model.vit, x))
    if beta == 20.0:
        assert (out.trace.depth[:, 1:] == 1).all()
        first = out.trace.steps[0].decision
        assert isinstance(first, Merge)
        assert (first.target[:, 1:] == -1).all()


@torch.no_grad()
def test_avit() -> None:
    """Until the class token halts; afterwards the mean field has all it needs."""
    model = randomised("avit", removal="merge", gate_scale=2.0, gate_center=3.0)
    for layout in LAYOUTS:
        out, folded = model(pictures(), layout=layout), 0
        for b, image in enumerate(pictures()):
            x, size, slots, c = embedded(model.vit, image), [1.0] * 17, list(range(17)), dict.fromkeys(range(17), 0.0)
            field = torch.zeros(24)
            for layer, block in enumerate(model.vit.blocks, 1):
                x, _, keys = attention(block, x, torch.tensor(size))
                x = x + block.ls2(block.mlp(block.norm2(x)))
                h = {i: 1.0 if layer == 6 else sigmoid(2.0 * float(x[n, 0]) - 3.0) for n, i in enumerate(slots)}
                done = c[0] + h[0] >= 0.99 or layer == 6
                field = field + (1 - c[0] if done else h[0]) * x[0]
                if done:
                    break
                c = {i: c[i] + h[i] for i in slots}
                stay = [n for n, i in enumerate(slots) if n and c[i] < 0.99]
                leaving = [n for n, i in enumerate(slots) if n and c[i] >= 0.99]
                folded += len(leaving)
                x, size = fold(x, size, keys, leaving, stay)
                slots = [0, *(slots[n] for n in stay)]
            assert_close(out.logits[b], model.vit.head(model.vit.norm(field)))
        assert folded > 5


@pytest.mark.parametrize("keep", [0.7, 0.3])
@torch.no_grad()
def test_dynamicvit(keep: float) -> None:
    """Alike by the keys of the block before the stage."""
    model = randomised("dynamicvit", removal="merge", keep=keep)
    for layout in (*LAYOUTS, "gathered"):
        out = model(pictures(), layout=layout)
        for b, image in enumerate(pictures()):
            x, size, keys, stage = embedded(model.vit, image), [1.0] * 17, torch.empty(0), 0
            for layer, block in enumerate(model.vit.blocks):
                if layer in (1, 3, 4):
                    score = predicted(model.policy.score_predictor[stage], x[1:], torch.ones(len(x) - 1))[:, 0]
                    stage += 1
                    count = max(1, int(keep**stage * 16))
                    stay = sorted(best({n + 1: float(v) for n, v in enumerate(score)}, count))
                    x, size = fold(x, size, keys, [n for n in range(1, len(x)) if n not in stay], stay)
                x, _, keys = attention(block, x, torch.tensor(size))
                x = x + block.ls2(block.mlp(block.norm2(x)))
                assert int(out.trace.live[layer, b]) == len(x)
            assert_close(out.logits[b], logits_of(model.vit, x))


@pytest.mark.parametrize(
    ("policy", "given"),
    [
        ("aht_merge", {"gamma": 2.0, "beta": 0.5}),
        ("avit", {"gate_scale": 2.0, "gate_center": 2.0}),
        ("dynamicvit", {}),
        ("fold", {"keep": 0.7}),
        ("tome", {"r": 4}),
    ],
)
@torch.no_grad()
def test_sizes_are_conserved_by_who_finds_somebody(policy: str, given: dict[str, Any]) -> None:
    """The sizes of the tokens left add up to those that were there, less those that joined no other."""
    model = randomised(policy, **given | ({"removal": "merge"} if policy in ("avit", "dynamicvit") else {}))
    steps = [s.decision for s in model(pictures()).trace.steps if isinstance(s.decision, Merge)]
    assert steps
    size, live = torch.ones(3, 17), torch.ones(3, 17, dtype=torch.bool)
    for step in steps:
        assert step.size is not None
        lost = (size * (live & (step.target < 0))).sum(-1)
        before = (size * live).sum(-1)
        live = live & (step.target == torch.arange(17))
        size = step.size
        assert_close((size * live).sum(-1), before - lost)
        assert (size[live] >= 1).all()
