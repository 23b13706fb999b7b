"""What decides in the newer forms of AHT-ViT and A-ViT, from a loop over the tokens of one image."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.models import assert_close, pictures
from tests.support.policies import PAPERS
from tests.support.reference_vit import attention, embedded, mlp, randomised, sigmoid


@pytest.mark.parametrize("feature", ["received", "class_row"])
@torch.no_grad()
def test_aht_by_attention(feature: str) -> None:
    """h = sigmoid(gamma f + beta) with f = -log(n a): a token that gets its fair share 1 / n has f = 0."""
    model = randomised("aht_merge", **PAPERS | {"feature": feature, "removal": "drop"})
    model.policy.gamma.fill_(1.5), model.policy.beta.fill_(-1.0)
    out = model(pictures())
    for b, image in enumerate(pictures()):
        x, slots, c = embedded(model.vit, image), list(range(17)), dict.fromkeys(range(17), 0.0)
        for layer, block in enumerate(model.vit.blocks[:5]):
            assert out.trace.attended[layer, b].nonzero()[:, 0].tolist() == slots
            x, a, _ = attention(block, x)
            x = mlp(block, x)
            for n, i in enumerate(slots[1:], 1):
                got = float(a[:, 0, n].mean() if feature == "class_row" else a[:, :, n].mean())
                h = sigmoid(1.5 * -math.log(len(slots) * got) - 1.0)
                assert float(out.trace.fact("scores")[layer, b, i]) == pytest.approx(h, abs=1e-4)
                c[i] += h
            kept = [n for n, i in enumerate(slots) if n == 0 or c[i] < 0.99]
            x, slots = x[kept], [slots[n] for n in kept]
    assert out.trace.depth.unique().numel() > 2


@pytest.mark.parametrize("context", ["mean", "class", "none"])
@torch.no_grad()
def test_aht_planner_context_and_width(context: str) -> None:
    model = randomised("aht", planner_context=context, planner_width=0.25, planner_blocks=(1,))
    model.policy.beta.fill_(-30.0)  # no token halts before the stage
    planner = model.policy.planners["1"]
    assert planner.hidden.weight.shape == (6, 24 if context == "none" else 48)
    plan = model(pictures(), aux=("plan",)).trace.fact("plan")[0]
    for b, image in enumerate(pictures()):
        block = model.vit.blocks[0]
        x = mlp(block, attention(block, embedded(model.vit, image))[0])
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        beside = {"mean": [x.mean(0)], "class": [x[0]], "none": []}[context]
        for i in range(17):
            hidden = planner.hidden.weight @ torch.cat([x[i], *beside]) + planner.hidden.bias
            u = float(planner.out.weight[0] @ hidden.clamp_min(0) + planner.out.bias[0])
            assert float(plan[b, i]) == pytest.approx(1 + 5 * sigmoid(u), abs=1e-4)


@torch.no_grad()
def test_avit_by_a_network_a_layer() -> None:
    """D -> D / 2 -> 1 with GELU, its own in every layer; late halting at first; no scores of halted rows to ask for."""
    model = randomised("avit", gate="network")
    scores = model(pictures(), layout="masked").trace.fact("scores")
    for b, image in enumerate(pictures()):
        block, network = model.vit.blocks[0], model.policy.networks[0]
        x = mlp(block, attention(block, embedded(model.vit, image))[0])
        hidden = torch.nn.functional.gelu(x @ network[0].weight.T + network[0].bias)
        assert network[0].weight.shape == (12, 24)
        assert_close(scores[0, b], torch.sigmoid(hidden @ network[2].weight[0] + network[2].bias))
    assert len(model.policy.networks) == 6
    assert not model.policy.traits.optional_aux
