"""AHT-ViT beyond the paper: what a token is worth, decisions inside a block, gates a layer, sampled budgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adaptivit
from adaptivit.data import dataset
from adaptivit.data.dataset import Labelled
from adaptivit.data.gpu_pipeline import evaluation_images
from adaptivit.errors import UserError
from adaptivit.policies.halting import Halting
from adaptivit.training.config import TrainConfig
from adaptivit.training.gate_init import calibrate
from adaptivit.training.losses import Batch, Budget
from adaptivit.utils.batch_rng import Share, drawing
from tests.support.models import assert_close, pictures, tiny

WORTH: dict[str, Any] = {"feature": "worth", "leave": "fold", "decide": "between", "gamma": 3.0, "beta": 0.0}


def test_the_first_blocks_are_spared_and_nothing_is_looked_at() -> None:
    model = tiny("aht", more={"depth": 4}, spare=2, **WORTH | {"beta": 30.0})  # whoever may halt does
    out = model(pictures())
    live = out.trace.updated[:, :, 1:].sum(-1)
    assert (live[:2] == out.trace.updated.shape[2] - 1).all()
    assert (live[2] == 0).all()  # already in this block's MLP
    assert (out.trace.attended[2, :, 1:].sum(-1) == live[1]).all()
    looked = {s.present.sum() for s in out.added_macs}
    assert len(out.added_macs) == 2  # attention and similarity, in block 3 alone: nobody is asked in the last
    assert looked


@pytest.mark.parametrize("decide", ["between", "after"])
def test_tokens_leave_where_a_supervisor_is_and_nothing_is_looked_at_elsewhere(decide: str) -> None:
    given = WORTH | {"decide": decide, "gate": "layer", "start": "budget", "gamma": 4.0}
    model = tiny("aht", more={"depth": 8}, spare=1, supervised=(4, 2), **given)
    model.policy.calibrate(model, pictures(), 0.7)
    out = model(pictures())
    live = out.trace.updated if decide == "between" else out.trace.attended
    here = [2, 4] if decide == "between" else [3, 5]  # the first that misses them
    counts = live[:, :, 1:].sum((1, 2)).tolist()
    assert [i for i in range(1, 8) if counts[i] < counts[i - 1]] == here
    assert len(out.added_macs) == 4  # attention and similarity, in two blocks
    assert abs(float((out.macs / model.static_macs(out)).mean()) - 0.7) < 0.05


def test_all_blocks_but_the_last_have_a_supervisor() -> None:
    images, given = pictures(), WORTH | {"beta": -0.5}
    every = tiny("aht", more={"depth": 4}, spare=1, **given)
    listed = tiny("aht", more={"depth": 4}, spare=1, supervised=(1, 2), **given)
    assert torch.equal(every(images).logits, listed(images).logits)


def test_training_starts_where_no_block_is_left_for_a_supervisor() -> None:
    model = tiny("aht", more={"depth": 2}, spare=1, gate="layer", start="budget", **WORTH)
    assert model.policy.calibrate(model, pictures(), 0.7) is not None
    assert model(pictures()).trace.attended.all()


def test_the_least_worth_leave_first() -> None:
    model = tiny("aht", more={"depth": 3}, spare=1, start="budget", **WORTH | {"gamma": 50.0})
    images = pictures()
    model.policy.calibrate(model, images, 0.8)
    out = model(images)
    left = out.trace.attended[1, :, 1:] & ~out.trace.updated[1, :, 1:]
    assert left.any()
    assert not left.all()
    vit = model.vit
    rows = vit.blocks[0](backbone_rows(vit, images))
    block = vit.blocks[1]
    q, k, _ = block.attn.qkv(block.norm1(rows)).unflatten(-1, (3, block.attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    seen = ((q * block.attn.head_dim**-0.5) @ k.transpose(-2, -1)).softmax(-1)[:, :, 0, 1:].mean(1)
    keys = torch.nn.functional.normalize(k.mean(1)[:, 1:], dim=-1)
    alike = keys @ keys.transpose(-2, -1)
    alike.diagonal(dim1=-2, dim2=-1).fill_(-1.0)
    worth = seen.log() + 0.5 * (1 - alike.amax(-1)).clamp_min(1e-6).log()  # n is the same for all here
    assert worth[left].max() < worth[~left].min() + 1e-4


def backbone_rows(vit: Any, images: torch.Tensor) -> torch.Tensor:
    return vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))


@pytest.mark.parametrize("gamma", [3.0, 30.0])
def test_training_starts_at_the_budget(gamma: float) -> None:
    images = pictures(8)
    model = tiny("aht", more={"depth": 6}, start="budget", spare=1, gate="layer", **WORTH | {"gamma": gamma})
    said = model.policy.calibrate(model, images, 0.7)
    assert said is not None
    out = model(images)
    assert float((out.macs_deployed / model.static_macs(out)).mean()) == pytest.approx(0.7, abs=0.03)
    assert model.policy.beta.shape == model.policy.gamma.shape == (6,)
    left = out.trace.updated[:, :, 1:].float().sum((1, 2))[:-1]  # nobody is asked in the last block
    shares = left[1:] / left[:-1]
    assert shares.min() > 0.35  # a share of the patches leaves in every layer, not all of them in one
    if gamma == 30.0:  # the same share, where gates are so sharp that scores do not add up over layers
        assert shares.max() - shares.min() < 0.1
        assert shares.max() < 0.95


@pytest.mark.parametrize("relative", [0.0, 0.4, 1.0])
def test_relative_evidence_takes_off_the_mean_of_an_image(relative: float) -> None:
    """What the supervisor reads, against a loop over images."""
    images = pictures(6)
    plain, model = (
        tiny("aht", more={"depth": 4}, spare=1, relative=share, **WORTH | {"beta": 0.5}) for share in (0.0, relative)
    )
    features = plain(images, aux={"features"}).trace.facts["features"][0]  # before anybody has left
    read = model(images, aux={"features"}).trace.facts["features"][0]
    for image, other in zip(features, read, strict=True):
        assert_close(other, image - relative * image[1:].mean(), 1e-5)
    spread = read[:, 1:].mean(1).std() / features[:, 1:].mean(1).std()
    assert float(spread) == pytest.approx(1 - relative, abs=1e-4)


def test_relative_must_be_a_share() -> None:
    with pytest.raises(UserError, match=r"relative: expected a share in 0\.\.1"):
        tiny("aht", relative=1.5)


def test_the_budget_loss_counts_the_mlp_that_a_token_does_not_enter() -> None:
    model = tiny("aht", more={"depth": 4}, straight_through=True, **WORTH).train()
    out = model(pictures())
    loss = Budget(0.5)(out, Batch())
    share = float(out.macs_blocks.mean()) / out.costs.static
    assert float(loss.detach()) == pytest.approx((share - 0.5) ** 2, rel=1e-5)
    loss.backward()
    assert model.policy.beta.grad is not None
    assert float(model.policy.beta.grad.abs()) > 0


def test_sampled_budgets() -> None:
    images = pictures(8)
    model = tiny("aht", more={"depth": 6}, sample=(0.4, 0.9), start="budget", spare=1, **WORTH)
    model.policy.calibrate(model, images, 0.65)
    low, high = model.policy.shifts.tolist()[::-1]
    assert low < 0 < high

    def cost(shift: float | None = None) -> float:
        out = model(images) if shift is None else forward(model, images, shift)
        return float((out.macs_deployed / model.static_macs(out)).mean())

    assert cost(high) == pytest.approx(0.4, abs=0.05)
    assert cost(low) == pytest.approx(0.9, abs=0.05)
    model.train()
    same = images[:1].expand(64, -1, -1, -1)  # one image, many budgets
    with drawing(None, 3), torch.no_grad():
        spread = model(same).macs_blocks
    assert spread.unique().numel() > 4
    with drawing(None, 3), torch.no_grad():
        assert torch.equal(model(same).macs_blocks, spread)
    with drawing(Share(torch.arange(1, 64, 2), 64), 3), torch.no_grad():  # another process, its share of the draws
        assert torch.equal(model(same[::2]).macs_blocks, spread[1::2])
    model.eval()
    assert model(same).macs_blocks.unique().numel() == 1


def forward(model: Any, images: torch.Tensor, shift: float) -> Any:
    beta = float(model.policy.beta.detach())
    with torch.no_grad():
        model.policy.beta.fill_(beta + shift)
        out = model(images)
        model.policy.beta.fill_(beta)
    return out


@pytest.mark.parametrize("slope", ["score", "logit"])
def test_a_sharp_gate_learns_by_the_slope_of_its_logit(slope: str) -> None:
    """At gamma = 60 scores are 0 or 1: the gradient through c is lost, the one through the logit is not; what is
    computed is the same."""
    images, more = pictures(8), {"depth": 5}
    given = WORTH | {"gamma": 60.0, "straight_through": True, "slope": slope}
    model = tiny("aht", more=more, start="budget", spare=1, gate="layer", **given)
    model.policy.calibrate(model, images, 0.7)
    plain = tiny("aht", more=more, start="budget", spare=1, gate="layer", **given | {"straight_through": False})
    plain.load_state_dict(model.state_dict())
    out = model(images, layout="masked")
    other = plain(images, layout="masked")
    assert torch.equal(out.trace.depth, other.trace.depth)
    assert_close(out.logits, other.logits, 1e-5)
    Budget(0.5).loss(Budget(0.5).sums(out, Batch(torch.zeros(8, dtype=torch.long)))).sum().backward()
    slope_of_beta = model.policy.beta.grad[1:4]
    if slope == "logit":
        assert (slope_of_beta < 0).all(), "more leave as beta grows, and fewer cost less"
    else:
        assert slope_of_beta.abs().max() < 1e-3 * 60


def test_the_slope_is_that_of_the_largest_margin() -> None:
    """Two layers: who halted in the first keeps its margin, whoever goes on has that of the nearest miss."""
    halting = Halting(torch.ones(1, 4, dtype=torch.bool), 1.0, 0.01, tau=0.5)
    margins = [torch.tensor([[0.3, -0.2, -0.9, -0.1]]), torch.tensor([[5.0, 0.4, -0.1, -0.6]])]
    margins = [m.requires_grad_() for m in margins]
    for layer, margin in enumerate(margins, start=1):
        halting.step((margin.detach() >= 0).float(), layer, last=False, margin=margin)
    assert [p.tolist() for p in halting.presence[1:]] == [[[0, 1, 1, 1]], [[0, 0, 1, 1]]]
    halting.presence[2].sum().backward()
    nearest = torch.tensor([[0.3, 0.4, -0.1, -0.1]])
    slope = -torch.sigmoid(nearest / 0.5) * torch.sigmoid(-nearest / 0.5) / 0.5
    first = torch.tensor([[True, False, False, True]])
    assert_close(margins[0].grad, torch.where(first, slope, 0), 1e-6)
    assert_close(margins[1].grad, torch.where(first, 0, slope), 1e-6)


def test_gates_start_alike_whatever_the_plan_adds() -> None:
    """With an acting plan the offsets take up what fresh planners add, so as many leave each layer, but for one or two
    at the edge."""
    images, given = pictures(8), WORTH | {"gamma": 30.0}
    live = []
    for weight in (1e-6, 5.0):  # both pay for their planners
        model = tiny("aht", more={"depth": 8}, start="budget", spare=2, gate="layer", plan_weight=weight, **given)
        for planner in model.policy.planners.values():
            torch.nn.init.zeros_(planner.out.weight)
        model.policy.calibrate(model, images, 0.7)
        live.append(model(images).trace.updated.sum((1, 2)))
    assert (live[0] - live[1]).abs().max() <= 2
    assert live[0].unique().numel() >= 5


def test_a_plan_held_against_its_image_says_who_leaves_and_not_how_many() -> None:
    """Plans that are all deeper change nothing; a plan that is deeper than the image's others keeps its token."""
    images, given = pictures(4), WORTH | {"gamma": 1.0, "plan_weight": 5.0, "plan_against": "image"}
    model = tiny("aht", more={"depth": 8}, start="budget", spare=2, gate="layer", stages=(2,), **given)
    model.policy.calibrate(model, images, 0.6)
    planner = model.policy.planners["2"]
    with torch.no_grad():
        planner.out.weight.mul_(0.5)  # nowhere near the ends of its range
        before = model(images, aux={"plan"}).trace
        planner.low, planner.high = planner.low + 2, planner.high + 2
        after = model(images, aux={"plan"}).trace
    plan, depth = before.facts["plan"][0][:, 1:], before.depth[:, 1:].float()
    assert_close(after.facts["plan"][0][:, 1:], plan + 2, 1e-5)
    assert torch.equal(after.updated, before.updated)
    assert plan.std() > 0.1
    assert torch.corrcoef(torch.stack([plan.flatten(), depth.flatten()]))[0, 1] > 0.5


