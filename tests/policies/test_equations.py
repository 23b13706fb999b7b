"""Every equation of AHT-ViT and A-ViT against slow loops over tokens, from the scores and plans of a real pass.

Layers are counted 1..L as in the papers; T is the threshold, h a score, c their sum, N_k the layer where k halts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import adaptivit
from adaptivit.decision import Trace
from adaptivit.kernels import attention
from adaptivit.output import Output
from adaptivit.training.losses import Batch, Cost, Distillation, DistributionPrior, Ponder, TargetDepth, TaskLoss
from adaptivit.training.losses.target_depth import halting_mass, target_distribution
from tests.support.models import assert_close, pictures, tiny

L = 6
NOTHING = Batch()


def aht(**given: Any) -> tuple[Any, Output]:
    model = tiny("aht", **({"beta": -0.7, "gamma": 1.3} | given))
    return model, model(pictures(), layout="masked", aux=("plan",))


def avit(**given: Any) -> tuple[Any, Output]:
    model = tiny("avit", **({"gate_scale": 3.0, "gate_center": 2.0} | given))
    return model, model(pictures(), layout="masked", aux=("tokens",))


def tokens_of(trace: Trace) -> list[tuple[int, int]]:
    """(image, slot) of all tokens that halt."""
    return [(int(b), int(k)) for b, k in trace.fact("halts").nonzero()]


def literal_mass(h: list[float], n: int, form: str, threshold: float, tau: float = 0.1) -> list[float]:
    """P_actual(1..L) of one token: its form before N_k, what is missing at N_k."""
    p, survive, c = [0.0] * L, 1.0, 0.0
    for layer in range(1, n):
        score = h[layer - 1]
        if form == "act":
            p[layer - 1] = score / threshold
        elif form == "hazard":
            p[layer - 1] = score * survive
            survive *= 1 - score
        else:
            soft = [1 / (1 + math.exp(-(x - threshold) / tau)) for x in (c, c + score)]
            p[layer - 1] = soft[1] - soft[0]
            c += score
    p[n - 1] = 1 - sum(p)
    return p


@pytest.mark.parametrize("given", [{}, {"threshold": 0.6}, {"threshold": 2.0, "beta": 0.0}, {"eps": 0.0}])
@torch.no_grad()
def test_aht_halting_rule(given: dict[str, float]) -> None:
    """Sec. 3.3: h = sigmoid(gamma f + beta), f = element 0 after fc1; N_k = first l with c >= T - eps, L at last."""
    model, out = aht(**given)
    trace, s = out.trace, model.policy.settings
    features: list[Tensor] = []
    hooks = [b.mlp.fc1.register_forward_hook(lambda *a: features.append(a[2][..., 0])) for b in model.vit.blocks]
    model(pictures(), layout="masked")
    for hook in hooks:
        hook.remove()
    for b, k in tokens_of(trace):
        c, n = 0.0, 0
        for layer in range(1, L + 1):
            h = 1.0 if layer == L else 1 / (1 + math.exp(-(s.gamma * float(features[layer - 1][b, k]) + s.beta)))
            assert float(trace.fact("scores")[layer - 1, b, k]) == pytest.approx(0.0 if n else h, abs=1e-6)
            if not n:
                spent, c = c, c + h
                if c >= s.threshold - s.eps or layer == L:
                    n = layer
                    assert float(trace.fact("remainder")[b, k]) == pytest.approx(1 - spent / s.threshold, abs=1e-5)
            assert bool(trace.attended[layer - 1, b, k]) == (not n or n == layer)
        assert int(trace.fact("halt")[b, k]) == n == int(trace.depth[b, k])
    assert (trace.fact("remainder") >= 0).all()
    assert (trace.depth[:, 0] == L).all(), "the class token never halts"
    assert not trace.fact("halts")[:, 0].any()


@torch.no_grad()
def test_aht_planner() -> None:
    """Sec. 3.2: N_target = 1 + (L-1) sigmoid(W2 relu(W1 [LN(x_k), mean LN(x)])), over live tokens of stage s."""
    model, out = aht(planner_blocks=(2, 4, 5))
    for stage, plan, planned in zip((2, 4, 5), out.trace.fact("plan"), out.trace.fact("planned"), strict=True):
        cut = tiny("aht", beta=-0.7, gamma=1.3, planner_blocks=(2, 4, 5))
        cut.vit.blocks = cut.vit.blocks[:stage]  # what the tokens are after s blocks
        state = cut(pictures(), layout="masked", aux=("tokens",)).tokens
        planner = model.policy.planners[str(stage)]
        live = out.trace.attended[stage - 1]
        for b in range(3):
            rows = {}
            for k in live[b].nonzero()[:, 0].tolist():
                x = state[b, k]
                rows[k] = (x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
            context = torch.stack(list(rows.values())).mean(0)
            for k, row in rows.items():
                hidden = planner.hidden.weight @ torch.cat([row, context]) + planner.hidden.bias
                u = float(planner.out.weight[0] @ hidden.clamp_min(0) + planner.out.bias[0])
                assert float(plan[b, k]) == pytest.approx(1 + (L - 1) / (1 + math.exp(-u)), abs=1e-4)
            for k in range(17):  # pairs with N_k >= s, class token left out
                assert bool(planned[b, k]) == (k > 0 and int(out.trace.fact("halt")[b, k]) >= stage)


def test_planner_parameters_of_deit_small() -> None:
    with torch.device("meta"):
        model = adaptivit.create("deit_small_patch16_224", "aht")
    assert sorted(model.policy.planners) == ["3", "6", "9"]
    assert sum(p.numel() for p in model.policy.planners.parameters()) == 443_523


@pytest.mark.parametrize("run", [aht, avit])
@torch.no_grad()
def test_ponder(run: Any) -> None:
    """AHT Eq. 1, A-ViT Eq. 8: the mean of N_k + r_k over tokens that halt."""
    out, cost = run()[1], 0.0
    trace = out.trace
    for b, k in tokens_of(trace):
        n, h = int(trace.fact("halt")[b, k]), trace.fact("scores")[:, b, k].tolist()
        cost += n + (1 - sum(h[: n - 1]))
    assert float(Ponder()(out, NOTHING)) == pytest.approx(cost / len(tokens_of(trace)), abs=1e-5)


@pytest.mark.parametrize("threshold", [1.0, 2.0])
def test_ponder_gradient(threshold: float) -> None:
    """Before N_k, d rho / d h_l is -1 / T over the number of tokens; later, 0."""
    _, out = aht(threshold=threshold, beta=0.0)
    trace, scores = out.trace, out.trace.fact("scores")
    halting = adaptivit.policies.halting.Halting(trace.fact("halts"), threshold, 0.01, 0.25)
    leaves = [h.detach().clone().requires_grad_() for h in scores]
    for layer, h in enumerate(leaves, 1):
        halting.step(h, layer, layer == L)
    again = dataclasses.replace(out, trace=dataclasses.replace(trace, facts=halting.facts()))
    grads = torch.autograd.grad(Ponder()(again, NOTHING), leaves, allow_unused=True)
    count = len(tokens_of(trace))
    for b in range(3):
        for k in range(17):
            for layer, g in enumerate(grads, 1):
                before = (b, k) in tokens_of(trace) and layer < int(trace.fact("halt")[b, k])
                got = 0.0 if g is None else float(g[b, k])
                assert got == pytest.approx(-1 / threshold / count if before else 0.0, abs=1e-8)


@pytest.mark.parametrize("form", ["act", "hazard", "crossing"])
@pytest.mark.parametrize("threshold", [0.7, 1.0, 2.0])
@torch.no_grad()
def test_actual_distribution(form: str, threshold: float) -> None:
    """Sec. 3.4: every form sums to 1 and is 0 after N_k."""
    trace = aht(threshold=threshold)[1].trace
    mass = halting_mass(trace, form)
    for b, k in tokens_of(trace):
        h, n = trace.fact("scores")[:, b, k].tolist(), int(trace.fact("halt")[b, k])
        assert mass[:, b, k].tolist() == pytest.approx(literal_mass(h, n, form, threshold), abs=1e-5)
        assert float(mass[:, b, k].sum()) == pytest.approx(1, abs=1e-5)
        assert (mass[:, b, k] >= -1e-6).all()


@pytest.mark.parametrize("form", ["act", "hazard", "crossing"])
@pytest.mark.parametrize("direction", ["actual_target", "target_actual"])
@torch.no_grad()
def test_target_depth(form: Any, direction: Any) -> None:
    """Eq. 3: P_target = softmax(-(l - N_target)^2 / 2 sigma^2). Eq. 2: the mean KL over pairs with N_k >= s."""
    out, sigma = aht()[1], 1.5
    trace, total, pairs = out.trace, 0.0, 0
    for s, stage in enumerate(trace.fact("stages").tolist()):
        for b, k in tokens_of(trace):
            n, h = int(trace.fact("halt")[b, k]), trace.fact("scores")[:, b, k].tolist()
            if n < stage:
                continue
            plan = float(trace.fact("plan")[s, b, k])
            bell = [math.exp(-((layer - plan) ** 2) / (2 * sigma**2)) for layer in range(1, L + 1)]
            q, p = [x / sum(bell) for x in bell], literal_mass(h, n, form, 1.0)
            one, other = (p, q) if direction == "actual_target" else (q, p)
            total += sum(x * math.log(max(x, 1e-12) / max(y, 1e-12)) for x, y in zip(one, other, strict=True))
            pairs += 1
    loss = TargetDepth(sigma=sigma, form=form, direction=direction)(out, NOTHING)
    assert pairs > 0
    assert float(loss) == pytest.approx(total / pairs, rel=1e-4)


def test_gradient_of_the_plan() -> None:
    """d KL / d N_target = E_target[l] - E_actual[l] at sigma = 1."""
    out = aht()[1]
    plan = out.trace.fact("plan").detach().requires_grad_()
    facts = out.trace.facts | {"plan": plan, "scores": out.trace.fact("scores").detach()}
    again = dataclasses.replace(out, trace=dataclasses.replace(out.trace, facts=facts))
    (grad,) = torch.autograd.grad(TargetDepth()(again, NOTHING), plan)
    layer = torch.arange(1.0, L + 1)
    target = (target_distribution(plan.detach(), L, 1.0).exp() * layer[:, None, None, None]).sum(0)
    actual = (halting_mass(again.trace, "act") * layer[:, None, None]).sum(0)
    pairs = out.trace.fact("planned")
    assert_close(grad, (target - actual) * pairs / pairs.sum(), 1e-6)


@torch.no_grad()
def test_avit_algorithm_1() -> None:
    """Eq. 3-9 and Algorithm 1 with the remainder paid once, at N_k: rows masked and zeroed as in the public code."""
    model, out = avit()
    vit, eps, gate = model.vit, 0.01, model.policy.settings
    x = vit._pos_embed(vit.patch_embed(pictures()))
    m = torch.ones(3, 17)
    c, rest, rho = torch.zeros(3, 17), torch.ones(3, 17), torch.zeros(3, 17)
    depth, readout, scores = torch.ones(3, 17), torch.zeros(3, 24), []
    for layer, block in enumerate(vit.blocks, 1):
        x = x * m[..., None]
        q, k, v = block.attn.qkv(block.norm1(x) * m[..., None]).reshape(3, 17, 3, 3, 8).permute(2, 0, 3, 1, 4)
        a = (q @ k.mT / 8**0.5 - 1000 * (1 - m[:, None, None, :])).softmax(-1)
        x = x + block.attn.proj((a @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x * m[..., None]) * m[..., None])
        scores.append(torch.zeros(3, 17))
        for b in range(3):
            for i in range(17):
                if not m[b, i]:
                    continue
                h = 1.0 if layer == L else 1 / (1 + math.exp(gate.gate_center - gate.gate_scale * float(x[b, i, 0])))
                scores[-1][b, i] = h
                c[b, i] += h
                rho[b, i] += 1
                done = bool(c[b, i] >= 1 - eps)
                if i == 0:
                    readout[b] += (rest[b, i] if done else h) * x[b, i]
                if done:
                    rho[b, i] += rest[b, i]
                    m[b, i] = 0
                else:
                    rest[b, i] -= h
                    depth[b, i] += 1
    trace = out.trace
    assert len(depth.unique()) > 2
    assert torch.equal(trace.depth, depth.long())
    assert_close(trace.fact("scores"), torch.stack(scores))
    assert_close(trace.fact("halt") + trace.fact("remainder"), rho)
    assert_close(out.logits, vit.head(vit.norm(readout)))  # Eq. 9: mean field of the class token
    assert float(Ponder()(out, NOTHING)) == pytest.approx(float(rho.mean()), abs=1e-5)  # Eq. 8, class token included


@torch.no_grad()
def test_distribution_prior() -> None:
    """A-ViT Eq. 11 and 12: KL(H || bell), H_l the mean score of layer l, both summing to 1."""
    out = avit()[1]
    scores = out.trace.fact("scores")
    mean = [sum(float(h) for h in layer.flatten()) / layer.numel() for layer in scores]
    bell = [math.exp(-((layer - 4.0) ** 2) / 2) for layer in range(1, L + 1)]
    p, q = [x / sum(mean) for x in mean], [x / sum(bell) for x in bell]
    expected = sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
    assert float(DistributionPrior(depth=4.0)(out, NOTHING)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("depth", "scores", "expected"),
    [  # sum p log p + sum p (l - depth)^2 / 2 + log sum_l exp(-(l - depth)^2 / 2), by hand for L = 12
        (1.0, [1.0] * 12, -2.484907 + 506 / 24 + 0.561508),
        (9.0, [1.0] * 12, -2.484907 + 218 / 24 + 0.918803),
        (12.0, [1.0] * 12, -2.484907 + 506 / 24 + 0.561508),
        (1.0, [0.0] * 10 + [1.0] * 2, -0.693147 + (100 + 121) / 4 + 0.561508),
        (9.0, [1.0] * 2 + [0.0] * 10, -0.693147 + (64 + 49) / 4 + 0.918803),
        (12.0, [3.0] + [0.0] * 10 + [1.0], -0.562335 + 0.75 * 121 / 2 + 0.561508),
    ],
)
def test_distribution_prior_in_the_tails_of_the_bell(depth: float, scores: list[float], expected: float) -> None:
    """Eq. 12 where the bell is far below 1e-12, and a finite gradient where a layer has no score."""
    sums = torch.tensor([*scores, 1.0], requires_grad=True)
    loss = DistributionPrior(depth=depth).loss(sums)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, sums)
    assert gradient.isfinite().all()


@torch.no_grad()
def test_other_terms() -> None:
    out = aht()[1]
    teacher = torch.randn(3, 10, generator=torch.Generator().manual_seed(5))
    task, distilled = 0.0, 0.0
    for b in range(3):
        student = out.logits[b].softmax(-1).tolist()
        wanted = teacher[b].softmax(-1).tolist()
        distilled += sum(w * math.log(w / s) for w, s in zip(wanted, student, strict=True)) / 3
        task -= math.log(float(out.logits[b].softmax(-1)[b])) / 3
    batch = Batch(torch.arange(3), teacher)
    assert float(TaskLoss()(out, batch)) == pytest.approx(task, abs=1e-5)
    assert float(Distillation()(out, batch)) == pytest.approx(distilled, abs=1e-5)
    spent = float(out.macs_blocks.mean()) / out.costs.static
    assert float(Cost(0.5)(out, NOTHING)) == pytest.approx((spent - 0.5) ** 2, abs=1e-6)


def test_gradient_of_key_weights() -> None:
    """Absent keys (w_j = 0) have a gradient too, with their share held at 1.

    d out_i / d w_j = exp(s_ij) / Z_i (v_j - out_i)."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 3, generator=g) for _ in range(3))
    weight = torch.tensor([[1.0, 0.0, 2.5, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0, 0.5]], requires_grad=True)
    out = attention.weighted(q, k, v, weight)
    up = torch.randn(out.shape, generator=g)
    (grad,) = torch.autograd.grad((out * up).sum(), weight)
    out, weight = out.detach(), weight.detach()
    for b in range(2):
        for j in range(5):
            total = 0.0
            for h in range(2):
                for i in range(5):
                    e = [math.exp(float(q[b, h, i] @ k[b, h, n]) / math.sqrt(3)) for n in range(5)]
                    z = sum(float(weight[b, n]) * e[n] for n in range(5))
                    literal = sum(float(weight[b, n]) * e[n] / z * v[b, h, n] for n in range(5))
                    assert_close(out[b, h, i], literal)
                    share = e[j] / z if weight[b, j] > 0 else min(e[j] / z, 1.0)
                    total += float((share * (v[b, h, j] - literal)) @ up[b, h, i])
            assert float(grad[b, j]) == pytest.approx(total, abs=1e-4)


