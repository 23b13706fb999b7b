"""MoD and A-MoD against loops over the tokens of one image; how often a token is computed, and what it costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import adaptivit
from adaptivit.errors import UserError
from tests.support.models import ALL_LAYOUTS, assert_close, pictures
from tests.support.reference_vit import attention, best, embedded, logits_of, mlp, randomised, sigmoid, whole


def scores_of(router: Any, rows: Tensor) -> list[float]:
    """r_i = x_i . W, or the same behind a hidden layer with GELU."""
    if hasattr(router, "weight"):
        return [float(router.weight[0] @ x) for x in rows]
    hidden = torch.nn.functional.gelu(rows @ router[0].weight.T + router[0].bias)
    return (hidden @ router[2].weight[0]).tolist()


def routed(block: Any, x: Tensor, r: list[float], capacity: float, gate: str, prefix: int) -> tuple[Tensor, list[int]]:
    """The block on the ceil(C N) best alone; prefix tokens always have a place."""
    places = max(math.ceil(capacity * len(x)), prefix)
    chosen = best({i: r[i] for i in range(prefix, len(x))}, places - prefix)
    chosen = [*range(prefix), *sorted(chosen)]
    out, after = x.clone(), whole(block, x[chosen])
    for n, i in enumerate(chosen):
        g = {"raw": r[i], "sigmoid": sigmoid(r[i]), "none": 1.0}[gate]
        out[i] = x[i] + g * (after[n] - x[i])  # the block's output holds x already: its change is what is scaled
    return out, chosen


def check(model: Any, expected: Any) -> None:
    """expected(image) -> logits and a list of the slots computed in each block."""
    images = pictures()
    for layout in ALL_LAYOUTS:
        out = model(images, layout=layout)
        for b, image in enumerate(images):
            logits, computed = expected(image)
            assert_close(out.logits[b], logits)
            got = [step.nonzero()[:, 0].tolist() for step in out.trace.attended[:, b]]
            assert got == computed
            assert torch.equal(out.trace.attended, out.trace.updated)


@pytest.mark.parametrize(
    ("given", "blocks"),
    [
        ({}, (1, 3, 5)),
        ({"capacity": 0.125}, (1, 3, 5)),
        ({"capacity": 0.7, "gate": "sigmoid"}, (1, 3, 5)),
        ({"capacity": 0.3, "gate": "none", "first_block": 2}, (2, 4)),
        ({"capacity": 0.3, "router": "mlp", "blocks": (0, 1, 5)}, (0, 1, 5)),
        ({"capacity": 1.0}, (1, 3, 5)),
    ],
)
@torch.no_grad()
def test_mod(given: dict[str, Any], blocks: tuple[int, ...]) -> None:
    model = randomised("mod", **given)
    assert sorted(model.policy.routers) == [str(b) for b in blocks]
    capacity, gate = given.get("capacity", 0.5), given.get("gate", "raw")

    def expected(image: Tensor) -> tuple[Tensor, list[list[int]]]:
        x, computed = embedded(model.vit, image), []
        for layer, block in enumerate(model.vit.blocks):
            if layer in blocks:
                r = scores_of(model.policy.routers[str(layer)], x)
                x, chosen = routed(block, x, r, capacity, gate, 1)
                assert len(chosen) == math.ceil(capacity * 17)
            else:
                x, chosen = whole(block, x), list(range(17))
            computed.append(chosen)
        return logits_of(model.vit, x), computed

    check(model, expected)


@pytest.mark.parametrize("kind", ["distilled", "registers"])
@pytest.mark.parametrize("capacity", [0.05, 0.5])
@torch.no_grad()
def test_every_prefix_token_has_a_place(kind: str, capacity: float) -> None:
    for policy in ("mod", "amod"):
        model = randomised(policy, kind, capacity=capacity)
        prefix, slots = model.shape.num_prefix_tokens, model.shape.tokens
        trace = model(pictures()).trace
        assert trace.attended[:, :, :prefix].all()
        assert trace.live[1::2].unique().tolist() == [max(prefix, math.ceil(capacity * slots))]
        assert trace.live[::2].unique().tolist() == [slots]


@pytest.mark.parametrize("gate", ["raw", "sigmoid", "none"])
def test_the_task_reaches_a_router_through_its_gate_alone(gate: str) -> None:
    model = randomised("mod", gate=gate).train()
    model(pictures()).logits.pow(2).sum().backward()
    grads = [p.grad for p in model.policy.parameters()]
    assert len(grads) == 3
    assert all((g is None) == (gate == "none") for g in grads)
    assert all(g.abs().sum() > 0 for g in grads if g is not None)


@pytest.mark.parametrize(
    ("given", "blocks"),
    [
        ({}, (1, 3, 5)),
        ({"capacity": 0.125, "first_block": 3}, (3, 5)),
        ({"blocks": (1, 2, 3), "capacity": 0.4}, (1, 2, 3)),
        ({"blocks": (4, 5), "multiply": True}, (4, 5)),
        ({"multiply": True, "capacity": 0.7}, (1, 3, 5)),
    ],
)
@torch.no_grad()
def test_amod(given: dict[str, Any], blocks: tuple[int, ...]) -> None:
    """The score is the column mean of the last dense block's attention, also for routed blocks in a row."""
    model = randomised("amod", **given)
    gate = "raw" if given.get("multiply") else "none"

    def expected(image: Tensor) -> tuple[Tensor, list[list[int]]]:
        x, computed, received = embedded(model.vit, image), [], [0.0] * 17
        for layer, block in enumerate(model.vit.blocks):
            if layer in blocks:
                x, chosen = routed(block, x, received, given.get("capacity", 0.5), gate, 1)
            else:
                x, a, _ = attention(block, x)
                received = [sum(float(a[h, q, i]) for h in range(3) for q in range(17)) / (3 * 17) for i in range(17)]
                x, chosen = mlp(block, x), list(range(17))
            computed.append(chosen)
        return logits_of(model.vit, x), computed

    check(model, expected)


@torch.no_grad()
def test_amod_counts_its_second_look_as_evidence() -> None:
    out = randomised("amod")(pictures())
    assert out.parts["evidence"].tolist() == [3 * 17 * 17 * 24] * 3  # the scores of blocks 0, 2 and 4 again
    assert not out.parts["policy"].any()
    mod = randomised("mod")(pictures())
    assert mod.parts["policy"].tolist() == [3 * 17 * 24] * 3
    assert torch.equal(mod.macs_blocks, out.macs_blocks)


def test_amod_has_no_parameters_and_needs_a_block_before() -> None:
    assert not list(randomised("amod").policy.parameters())
    for given in ({"first_block": 0}, {"blocks": (0, 3)}):
        with pytest.raises(UserError, match="block 0"):
            adaptivit.create("test_vit", "amod", **given)


def test_amod_learns_by_its_scores_only_where_they_multiply() -> None:
    """Without a gate the routing has no gradient: attention is looked at without one."""
    for multiply in (False, True):
        model = randomised("amod", multiply=multiply).train()
        decisions = []
        real = model.policy.before

        def before(ctx: Any, state: Any, real: Any = real, seen: list[Any] = decisions) -> Any:
            seen.append(real(ctx, state))
            return seen[-1]

        model.policy.before = before
        model(pictures())
        gates = [d.gate for d in decisions if d is not None]
        assert len(gates) == 3
        assert all(g.requires_grad if multiply else g is None for g in gates)
