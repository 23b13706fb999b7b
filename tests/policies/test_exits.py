"""ACT, early exits, PonderNet and the static baselines against what they say they are, on one image at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from adaptivit.backbones.slim import narrow
from adaptivit.errors import UserError
from adaptivit.policies.exits import uncertainty
from adaptivit.training.losses import Batch, Exits, Expected, Geometric, Ponder, SelfDistillation
from tests.support.models import ALL_LAYOUTS, LAYOUTS, assert_close, model_of, pictures, tiny
from tests.support.reference_vit import embedded, logits_of, sigmoid, whole

L, B = 6, 6
IMAGES = pictures(B) * torch.linspace(0.3, 3.0, B)[:, None, None, None]  # unlike enough to leave at different blocks


def varied(candidates: Iterable[float], depths: Callable[[float], list[int]]) -> float:
    """The candidate at which the images leave at the most different blocks."""
    chosen = max(candidates, key=lambda c: len(set(depths(c))))
    assert len(set(depths(chosen))) > 1, "this test wants images that differ"
    return chosen


def states(vit: Any, image: Tensor) -> list[Tensor]:
    """[N, D] after each block of the plain model."""
    x, after = embedded(vit, image), []
    for block in vit.blocks:
        x = whole(block, x)
        after.append(x)
    return after


def read(vit: Any, x: Tensor) -> Tensor:
    """One row for the image: the class token, or the mean token where the head pools."""
    return x.mean(0) if vit.global_pool == "avg" else x[0]


# -- ACT ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["class", "average"])
@torch.no_grad()
def test_act(kind: str) -> None:
    model = tiny("act", kind)
    gate = model.policy.gate
    gate.weight.copy_(torch.randn(1, 24, generator=torch.Generator().manual_seed(1)) * 0.3)
    every = [states(model.vit, image) for image in IMAGES]

    def halted(bias: float) -> list[tuple[int, float, Tensor]]:
        """N, R and the mean field of each image."""
        found = []
        for after in every:
            c, field = 0.0, torch.zeros(model.shape.tokens, 24)
            for layer, x in enumerate(after, 1):
                h = 1.0 if layer == L else sigmoid(float(gate.weight[0] @ read(model.vit, x)) + bias)
                full = c + h >= 0.99 or layer == L
                field = field + ((1 - c) if full else h) * x  # the remainder at N
                if full:
                    found.append((layer, 1 - c, field))
                    break
                c += h
        return found

    bias = varied([x / 2 for x in range(-8, 4)], lambda bias: [n for n, _, _ in halted(bias)])
    gate.bias.fill_(bias)
    for layout in LAYOUTS:
        out = model(IMAGES, layout=layout)
        assert_close(out.logits, torch.stack([logits_of(model.vit, field) for _, _, field in halted(bias)]))
        assert out.trace.depth[:, 0].tolist() == [n for n, _, _ in halted(bias)]
        ponder = sum(n + r for n, r, _ in halted(bias)) / B
        assert float(Ponder()(out, Batch())) == pytest.approx(ponder, abs=1e-5)


def test_a_gate_a_block_adds_up_by_hand() -> None:
    """Gates that do not read: h = 0.2, 0.3, 0.6 of the first blocks, so c = 0.2, 0.5, 1.1: N = 3, R = 1 - 0.5."""
    for unit in ("image", "token"):
        model = tiny("act", unit=unit, gate="block")
        assert len(model.policy.gate) == L - 1
        for gate, h in zip(model.policy.gate, (0.2, 0.3, 0.6, 0.1, 0.1), strict=True):
            for name, p in gate.named_parameters():
                torch.nn.init.constant_(p, math.log(h / (1 - h)) if "bias" in name else 0.0)
        with torch.no_grad():
            out = model(IMAGES)
        facts = out.trace.facts
        assert (facts["halt"] == 3).all()
        assert_close(facts["remainder"], torch.full((B, 17), 0.5))
        assert facts["scores"][:, 0, 5].tolist() == pytest.approx([0.2, 0.3, 0.6, 0, 0, 0])
        assert float(Ponder()(out, Batch())) == pytest.approx(3.5)
        each = 2 * 24 * 17 if unit == "token" else 24  # a token's weights and its image's, or those of one row
        assert out.parts["policy"].tolist() == [3 * each] * B


@pytest.mark.parametrize("gate", ["shared", "block"])
@pytest.mark.parametrize("kind", ["class", "average"])
@torch.no_grad()
def test_spatial_act(kind: str, gate: str) -> None:
    """Every token by itself: h = sigmoid(w . x + v . mean + b) over the tokens that are left, its mean field read."""
    model = tiny("act", kind, unit="token", gate=gate)
    g = torch.Generator().manual_seed(1)
    for p in model.policy.parameters():
        p.copy_(torch.randn(p.shape, generator=g) * 0.3 if p.ndim > 1 else torch.tensor([-0.5]))
    gates = list(model.policy.gate) if gate == "block" else [model.policy.gate] * (L - 1)
    logits, depth, ponder = [], [], 0.0
    for image in IMAGES:
        x, alive = embedded(model.vit, image), list(range(model.shape.tokens))
        c, halt, field = [0.0] * len(x), [0] * len(x), torch.zeros_like(x)
        for layer, block in enumerate(model.vit.blocks, 1):
            if not alive:
                break
            x[alive] = whole(block, x[alive])
            average, h = x[alive].mean(0), dict.fromkeys(alive, 1.0)
            if layer < L:
                w, b, v = (
                    gates[layer - 1].token.weight[0],
                    gates[layer - 1].token.bias,
                    gates[layer - 1].image.weight[0],
                )
                h = {i: sigmoid(float(w @ x[i] + v @ average + b)) for i in alive}
            full = [i for i in alive if c[i] + h[i] >= 0.99 or layer == L]
            full = list(alive) if kind == "class" and 0 in full else full  # nothing is read any more
            for i in alive:
                field[i] += ((1 - c[i]) if i in full else h[i]) * x[i]
                if i in full:
                    halt[i], ponder = layer, ponder + (layer + 1 - c[i]) / (B * len(x))
                c[i] += h[i]
            alive = [i for i in alive if i not in full]
        logits.append(logits_of(model.vit, field))
        depth.append(halt)
    assert len({n for halt in depth for n in halt}) > 2, "this test wants tokens that differ"
    for layout in LAYOUTS:
        out = model(IMAGES, layout=layout)
        assert out.trace.depth.tolist() == depth
        assert_close(out.logits, torch.stack(logits))
        assert float(Ponder()(out, Batch())) == pytest.approx(ponder, abs=1e-5)


# -- early exits ----------------------------------------------------------------------------------------------------
def first(holds: list[bool], patience: int) -> int:
    """The block after which the rule has held `patience` times in a row, L at the latest."""
    for layer in range(patience, L):
        if all(holds[layer - patience : layer]):
            return layer
    return L


@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize("rule", ["confidence", "logits", "token"])
@pytest.mark.parametrize("kind", ["class", "average"])
@torch.no_grad()
def test_early_exits(rule: str, patience: int, kind: str) -> None:
    """The first block where the rule holds; the threshold lies among what the images show."""
    vit = tiny("static", kind).vit
    shown: list[list[float]] = []
    outputs = []
    for image in IMAGES:
        after = states(vit, image)
        logits = [logits_of(vit, x) for x in after]
        seen = logits if rule == "logits" else [read(vit, x) for x in after]
        change = [math.inf] + [float((b - a).pow(2).mean()) for a, b in itertools.pairwise(seen)]
        shown.append([-float(y.softmax(-1).max()) for y in logits] if rule == "confidence" else change)
        outputs.append(logits)
    values = sorted(v for row in shown for v in row if v < math.inf)
    between = [(x + y) / 2 for x, y in itertools.pairwise(values)]  # small is what the rules look for
    threshold = varied(between, lambda t: [first([v <= t for v in row], patience) for row in shown])
    depth = [first([v <= threshold for v in row], patience) for row in shown]
    given = {"threshold": -threshold} if rule == "confidence" else {"threshold": threshold, "of": rule}
    model = tiny("confidence" if rule == "confidence" else "similarity", kind, patience=patience, **given)
    for layout in LAYOUTS:
        out = model(IMAGES, layout=layout)
        assert out.trace.depth[:, -1].tolist() == depth
        assert_close(out.logits, torch.stack([outputs[b][n - 1] for b, n in enumerate(depth)]))
        asked = [min(n, L - 1) for n in depth]  # the head speaks after every block but the last
        head = 0 if rule == "token" else 24 * 10
        assert out.parts["policy"].tolist() == [n * head for n in asked]


@pytest.mark.parametrize("policy", ["confidence", "similarity", "pondernet"])
@torch.no_grad()
def test_asked_for_every_exit_speaks(policy: str) -> None:
    """Whatever the threshold, no token leaves while all exits are wanted; the loss is their mean over images."""
    model = tiny(policy, **({"gate_center": -100.0} if policy == "pondernet" else {"threshold": 0.01}))
    out, targets = model(IMAGES, aux=("exits",)), torch.tensor([3, 1, 4, 1, 5, 9])
    assert (out.trace.depth == L).all()
    loss = 0.0
    for b, image in enumerate(IMAGES):
        for layer, x in enumerate(states(model.vit, image)):
            assert_close(out.trace.fact("exits")[layer, b], logits_of(model.vit, x))
            loss -= float(logits_of(model.vit, x).log_softmax(-1)[targets[b]]) / (B * L)
    assert float(Exits()(out, Batch(targets))) == pytest.approx(loss, rel=1e-5)
    assert (out.parts["asked"] == L * 24 * 10).all()


def test_lpips_distance_by_hand() -> None:
    """(3, 4) and (0, 2) are (0.6, 0.8) and (0, 1) at unit length: 0.36 and 0.04 apart, at weights 1 and 2."""
    model = model_of("similarity", classes=2, measure="lpips")
    policy: Any = model.policy
    with torch.no_grad():
        policy.log_weights.copy_(torch.tensor([1.0, 2.0]).log())
        assert_close(policy.change(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])), torch.tensor([0.44]))
        assert_close(policy.change(torch.tensor([[3.0, 4.0]]), torch.tensor([[6.0, 8.0]])), torch.tensor([0.0]))


def test_lpips_weights_learn_how_far_an_exit_is_from_the_last() -> None:
    """Beside the exits' losses: (change - KL(last || exit))^2, from the second exit on; it moves nothing but w."""
    model, targets = tiny("similarity", measure="lpips"), torch.tensor([3, 1, 4, 1, 5, 9])
    policy: Any = model.policy
    out = model(IMAGES, aux=("exits",))
    exits, changes = out.trace.fact("exits"), out.trace.fact("changes")
    p = exits.softmax(-1)
    kl = (p[-1] * (p[-1].log() - p.log())).sum(-1)
    mean = -exits.log_softmax(-1)[:, range(6), targets].mean()
    extra = (changes[:-1] - kl[1:-1]).pow(2).mean()
    loss, first_weights = Exits()(out, Batch(targets)), model.vit.patch_embed.proj.weight
    assert_close(loss, mean + extra)
    slopes = [torch.autograd.grad(value, first_weights, retain_graph=True)[0] for value in (loss, mean)]
    assert_close(*slopes)
    (slope,) = torch.autograd.grad(extra, policy.log_weights)
    assert slope.abs().min() > 0