def test_own_weight_without_a_gradient() -> None:
    """DynamicViT's softmax: e_ij (p_j + (1 - p_j) [i = j]). For p of 0 and 1 only the diagonal's gradient differs."""
    g = torch.Generator().manual_seed(1)
    q, k, v, up = (torch.randn(2, 2, 5, 3, generator=g, dtype=torch.float64) for _ in range(4))
    decision = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 1.0]], requires_grad=True)
    keep = decision.detach()[:, None, :, None] > 0  # rows of dropped tokens are frozen: nothing reads them
    out = attention.weighted(q.float(), k.float(), v.float(), decision, own=False)
    (grad,) = torch.autograd.grad((out * keep * up.float()).sum(), decision)
    p = decision.detach().double().requires_grad_()
    e = (q @ k.transpose(-2, -1) / math.sqrt(3)).exp()
    eye = torch.eye(5, dtype=torch.float64)
    e = e * (p[:, None, None, :] + (1 - p[:, None, None, :]) * eye)
    literal = e / e.sum(-1, keepdim=True) @ v
    assert_close(out.double() * keep, literal * keep, 1e-5)
    (expected,) = torch.autograd.grad((literal * keep * up).sum(), p)
    live = decision.detach() > 0
    assert_close(grad.double()[live], expected[live], 1e-5)


def test_a_halted_token_hears_of_the_task() -> None:
    """Straight-through: the task's gradient reaches the scores of tokens that have left, too."""
    model = tiny("aht", beta=-0.5, straight_through=True).train()
    model.zero_grad()
    weights = []
    halting = adaptivit.policies.halting.Halting
    real = halting.straight_through

    def spy(self: Any) -> Tensor:
        weight = real(self)
        weight.retain_grad()
        weights.append((weight, ~self.going))
        return weight

    halting.straight_through = spy
    try:
        out = model(pictures(4))
    finally:
        halting.straight_through = real
    out.logits.pow(2).sum().backward()
    gone = torch.cat([w.grad[left].abs() for w, left in weights if w.grad is not None])
    assert len(gone) > 10
    assert (gone > 0).double().mean() > 0.9
