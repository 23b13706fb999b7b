"""DynamicViT and EViT against loops over the tokens of one image, as their authors' code has it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivit.training.losses import Batch, Features, KeepRatio
from tests.support.models import ALL_LAYOUTS, assert_close, pictures
from tests.support.reference_vit import attention, best, embedded, logits_of, mlp, predicted, randomised, whole

# -- DynamicViT -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "stages"), [(0.7, (1, 3, 4)), (0.5, (0, 5)), (0.1, (2, 3)), (1.0, (1, 3, 4))])
@torch.no_grad()
def test_dynamicvit_inference(keep: float, stages: tuple[int, ...]) -> None:
    """The int(keep^s 16) best stay, one at least; features and their mean over the patches that are still there."""
    model = randomised("dynamicvit", keep=keep, **({} if stages == (1, 3, 4) else {"blocks": stages}))
    for layout in ALL_LAYOUTS:
        out = model(pictures(), layout=layout)
        for b, image in enumerate(pictures()):
            x, slots = embedded(model.vit, image), list(range(17))
            for layer, block in enumerate(model.vit.blocks):
                if layer in stages:
                    s = stages.index(layer)
                    log_p = predicted(model.policy.score_predictor[s], x[1:], torch.ones(len(x) - 1))
                    assert_close(out.trace.fact("scores")[s, b, slots[1:]], log_p[:, 0])
                    count = max(1, int(keep ** (s + 1) * 16))
                    kept = sorted(best({i + 1: float(v) for i, v in enumerate(log_p[:, 0])}, count))
                    x, slots = x[[0, *kept]], [0, *(slots[i] for i in kept)]
                    assert float(out.trace.fact("kept")[s, b]) == pytest.approx(count / 16)
                assert out.trace.attended[layer, b].nonzero()[:, 0].tolist() == slots
                x = whole(block, x)
            assert_close(out.logits[b], logits_of(model.vit, x))
            assert out.trace.fact("kept_last")[b].nonzero()[:, 0].tolist() == slots[1:]


def gumbels(seed: int, stages: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [-torch.empty(3, 17, 2).exponential_().log() for _ in range(stages)]


def authors(
    model: Any, image: Tensor, b: int, noise: list[Tensor], decision: Any = None
) -> tuple[Tensor, list[Tensor]]:
    """Training as the public code has it: no token is removed, and the softmax has a policy. Returns rows, decisions.

    A hard decision has the gradient of its Gumbel softmax.
    """
    vit, x = model.vit, embedded(model.vit, image)
    p, kept = torch.ones(16), []
    for layer, block in enumerate(vit.blocks):
        if layer in model.policy.blocks:
            s = model.policy.blocks.index(layer)
            soft = (predicted(model.policy.score_predictor[s], x[1:], p) + noise[s][b, 1:]).softmax(-1)[:, 0]
            p = ((soft > 0.5).float() - soft.detach() + soft) * p
            kept.append(p)
        q, k, v = block.attn.qkv(block.norm1(x)).reshape(17, 3, 3, 8).permute(1, 2, 0, 3)
        s_ij = q @ k.mT / math.sqrt(8)
        a = s_ij.softmax(-1)
        if kept:
            policy = torch.cat([torch.ones(1), p])
            e = (s_ij - s_ij.amax(-1, keepdim=True)).exp() * (policy + (1 - policy)[:, None] * torch.eye(17))
            a = (e + 1e-6 / 17) / (e.sum(-1, keepdim=True) + 1e-6)
        x = x + block.attn.proj((a @ v).transpose(0, 1).flatten(1))
        x = mlp(block, x)
    return x, kept


@pytest.mark.parametrize("seed", [0, 1])
@torch.no_grad()
def test_dynamicvit_training(seed: int) -> None:
    """With the same Gumbel noise: the decisions, the logits and the two losses of the public code."""
    model = randomised("dynamicvit").train()
    torch.manual_seed(seed)
    out = model(pictures(), aux=("patches",))
    noise, teacher = gumbels(seed, 3), torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(9))
    ratio, squared, count = 0.0, 0.0, 0
    for b, image in enumerate(pictures()):
        x, kept = authors(model, image, b, noise)
        assert_close(out.logits[b], logits_of(model.vit, x), 2e-5)
        for s, p in enumerate(kept):
            ratio += (float(p.sum()) / 16 - 0.7 ** (s + 1)) ** 2 / 9
            assert float(out.trace.fact("kept")[s, b]) == pytest.approx(float(p.sum()) / 16)
        assert out.trace.fact("kept_last")[b, 1:].tolist() == (kept[-1] > 0.5).tolist()
        for i in (kept[-1] > 0.5).nonzero()[:, 0].tolist():
            squared += float((model.vit.norm(x[1 + i]) - teacher[b, i]).pow(2).mean())
            count += 1
    assert 0 < count < 48
    assert float(KeepRatio()(out, Batch())) == pytest.approx(ratio, abs=1e-6)
    assert float(Features()(out, Batch(teacher_patches=teacher))) == pytest.approx(squared / count, rel=1e-4)


@pytest.mark.parametrize("stage", [5, 2])
def test_dynamicvit_gradient_is_the_public_codes(stage: int) -> None:
    """Before the last block, where frozen rows of dropped patches make no difference; and earlier, if
    no token is dropped and a token's attention to itself must not count."""
    model = randomised("dynamicvit", blocks=(stage,)).train()
    with torch.no_grad():
        model.vit.blocks[5].attn.qkv.weight[:48] *= 0.3  # small logits: no dropped key's share is held at 1
        model.policy.score_predictor[0].out_conv[-1].bias[0] += 4.0 if stage == 2 else 0.0
    for seed in range(100):
        torch.manual_seed(seed)
        out = model(pictures())
        if bool((out.trace.fact("kept") == 1).all()) == (stage == 2):
            break
    (out.logits.pow(2).sum() + KeepRatio()(out, Batch())).backward()
    ours = {k: p.grad.clone() for k, p in model.policy.named_parameters()}
    model.zero_grad()
    noise, loss = gumbels(seed, 1), torch.zeros(())
    for b, image in enumerate(pictures()):
        x, kept = authors(model, image, b, noise)
        assert (kept[0] > 0.5).all() == (stage == 2)
        loss = loss + logits_of(model.vit, x).pow(2).sum() + (kept[0].sum() / 16 - 0.7) ** 2 / 3
    loss.backward()
    for name, p in model.policy.named_parameters():
        assert p.grad is not None
        scale = float(p.grad.abs().max())
        assert scale > 0
        assert_close(ours[name] / scale, p.grad / scale, 1e-3)


