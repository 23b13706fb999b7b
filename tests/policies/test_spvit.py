"""SPViT against a loop over the patches of one image, and with numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adaptivit
from adaptivit.errors import UserError
from adaptivit.policies.spvit import Selector, package
from adaptivit.training.losses import Batch, KeepRatio
from tests.support.models import ALL_LAYOUTS, LAYOUTS, TINY, assert_close, pictures
from tests.support.reference_vit import best, embedded, logits_of, randomised, whole


def keep_chances(selector: Any, x: Tensor) -> list[float]:
    """[n, D] rows that are all in the mean -> the chance of keeping of each, head by head."""
    heads, d = selector.heads, x.shape[1] // selector.heads
    weights = selector.senet(torch.stack([x[:, h * d : (h + 1) * d].mean(1) for h in range(heads)], 1))
    found = torch.zeros(len(x))
    for h in range(heads):
        z = selector.in_conv[h](x[:, h * d : (h + 1) * d])
        z = torch.cat([z[:, : d // 2], z[:, d // 2 :].mean(0).expand(len(z), -1)], 1)
        found += weights[:, h] * F.softmax(selector.out_conv[h](z), -1)[:, 0]
    return (found / weights.sum(1)).tolist()


@pytest.mark.parametrize("select", ["threshold", "count"])
@torch.no_grad()
def test_inference(select: str) -> None:
    model = randomised("spvit", select=select, keep=(0.7, 0.39, 0.21))
    several = set()
    for layout in ALL_LAYOUTS if select == "count" else LAYOUTS:
        out = model(pictures(), layout=layout)
        for b, image in enumerate(pictures()):
            x, packages = embedded(model.vit, image), 0
            for layer, block in enumerate(model.vit.blocks):
                if layer in (1, 3, 4):
                    stage = (1, 3, 4).index(layer)
                    chances = keep_chances(model.policy.score_predictor[stage], x[1:])
                    scored = dict(enumerate(chances[: len(chances) - packages], 1))  # the packages are the last rows
                    if select == "count":
                        kept = sorted(best(scored, int(16 * (0.7, 0.39, 0.21)[stage])))
                    else:
                        kept = [i for i in scored if scored[i] >= 0.5]
                    gone = [i for i in scored if i not in kept]
                    more = [sum(scored[i] * x[i] for i in gone) / sum(scored[i] for i in gone)] if gone else []
                    x = torch.stack([x[0], *(x[i] for i in kept), *x[len(x) - packages :], *more])
                    packages += len(more)
                    several.add(len(kept))
                    assert float(out.trace.fact("kept")[stage, b]) == pytest.approx(len(kept) / 16)
                assert int(out.trace.live[layer, b]) == len(x)
                x = whole(block, x)
            assert_close(out.logits[b], logits_of(model.vit, x))
    assert len(several) == 3 if select == "count" else len(several) > 3


@torch.no_grad()
def test_a_package_by_hand() -> None:
    """Patches 1, 2 and 4 leave with scores 0.1, 0.3, 0.1: shares 0.2, 0.6, 0.2, in the slot of the best, 2. The second
    image prunes nothing."""
    score = torch.tensor([[0.9, 0.1, 0.3, 0.8, 0.1]]).expand(2, -1).log()
    leaving = torch.tensor([[False, True, True, False, True], [False] * 5])
    merge = package(leaving, score)
    assert merge.target.tolist() == [[0, 2, 2, 3, 2], [0, 1, 2, 3, 4]]
    assert_close(merge.source_weight, torch.tensor([[1.0, 0.2, 0.6, 1.0, 0.2], [1.0] * 5]))
    rows = torch.tensor([7.0, 10.0, 20.0, 8.0, 30.0])
    assert float((merge.source_weight[0] * rows)[[1, 2, 4]].sum()) == pytest.approx(20.0)


@torch.no_grad()
def test_a_score_by_hand() -> None:
    """Two heads that keep at 0.8 and 0.4, weighted 0.75 and 0.25: 0.75 0.8 + 0.25 0.4 = 0.7."""
    selector = Selector(8, 2)
    for p in selector.parameters():
        p.zero_()
    selector.senet[2].bias.copy_(torch.tensor([0.75, 0.25]).logit())
    for out, chance in zip(selector.out_conv, (0.8, 0.4), strict=True):
        out[-1].bias.copy_(torch.tensor([chance, 1 - chance]).log())
    found = selector(torch.randn(3, 8), lambda values: values.mean(0).expand(3, -1))
    assert_close(found.exp(), torch.tensor([[0.7, 0.3]]).expand(3, -1))


@torch.no_grad()
def test_a_file_with_the_selectors_beside_the_backbone(tmp_path: Path) -> None:
    """The authors' names; a file whose heads share one MLP lists it for every head."""
    model = randomised("spvit")
    state = model.vit.state_dict() | model.policy.state_dict()
    assert {"score_predictor.2.senet.2.bias", "score_predictor.0.in_conv.2.0.weight"} < set(state)
    torch.save({"model": state}, tmp_path / "public.pth")
    again = adaptivit.create(TINY, "spvit", weights=tmp_path / "public.pth")
    assert_close(again(pictures()).logits, model(pictures()).logits, 0.0)