@torch.no_grad()
def test_an_image_leaves_by_its_lpips_distance() -> None:
    vit = tiny("static").vit
    shown = []
    for image in IMAGES:
        unit = [logits_of(vit, x) / logits_of(vit, x).norm() for x in states(vit, image)]
        shown.append([math.inf] + [float((b - a).pow(2).sum()) for a, b in itertools.pairwise(unit)])
    values = sorted(v for row in shown for v in row if v < math.inf)
    between = [(x + y) / 2 for x, y in itertools.pairwise(values)]
    threshold = varied(between, lambda t: [first([v <= t for v in row], 1) for row in shown])
    depth = [first([v <= threshold for v in row], 1) for row in shown]
    for layout in LAYOUTS:
        out = tiny("similarity", measure="lpips", threshold=threshold)(IMAGES, layout=layout)
        assert out.trace.depth[:, -1].tolist() == depth


# -- BranchyNet, FastBERT, DeeBERT ------------------------------------------------------------------------------------
def said(*exits: list[float]) -> Any:
    """An output whose exits gave one image these probabilities."""
    fact = torch.tensor(exits).log()[:, None]
    return SimpleNamespace(trace=SimpleNamespace(facts={}, fact={"exits": fact}.__getitem__))


def test_uncertainty_by_hand() -> None:
    """1/2, 1/4, 1/8, 1/8 has 1.75 bits of 2; equal ones have all, a sure one none."""
    p = torch.tensor([[1 / 2, 1 / 4, 1 / 8, 1 / 8], [1 / 4] * 4, [1.0, 0, 0, 0]])
    assert_close(uncertainty(p.clamp_min(1e-30).log()), torch.tensor([0.875, 1.0, 0.0]))