def test_the_task_reaches_every_predictor() -> None:
    model = randomised("dynamicvit").train()
    torch.manual_seed(0)
    model(pictures()).logits.pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.policy.parameters())


@pytest.mark.parametrize("removal", ["drop", "merge"])
def test_nothing_is_kept(removal: str) -> None:
    """A training pass may drop every patch: no 0 / 0 in the mean, the features' loss or the gradients."""
    model = randomised("dynamicvit", removal=removal).train()
    with torch.no_grad():
        for predictor in model.policy.score_predictor:
            predictor.out_conv[-1].bias.copy_(torch.tensor([-40.0, 40.0]))
    out = model(pictures(), aux=("patches",))
    assert not out.trace.fact("kept_last").any()
    teacher = torch.randn(3, 16, 24)
    assert float(Features()(out, Batch(teacher_patches=teacher)).detach()) == 0.0
    assert float(KeepRatio()(out, Batch()).detach()) == pytest.approx(sum(0.7 ** (2 * s) for s in (1, 2, 3)) / 3)
    (out.logits.sum() + KeepRatio()(out, Batch()) + Features()(out, Batch(teacher_patches=teacher))).backward()
    assert out.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@torch.no_grad()
def test_features_without_the_fact_are_those_of_the_last_block() -> None:
    out = randomised("evit", fuse=False)(pictures(), aux=("patches",))
    teacher, last = torch.zeros(3, 16, 24), out.trace.updated[-1, :, 1:]
    expected = [float(out.patches[b, i].pow(2).mean()) for b, i in last.nonzero()]
    assert float(Features()(out, Batch(teacher_patches=teacher))) == pytest.approx(
        sum(expected) / len(expected), rel=1e-5
    )
    with pytest.raises(ValueError, match="patches"):
        Features()(replace(out, patches=None), Batch(teacher_patches=teacher))