@torch.no_grad()
def test_a_shift_is_added_to_the_logit_of_leaving() -> None:
    model, images = randomised("spvit"), pictures(8)
    model.calibrate(images, "-30%")
    assert float(model(images).macs_deployed.mean()) / model(images).costs.static == pytest.approx(0.7, abs=0.02)
    none, all_ = (model(images, budget=b).trace.fact("kept")[0] for b in ("-1%", "-60%"))
    assert none.mean() > all_.mean()


def test_the_share_of_the_first_stage_is_the_dial_of_counts() -> None:
    policy = adaptivit.create(TINY, "spvit", select="count", keep=(0.5, 0.25, 0.25)).policy
    assert policy.at_position(0.7).settings.keep == pytest.approx((0.7, 0.49, 0.49))
    assert policy.at_position(1.0).settings.keep == (1.0, 1.0, 1.0)
    all_first = adaptivit.create(TINY, "spvit", select="count", keep=(1.0, 0.5, 0.3)).policy
    assert all_first.at_position(0.5).settings.keep == (0.5, 0.25, 0.125)


def test_training_draws_and_the_task_reaches_every_selector() -> None:
    model = randomised("spvit").train()
    torch.manual_seed(0)
    out = model(pictures())
    assert out.layout == "masked"
    weights = [step.decision.key_weight for step in out.trace.steps]
    assert out.trace.fact("kept").requires_grad
    kept = out.trace.fact("kept").detach()
    for stage, weight in enumerate(weights):  # kept patches, class token and packages are keys, nothing else
        assert torch.equal(weight > 0.5, out.trace.attended[(1, 3, 4)[stage]])
        assert (weight[:, 1:] > 0.5).sum(-1).tolist() == [round(16 * float(k)) + stage + 1 for k in kept[stage]]
    ratio = sum((float(k) - r) ** 2 for stage, r in zip(kept, (0.7, 0.39, 0.21), strict=True) for k in stage) / 9
    assert float(KeepRatio()(out, Batch()).detach()) == pytest.approx(ratio, abs=1e-6)
    out.logits.pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.policy.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_every_patch_is_pruned(training: bool) -> None:
    """One package is left of the first stage; the next ones have nothing to prune."""
    model = randomised("spvit").train(training)
    with torch.no_grad():
        for selector in model.policy.score_predictor:
            for out in selector.out_conv:
                out[-1].bias.copy_(torch.tensor([-40.0, 40.0]))
    out = model(pictures())
    assert out.trace.live.tolist() == [[17] * 3, *[[2] * 3] * 5]
    (out.logits.sum() + KeepRatio()(out, Batch())).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_shares_are_one_a_stage() -> None:
    for given in ({"blocks": (1, 2)}, {"keep": (0.5, 0.4)}, {"keep": (0.5, 0.4), "blocks": (2,)}):
        with pytest.raises(UserError, match=r"keep: expected \d shares, one a stage, got \d"):
            adaptivit.create(TINY, "spvit", **given)
    assert len(adaptivit.create(TINY | {"depth": 3}, "spvit").policy.score_predictor) == 2  # a shallow one has fewer
    assert math.isclose(adaptivit.create(TINY, "spvit", keep="0.5+0.4", blocks="1+2").policy.settings.keep[1], 0.4)