def test_losses_over_exits_by_hand() -> None:
    out = said([1 / 2, 1 / 2], [1 / 4, 3 / 4], [3 / 4, 1 / 4])
    labels = Batch(torch.tensor([0]))
    joint = (math.log(2) + math.log(4) + 0.3 * math.log(4 / 3)) / 3  # BranchyNet: weights 1, 1, 0.3
    assert float(Exits(last=0.3)(out, labels)) == pytest.approx(joint)
    assert float(Exits(last=0.0)(out, labels)) == pytest.approx(math.log(8) / 3)  # DeeBERT: all but the last
    first = 3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2)  # KL(last || first)
    second = 3 / 4 * math.log(3) + 1 / 4 * math.log(1 / 3)
    assert float(SelfDistillation()(out, Batch())) == pytest.approx((first + second) / 2)


def test_self_distillation_does_not_teach_the_last_exit() -> None:
    exits = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out: Any = SimpleNamespace(trace=SimpleNamespace(fact={"exits": exits}.__getitem__))
    SelfDistillation()(out, Batch()).backward()
    assert exits.grad is not None
    assert bool((exits.grad[-1] == 0).all())
    assert bool((exits.grad[:-1] != 0).all())


@pytest.mark.parametrize("heads", ["shared", "own"])
@pytest.mark.parametrize("kind", ["class", "average"])
@torch.no_grad()
def test_exits_by_entropy(kind: str, heads: str) -> None:
    """The first head whose uncertainty is at most 1 - threshold; own heads are a norm and a linear layer."""
    model = tiny("confidence", kind, heads=heads, criterion="entropy")
    for head in model.policy.heads:
        torch.nn.init.normal_(head[1].weight, std=0.5, generator=torch.Generator().manual_seed(2))
    outputs, doubts = [], []
    for image in IMAGES:
        logits = []
        for layer, x in enumerate(states(model.vit, image)):
            own = heads == "own" and layer < L - 1
            token = read(model.vit, x)
            logits.append(
                model.policy.heads[layer][1](F.layer_norm(token, (24,), eps=1e-6)) if own else logits_of(model.vit, x)
            )
        outputs.append(logits)
        p = [y.softmax(-1) for y in logits]
        doubts.append([float(-(q * q.log()).sum()) / math.log(10) for q in p])
    values = sorted(v for row in doubts for v in row)
    speed = varied(
        [(a + b) / 2 for a, b in itertools.pairwise(values)],
        lambda s: [first([v <= s for v in row], 1) for row in doubts],
    )
    depth = [first([v <= speed for v in row], 1) for row in doubts]
    model.policy.settings = replace(model.policy.settings, threshold=1 - speed)
    for layout in LAYOUTS:
        out = model(IMAGES, layout=layout)
        assert out.trace.depth[:, -1].tolist() == depth
        assert_close(out.logits, torch.stack([row[n - 1] for row, n in zip(outputs, depth, strict=True)]))
        assert out.parts["policy"].tolist() == [min(n, L - 1) * 24 * 10 for n in depth]
    exits = model(IMAGES, aux=("exits",)).trace.fact("exits")
    assert_close(exits, torch.stack([torch.stack(row) for row in outputs], 1))