def test_gates_that_do_not_learn_start_at_the_budget_too() -> None:
    images = torch.rand(64, 32, 32, 3).mul(255).byte().numpy()
    model = tiny("aht", more={"depth": 6}, start="budget", spare=1, gate="layer", **WORTH)
    found = Labelled("here", images, [0] * 64, ("a",))
    calibrate(model, {}, TrainConfig("", budget=0.0, budget_share=0.6), found, "cpu")
    batch = next(dataset.batches(evaluation_images(found, model.preprocessing, "cpu"), dataset.in_order(64, 64))).images
    out = model(batch)
    assert float((out.macs_deployed / model.static_macs(out)).mean()) == pytest.approx(0.6, abs=0.03)


def test_a_checkpoint_keeps_its_shifts(tmp_path: Any) -> None:
    model = tiny("aht", sample=(0.4, 0.9), **WORTH)
    with torch.no_grad():
        model.policy.shifts.copy_(torch.tensor([2.5, -1.5]))
    model.save_pretrained(tmp_path / "saved")
    assert adaptivit.load(tmp_path / "saved").policy.shifts.tolist() == [2.5, -1.5]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decide": "between"}, "decide: expected after, or a feature that attention shows, got 'between, fc1'"),
        (WORTH | {"class_token": "mean_field"}, "decide: expected after, or class_token=stays"),
        ({"spare": 99}, r"spare: expected less than 6"),
        ({"spare": -1}, "spare: expected a number of blocks >= 0"),
        ({"supervised": (1, 5)}, r"supervised: expected block numbers in 0..4, got 5"),
        ({"supervised": (1, 3), "spare": 2}, r"supervised: expected block numbers in 2..4, got 1"),
        ({"supervised": ()}, r"supervised: expected at least one block number"),
        ({"supervised": (1, 1)}, r"supervised: expected different block numbers"),
        ({"supervised": (5,), "spare": 5}, r"supervised: expected nothing, since there is no block for it, got 5"),
        ({"sample": (0.9, 0.4)}, "sample: expected two shares, the lower first"),
        ({"sample": (0.5,)}, "sample: expected two shares"),
    ],
)
def test_bad_settings(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        tiny("aht", **given)