# -- EViT -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["class", "distilled", "deit3", "qk_norm"])
@pytest.mark.parametrize("fuse", [True, False])
@torch.no_grad()
def test_evit(fuse: bool, kind: str) -> None:
    """The class row's ceil(0.7 n) best stay; the others become one patch, sum a_j x_j with a_j as it is."""
    model = randomised("evit", kind, keep=0.7, fuse=fuse)
    vit, prefix = model.vit, model.shape.num_prefix_tokens
    for layout in ALL_LAYOUTS:
        out = model(pictures(), layout=layout)
        for b, image in enumerate(pictures()):
            x = embedded(vit, image)
            for layer, block in enumerate(vit.blocks):
                x, a, _ = attention(block, x)
                if layer in (1, 3, 4):
                    row = {i: sum(float(a[h, 0, i]) for h in range(3)) / 3 for i in range(prefix, len(x))}
                    kept = best(row, math.ceil(0.7 * len(row)))
                    fused = [sum(row[i] * x[i] for i in row if i not in kept)] if fuse else []
                    x = torch.stack([*x[:prefix], *(x[i] for i in kept), *fused])
                x = mlp(block, x)
                assert int(out.trace.live_mlp[layer, b]) == len(x)
            assert_close(out.logits[b], logits_of(vit, x))


@pytest.mark.parametrize("keep", [1.0, 0.97])
@torch.no_grad()
def test_evit_that_keeps_all_is_static(keep: float) -> None:
    """ceil(0.97 16) = 16: no token leaves or is fused."""
    model = randomised("evit", keep=keep)
    out = model(pictures())
    assert_close(out.logits, model.vit(pictures()))
    assert not out.trace.steps


def test_evit_keep_rate_falls_with_the_epochs() -> None:
    model = randomised("evit", keep=0.5, warm_epochs=10, shrink_epochs=16, blocks=(2,), fuse=False)
    for epoch, keep in (
        (0, 1.0),
        (9.9, 1.0),
        (10, 1.0),
        (14, 0.5 + 0.25 * (1 + 0.5**0.5)),
        (18, 0.75),
        (26, 0.5),
        (40, 0.5),
    ):
        model.policy.schedule(epoch)
        assert model.train()(pictures()).trace.live[3].tolist() == [1 + math.ceil(keep * 16 - 1e-9)] * 3
        assert model.eval()(pictures()).trace.live[3].tolist() == [9] * 3
    plain = randomised("evit", keep=0.5)
    plain.policy.schedule(0.0)  # without a schedule the rate is the same from the start
    assert plain.policy.keep_now == pytest.approx(0.5)
    stepped = randomised("evit", keep=0.5, warm_epochs=2)
    for epoch, keep in ((0, 1.0), (1.9, 1.0), (2, 0.5), (3, 0.5)):
        stepped.policy.schedule(epoch)
        assert stepped.policy.keep_now == pytest.approx(keep)


def test_evit_fused_patch_passes_a_gradient_to_its_weights() -> None:
    """The fused patch's weights are attention: queries of the class token get its gradient."""
    model = randomised("evit", blocks=(4,)).train()
    model(pictures()).logits.pow(2).sum().backward()
    through = model.vit.blocks[4].attn.qkv.weight.grad.clone()
    model.zero_grad()
    model.policy.traits = replace(model.policy.traits, evidence_grad=False)
    model(pictures()).logits.pow(2).sum().backward()
    assert not torch.allclose(through, model.vit.blocks[4].attn.qkv.weight.grad)