# -- PonderNet ------------------------------------------------------------------------------------------------------
def chances(vit: Any, image: Tensor, scale: float, center: float) -> list[float]:
    """p_l of the image: lambda_l times the chance to have come so far, the rest at L."""
    p, survived = [], 1.0
    for layer, x in enumerate(states(vit, image), 1):
        chance = 1.0 if layer == L else sigmoid(scale * float(read(vit, x)[2]) - center)
        p.append(chance * survived)
        survived *= 1 - chance
    return p


def stops(p: list[float]) -> int:
    return next(n for n in range(1, L + 1) if n == L or sum(p[:n]) >= 0.5)


GATE = {"gate_scale": 1.5, "gate_center": 1.5, "index": 2}


@pytest.mark.parametrize("kind", ["class", "average"])
@torch.no_grad()
def test_pondernet_stops_at_the_median(kind: str) -> None:
    vit = tiny("static", kind).vit
    centers = [x / 2 for x in range(-4, 20)]
    center = varied(centers, lambda c: [stops(chances(vit, image, 1.5, c)) for image in IMAGES])
    model = tiny("pondernet", kind, **GATE | {"gate_center": center})
    for layout in LAYOUTS:
        out = model(IMAGES, layout=layout)
        for b, image in enumerate(IMAGES):
            p = chances(model.vit, image, 1.5, center)
            depth = stops(p)
            assert (out.trace.depth[b] == depth).all()
            assert_close(out.logits[b], logits_of(model.vit, states(model.vit, image)[depth - 1]))
            paid = [*p[: depth - 1], 1 - sum(p[: depth - 1]), *[0.0] * (L - depth)]  # what is left is paid at the stop
            assert out.trace.fact("chance")[:, b, 0].tolist() == pytest.approx(paid, abs=1e-5)


