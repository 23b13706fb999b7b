"""ToMe and fold against loops over the tokens of one image, and what a budget buys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivit.errors import UserError
from adaptivit.policies.tome import schedule
from tests.support.models import ALL_LAYOUTS, assert_close, pictures
from tests.support.reference_vit import (
    attention,
    best,
    cosine,
    embedded,
    logits_of,
    mean,
    mlp,
    most_similar,
    randomised,
)

NEVER = float("-inf")


# -- ToMe -----------------------------------------------------------------------------------------------------------
def tome(
    vit: Any, image: Tensor, r: list[int], prefix: int, prop_attn: bool = True
) -> tuple[Tensor, list[Any], list[int]]:
    """The authors' code as a loop: logits, [(size, first tokens in it)], and rows after each block."""
    x, counts = embedded(vit, image), []
    size, holds = [1.0] * len(x), [[i] for i in range(len(x))]
    for layer, block in enumerate(vit.blocks):
        x, _, keys = attention(block, x, torch.tensor(size) if prop_attn else None)
        count = min(r[layer], (len(x) - prefix) // 2)
        if count > 0:
            a, b = range(0, len(x), 2), range(1, len(x), 2)
            match = {}
            for i in a:
                row = {j: cosine(keys[i], keys[j]) for j in b}
                if prefix == 2:
                    row[1] = NEVER  # the distillation token is the first of B
                j = max(row, key=lambda j: row[j])
                match[i] = (NEVER if prefix and i == 0 else row[j], j)
            order = sorted(a, key=lambda i: -match[i][0])
            gone, stay = order[:count], order[count:]
            stay = sorted(stay) if prefix else stay
            new = {}
            for j in (*stay, *b):
                group = [j, *(i for i in gone if match[i][1] == j)]
                row = mean([x[i] for i in group], [size[i] for i in group])
                new[j] = (row, sum(size[i] for i in group), [h for i in group for h in holds[i]])
            order = [*stay, *b] if prefix < 2 else [stay[0], b[0], *stay[1:], *b[1:]]
            x = torch.stack([new[j][0] for j in order])
            size, holds = [new[j][1] for j in order], [new[j][2] for j in order]
        x = mlp(block, x)
        counts.append(len(x))
    return logits_of(vit, x), list(zip(size, holds, strict=True)), counts


def groups(trace: Any, b: int) -> set[tuple[int, ...]]:
    """The first tokens that each token left holds, from the decisions of the trace."""
    holder = list(range(trace.attended.shape[2]))
    for step in trace.steps:
        holder = [int(step.decision.target[b, j]) for j in holder]
    return {tuple(i for i, h in enumerate(holder) if h == j) for j in holder}


@pytest.mark.parametrize("kind", ["class", "distilled", "average", "deit3", "qk_norm"])
@pytest.mark.parametrize(
    ("r", "per_block"),
    [
        (2, [2] * 6),
        (50, [50] * 6),
        ((2, -1.0), [4, 3, 2, 1, 0, 0]),
        ((2, 1.0), [0, 0, 1, 2, 3, 4]),
        ([4, 0, 3], [4, 0, 3, 0, 0, 0]),
    ],
)
@torch.no_grad()
def test_tome(kind: str, r: Any, per_block: list[int]) -> None:
    model = randomised("tome", kind, r=r)
    assert model.policy.r == per_block
    for layout in ALL_LAYOUTS:
        out = model(pictures(), layout=layout)
        for b, image in enumerate(pictures()):
            logits, tokens, counts = tome(model.vit, image, per_block, model.shape.num_prefix_tokens)
            assert out.trace.live_mlp[:, b].tolist() == counts
            assert groups(out.trace, b) == {tuple(sorted(held)) for _, held in tokens}
            assert_close(out.logits[b], logits)
            assert sum(size for size, _ in tokens) == model.shape.tokens
            for slot in range(model.shape.num_prefix_tokens):  # class and distillation token stay by themselves
                assert (slot,) in groups(out.trace, b)


@torch.no_grad()
def test_tome_without_proportional_attention() -> None:
    model = randomised("tome", r=3, prop_attn=False)
    out = model(pictures())
    logits = torch.stack([tome(model.vit, image, [3] * 6, 1, prop_attn=False)[0] for image in pictures()])
    assert_close(out.logits, logits)
    assert not torch.allclose(out.logits, randomised("tome", r=3)(pictures()).logits, atol=1e-3)


@torch.no_grad()
def test_several_tokens_may_join_one() -> None:
    """Keys of half of A point at one B: sizes add up to more than 2 in one block."""
    model = randomised("tome", r=[7])
    met = [len(g) for b in range(3) for g in groups(model(pictures()).trace, b)]
    assert max(met) > 2
    assert sum(met) == 3 * 17


@torch.no_grad()
def test_every_register_is_protected() -> None:
    out = randomised("tome", "registers", r=4)(pictures())
    for b in range(3):
        assert {(i,) for i in range(5)} <= groups(out.trace, b)
    assert out.trace.live_mlp[:, 0].tolist() == [17, 13, 9, 7, 6, 6]  # (n - 5) // 2 at most: 16, 12, 8, 4, 2, 1


def test_tome_schedules() -> None:
    """(r, f): lo = int(r (1 - f)), hi = 2 r - lo, r_i = int(lo + (hi - lo) / (L - 1) i)."""
    assert schedule(8, 0.0, 12) == [8] * 12
    assert schedule(8, -1.0, 12) == [16, 14, 13, 11, 10, 8, 7, 5, 4, 2, 1, 0]
    assert schedule(13, 0.5, 3) == [6, 13, 20]
    assert schedule((5, 6), 0.0, 4) == [5, 6, 0, 0]
    with pytest.raises(UserError, match=r"r: .*at most 6.*7"):
        randomised("tome", r=[1] * 7)


# -- fold -----------------------------------------------------------------------------------------------------------
def folding(
    model: Any, image: Tensor, left: list[int], column: bool, power: float, value: float
) -> tuple[Tensor, list[int]]:
    """The rule as a loop: logits and tokens after each block, with left[l] patches after block l."""
    vit, prefix, x = model.vit, model.shape.num_prefix_tokens, embedded(model.vit, image)
    size, counts = [1.0] * len(x), []
    for layer, block in enumerate(vit.blocks):
        x, a, keys = attention(block, x, torch.tensor(size))
        patches = range(prefix, len(x))
        if left[layer] < len(patches):
            seen = {i: float(a[:, :, i].mean() if column else a[:, 0, i].mean()) for i in patches}
            far = {i: 1 - max(cosine(keys[i], keys[j]) for j in patches if j != i) for i in patches}
            stay = sorted(best({i: seen[i] * far[i] ** power for i in patches}, left[layer]))
            goes = {i: i if i in stay else most_similar(keys, i, stay) for i in patches}
            new = {}
            for j in stay:
                group = [i for i in patches if goes[i] == j]
                new[j] = (
                    mean([x[i] for i in group], [size[i] * seen[i] ** value for i in group]),
                    sum(size[i] for i in group),
                )
            x = torch.stack([*x[:prefix], *(new[j][0] for j in stay)])
            size = size[:prefix] + [new[j][1] for j in stay]
        x = mlp(block, x)
        counts.append(len(x))
    return logits_of(vit, x), counts


@pytest.mark.parametrize(
    ("kind", "given", "left"),
    [
        ("class", {}, [16, 14, 12, 11, 9, 8]),
        ("class", {"keep": 0.5, "blocks": (2, 4), "evidence": "column"}, [16, 16, 8, 8, 4, 4]),
        ("class", {"keep": 0.6, "first_block": 4, "power": 0.0, "value": 0.0}, [16, 16, 16, 16, 10, 6]),
        ("deit3", {"keep": 0.7, "first_block": 0, "value": 2.0, "power": 1.0}, [11, 8, 5, 4, 3, 2]),
        ("average", {"keep": 0.75}, [16, 12, 9, 7, 5, 4]),
        ("distilled", {"keep": 0.75, "evidence": "class"}, [16, 12, 9, 7, 5, 4]),
        ("class", {"keep": 0.01}, [16, 1, 1, 1, 1, 1]),
        ("class", {"keep": 1.0, "first_block": 0}, [16] * 6),
    ],
)
@torch.no_grad()
def test_fold(kind: str, given: dict[str, Any], left: list[int]) -> None:
    model = randomised("fold", kind, **given)
    column = given.get("evidence") == "column" or kind == "average"  # auto looks at the class token where there is one
    for layout in ALL_LAYOUTS:
        out = model(pictures(), layout=layout)
        for b, image in enumerate(pictures()):
            logits, counts = folding(model, image, left, column, given.get("power", 0.5), given.get("value", 0.5))
            assert out.trace.live_mlp[:, b].tolist() == counts
            assert_close(out.logits[b], logits)


def cost(left: list[int], stages: list[int], column: bool) -> float:
    """MACs of the tiny backbone by hand.

    16 patches of 3 x 8 x 8, 6 blocks, width 24, 3 heads, 10 classes."""
    total, here = 16 * 192 * 24 + 24 * 10, 17
    for layer, n in enumerate(left):
        total += here * 4 * 24 * 24 + 2 * here * here * 24 + (n + 1) * 2 * 24 * 96
        if layer in stages:
            total += here * here * 8 + here * (here if column else 1) * 24  # cosines of head-mean keys, and attention
        here = n + 1
    return total


@pytest.mark.parametrize("budget", [0.5, 0.67, 0.9])
@pytest.mark.parametrize("given", [{}, {"blocks": (1, 4), "evidence": "column"}])
@torch.no_grad()
def test_a_budget_is_met_from_below_by_as_little_as_can_be(budget: float, given: dict[str, Any]) -> None:
    out = randomised("fold", budget=budget, **given)(pictures())
    stages, column = list(given.get("blocks", range(1, 6))), "evidence" in given
    allowed, known = budget * cost([16] * 6, [], column), set()
    for step in range(1, 10_001):  # every sequence that one share for all stages can give
        left, exact = [], 16.0
        for layer in range(6):
            exact *= step / 10_000 if layer in stages else 1
            left.append(max(1, round(exact)))
        known.add(cost(left, stages, column))
    spent = cost([int(n) - 1 for n in out.trace.live_mlp[:, 0]], stages, column)
    assert out.macs.tolist() == [spent] * 3
    assert spent == max(c for c in known if c <= allowed)


@pytest.mark.parametrize(
    "given", [{"budget": 0.05}, {"budget": 0.9, "blocks": (5,)}, {"budget": 1.0, "evidence": "column"}]
)
def test_an_impossible_budget_is_refused(given: dict[str, Any]) -> None:
    """Too small, or too late; but a whole budget can still pay for the look, by folding a little."""
    if given["budget"] == 1.0:
        out = randomised("fold", **given)(pictures())
        assert float(out.macs[0]) <= out.costs.static
        return
    with pytest.raises(UserError, match=r"budget: .* cannot cost less than 0\.\d+"):  # before any image is seen
        randomised("fold", **given)


def test_fold_needs_a_class_token_for_its_row() -> None:
    with pytest.raises(UserError, match="evidence: 'class'"):
        randomised("fold", "average", evidence="class")