@torch.no_grad()
def test_pondernet_losses() -> None:
    """sum_l p_l CE(y_l), and KL(p || p (1 - p)^(l-1), cut off at L and made to sum to 1)."""
    model, targets = tiny("pondernet", prior=0.3, **GATE), torch.tensor([3, 1, 4, 1, 5, 9])
    out = model(IMAGES, aux=("exits",))
    prior = [0.3 * 0.7**n for n in range(L)]
    task, kl = 0.0, 0.0
    for b, image in enumerate(IMAGES):
        p = chances(model.vit, image, 1.5, 1.5)
        assert sum(p) == pytest.approx(1)
        for n, x in enumerate(states(model.vit, image)):
            task -= p[n] * float(logits_of(model.vit, x).log_softmax(-1)[targets[b]]) / B
            kl += p[n] * math.log(p[n] / (prior[n] / sum(prior))) / B
    assert float(Expected()(out, Batch(targets))) == pytest.approx(task, rel=1e-5)
    assert float(Geometric()(out, Batch())) == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize("sample", [None, 5])
@pytest.mark.parametrize("ask", [(), ("exits",)])
@torch.no_grad()
def test_pondernet_by_token(sample: int | None, ask: tuple[str, ...]) -> None:
    """Every token's chance sums to 1; it stops where that passes the bar, and the image ends with its class token."""
    model = tiny("pondernet", unit="token", sample=sample, **GATE | {"gate_center": 3.0})
    out = model(IMAGES, aux=ask)
    chance, bar = out.trace.fact("chance"), torch.full((17,), 0.5)
    assert_close(chance.sum(0), torch.ones(B, 17))
    if sample is not None:
        bar = torch.rand(1, 17, generator=torch.Generator().manual_seed(sample))[0]
    ends = 0
    for b in range(B):
        depth, last = out.trace.depth[b].tolist(), int(out.trace.depth[b, 0])
        for i in range(17):
            before = chance[: depth[i] - 1, b, i].sum()
            assert float(before) < float(bar[i]) + 1e-6 or (ask and i == 0)
            assert (chance[depth[i] :, b, i] == 0).all()
            assert depth[i] <= last or ask
            ends += depth[i] < last
    assert ends > 0
    assert not ask or (out.trace.depth[:, 0] == L).all()


@torch.no_grad()
def test_sampling_follows_from_the_seed_alone() -> None:
    for unit in ("image", "token"):
        model = tiny("pondernet", unit=unit, sample=1, **GATE)
        depth = model(pictures()).trace.depth
        assert torch.equal(depth, model(pictures()).trace.depth)
        for b in range(3):
            assert torch.equal(depth[b], model(pictures()[b : b + 1]).trace.depth[0])
        others = [tiny("pondernet", unit=unit, sample=s, **GATE)(pictures()).trace.depth for s in range(2, 8)]
        assert any(not torch.equal(depth, other) for other in others)


# -- static, smaller ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["class", "average", "distilled"])
@pytest.mark.parametrize("depth", [1, 4, 6])
@torch.no_grad()
def test_static_depth_is_timm_with_fewer_blocks(kind: str, depth: int) -> None:
    model = tiny("static", kind, depth=depth)
    outs = [model(IMAGES, layout=layout) for layout in ALL_LAYOUTS]
    costs = float(outs[0].costs.embedding + outs[0].costs.head)
    model.vit.blocks = model.vit.blocks[:depth]
    for out in outs:
        assert_close(out.logits, model.vit(IMAGES))
        assert out.macs.tolist() == pytest.approx([costs + (outs[0].costs.static - costs) * depth / 6] * B)


def macs(width: int, depth: int = 6) -> float:
    """The tiny backbone at another width, by hand: 16 patches of 3 x 8 x 8, 17 tokens, MLP ratio 4, 10 classes."""
    block = 17 * 4 * width**2 + 2 * 17 * 17 * width + 2 * 17 * width * 4 * width
    return 16 * 192 * width + width * 10 + depth * block


@pytest.mark.parametrize("share", [0.3, 0.5, 0.67, 1.0])
def test_a_share_is_met_by_the_largest_that_fits(share: float) -> None:
    deep = tiny("static", share=share)
    depth = deep.policy.depth
    assert macs(24, depth) <= share * macs(24) * (1 + 1e-9)
    assert depth == 6 or macs(24, depth + 1) > share * macs(24)
    wide = tiny("static", share=share, by="width")
    width = wide.shape.dim
    assert wide(pictures()).macs.tolist() == [macs(width)] * 3
    assert macs(width) <= share * macs(24) * (1 + 1e-9)
    assert width == 24 or macs(width + 3) > share * macs(24)  # as many channels a head


def test_a_share_too_small_is_refused() -> None:
    for by in ("depth", "width"):
        with pytest.raises(UserError, match="share"):
            tiny("static", share=0.01, by=by)


def test_narrow_takes_the_first_channels_of_every_head() -> None:
    wide = tiny("static", "deit3").vit
    assert narrow(wide, 1.0) is wide
    small = narrow(wide, 0.5)
    assert isinstance(small, VisionTransformer)
    assert (small.embed_dim, small.blocks[0].attn.num_heads, small.blocks[0].mlp.fc1.out_features) == (12, 3, 48)
    for block, other in zip(small.blocks, wide.blocks, strict=True):
        for part in range(3):  # q, k, v
            for head in range(3):
                for channel in range(4):
                    to, of = (part * 3 + head) * 4 + channel, (part * 3 + head) * 8 + channel
                    assert torch.equal(block.attn.qkv.weight[to], other.attn.qkv.weight[of, :12])
                    assert block.attn.qkv.bias[to] == other.attn.qkv.bias[of]
                    into, out = head * 4 + channel, head * 8 + channel
                    assert torch.equal(block.attn.proj.weight[:, into], other.attn.proj.weight[:12, out])
        assert torch.equal(block.mlp.fc1.weight, other.mlp.fc1.weight[:48, :12])
        assert torch.equal(block.mlp.fc2.weight, other.mlp.fc2.weight[:12, :48])
        assert torch.equal(block.norm1.weight, other.norm1.weight[:12])
        assert torch.equal(block.ls1.gamma, other.ls1.gamma[:12])
    assert torch.equal(small.pos_embed, wide.pos_embed[..., :12])
    assert torch.equal(small.patch_embed.proj.weight, wide.patch_embed.proj.weight[:12])
    assert torch.equal(small.head.weight, wide.head.weight[:, :12])
    assert torch.equal(small.head.bias, wide.head.bias)
