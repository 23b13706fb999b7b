"""AHT-ViT's improved form: merge scores, decisions inside a block, gates of single blocks, sampled budgets."""

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
from adaptivit.training.config import LossConfig, TrainConfig
from adaptivit.training.gate_init import init_gate
from adaptivit.training.losses import Batch, Cost
from adaptivit.utils.batch_rng import BatchSlice, drawing
from tests.support.models import assert_close, pictures, tiny

SHARED: dict[str, Any] = {"gate": "shared", "center_per_image": 0.0, "gamma": 3.0, "beta": 0.0}


def test_tokens_halt_in_the_halting_blocks_alone() -> None:
    model = tiny("aht_merge", more={"depth": 4}, halting_blocks=(2,), **SHARED | {"beta": 30.0})  # all that may halt do
    out = model(pictures())
    live = out.trace.updated[:, :, 1:].sum(-1)
    assert (live[:2] == out.trace.updated.shape[2] - 1).all()
    assert (live[2] == 0).all()  # already in this block's MLP
    assert (out.trace.attended[2, :, 1:].sum(-1) == live[1]).all()
    looked = {s.present.sum() for s in out.added_macs}
    assert len(out.added_macs) == 2  # attention and similarity, in block 3 alone: none are needed in the last
    assert looked


@pytest.mark.parametrize("point", ["before_mlp", "after"])
def test_evidence_is_collected_in_the_halting_blocks_alone(point: str) -> None:
    given = SHARED | {"halt_point": point, "gate": "block", "gamma": 4.0}
    model = tiny("aht_merge", more={"depth": 8}, halting_blocks=(4, 2), **given)
    model.policy.init_gate(model, pictures(), 0.7)
    out = model(pictures())
    live = out.trace.updated if point == "before_mlp" else out.trace.attended
    here = [2, 4] if point == "before_mlp" else [3, 5]  # the first that misses them
    counts = live[:, :, 1:].sum((1, 2)).tolist()
    assert [i for i in range(1, 8) if counts[i] < counts[i - 1]] == here
    assert len(out.added_macs) == 4  # attention and similarity, in two blocks
    assert abs(float((out.macs / model.static_macs(out)).mean()) - 0.7) < 0.05


def test_training_starts_where_no_block_is_left_to_halt_in() -> None:
    model = tiny("aht_merge", more={"depth": 2}, beta=0.0)
    assert model.policy.init_gate(model, pictures(), 0.7) is not None
    assert model(pictures()).trace.attended.all()


def test_the_lowest_merge_scores_leave_first() -> None:
    model = tiny("aht_merge", more={"depth": 3}, **SHARED | {"gamma": 50.0})
    images = pictures()
    model.policy.init_gate(model, images, 0.8)
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
    score = seen.log() + 0.5 * (1 - alike.amax(-1)).clamp_min(1e-6).log()  # n is the same for all here
    assert score[left].max() < score[~left].min() + 1e-4


def backbone_rows(vit: Any, images: torch.Tensor) -> torch.Tensor:
    return vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))


@pytest.mark.parametrize("gamma", [3.0, 30.0])
def test_training_starts_at_the_budget(gamma: float) -> None:
    images = pictures(8)
    model = tiny("aht_merge", more={"depth": 6}, **SHARED | {"gate": "block", "gamma": gamma})
    said = model.policy.init_gate(model, images, 0.7)
    assert said is not None
    out = model(images)
    assert float((out.macs_deployed / model.static_macs(out)).mean()) == pytest.approx(0.7, abs=0.03)
    assert model.policy.beta.shape == model.policy.gamma.shape == (6,)
    left = out.trace.updated[:, :, 1:].float().sum((1, 2))[:-1]  # none are needed in the last block
    shares = left[1:] / left[:-1]
    assert shares.min() > 0.35  # a share of the patches leaves in every layer, not all of them in one
    if gamma == 30.0:  # the same share, where gates are so sharp that scores do not add up over layers
        assert shares.max() - shares.min() < 0.1
        assert shares.max() < 0.95


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_centring_takes_off_the_mean_of_an_image(share: float) -> None:
    """What the gate reads, against a loop over images."""
    images = pictures(6)
    plain, model = (
        tiny("aht_merge", more={"depth": 4}, **SHARED | {"center_per_image": s, "beta": 0.5}) for s in (0.0, share)
    )
    features = plain(images, aux={"features"}).trace.facts["features"][0]  # before a token has left
    read = model(images, aux={"features"}).trace.facts["features"][0]
    for image, other in zip(features, read, strict=True):
        assert_close(other, image - share * image[1:].mean(), 1e-5)
    spread = read[:, 1:].mean(1).std() / features[:, 1:].mean(1).std()
    assert float(spread) == pytest.approx(1 - share, abs=1e-4)


def test_centring_is_a_share() -> None:
    with pytest.raises(UserError, match=r"center_per_image: expected a share in 0\.\.1"):
        tiny("aht_merge", center_per_image=1.5)


def test_the_budget_loss_counts_the_mlp_that_a_token_does_not_enter() -> None:
    model = tiny("aht_merge", more={"depth": 4}, **SHARED | {"surrogate": "score"}).train()
    out = model(pictures())
    loss = Cost(0.5)(out, Batch())
    share = float(out.macs_blocks.mean()) / out.costs.static
    assert float(loss.detach()) == pytest.approx((share - 0.5) ** 2, rel=1e-5)
    loss.backward()
    assert model.policy.beta.grad is not None
    assert float(model.policy.beta.grad.abs()) > 0


def test_sampled_budgets() -> None:
    images = pictures(8)
    model = tiny("aht_merge", more={"depth": 6}, train_budget_range=(0.4, 0.9), **SHARED)
    model.policy.init_gate(model, images, 0.65)
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
    with drawing(BatchSlice(torch.arange(1, 64, 2), 64), 3), torch.no_grad():  # another process, its share of the draws
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


@pytest.mark.parametrize("surrogate", ["score", "logit"])
def test_a_sharp_gate_learns_by_the_slope_of_its_logit(surrogate: str) -> None:
    """At gamma = 60 scores are 0 or 1: the gradient through c is lost, the one through the logit is not; what is
    computed is the same."""
    images, more = pictures(8), {"depth": 5}
    given = SHARED | {"gate": "block", "gamma": 60.0, "surrogate": surrogate, "surrogate_width": 0.25}
    model = tiny("aht_merge", more=more, **given)
    model.policy.init_gate(model, images, 0.7)
    plain = tiny("aht_merge", more=more, straight_through=False, **given)
    plain.load_state_dict(model.state_dict())
    out = model(images, layout="masked")
    other = plain(images, layout="masked")
    assert torch.equal(out.trace.depth, other.trace.depth)
    assert_close(out.logits, other.logits, 1e-5)
    Cost(0.5).loss(Cost(0.5).sums(out, Batch(torch.zeros(8, dtype=torch.long)))).sum().backward()
    slope_of_beta = model.policy.beta.grad[1:4]
    if surrogate == "logit":
        assert (slope_of_beta < 0).all(), "more leave as beta grows, and fewer cost less"
    else:
        assert slope_of_beta.abs().max() < 1e-3 * 60


def test_the_slope_is_that_of_the_largest_margin() -> None:
    """Two layers: a token halted in the first keeps its margin, the others have that of the nearest miss."""
    halting = Halting(torch.ones(1, 4, dtype=torch.bool), 1.0, 0.01, surrogate_width=0.5)
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


def test_gates_that_do_not_learn_start_at_the_budget_too() -> None:
    images = torch.rand(64, 32, 32, 3).mul(255).byte().numpy()
    model = tiny("aht_merge", more={"depth": 6}, beta=0.0, gamma=3.0)
    found = Labelled("here", images, [0] * 64, ("a",))
    init_gate(model, {}, TrainConfig("", loss=LossConfig(cost=0.0, cost_target=0.6)), found, "cpu")
    batch = next(dataset.batches(evaluation_images(found, model.preprocessing, "cpu"), dataset.in_order(64, 64))).images
    out = model(batch)
    assert float((out.macs_deployed / model.static_macs(out)).mean()) == pytest.approx(0.6, abs=0.03)


def test_a_checkpoint_keeps_its_shifts(tmp_path: Any) -> None:
    model = tiny("aht_merge", train_budget_range=(0.4, 0.9), **SHARED)
    with torch.no_grad():
        model.policy.shifts.copy_(torch.tensor([2.5, -1.5]))
    model.save_pretrained(tmp_path / "saved")
    assert adaptivit.load(tmp_path / "saved").policy.shifts.tolist() == [2.5, -1.5]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"feature": "fc1"}, "halt_point: expected 'after' with a feature that attention does not show, got 'fc1'"),
        ({"halting_blocks": (1, 5)}, r"halting_blocks: expected block numbers in 0..4, got 5"),
        ({"halting_blocks": ()}, r"halting_blocks: expected at least one block number"),
        ({"halting_blocks": (1, 1)}, r"halting_blocks: expected different block numbers"),
        ({"train_budget_range": (0.9, 0.4)}, "train_budget_range: expected two shares, the lower first"),
        ({"spare": 2}, "aht_merge: the setting spare is called halting_blocks now"),
    ],
)
def test_bad_settings(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        tiny("aht_merge", **given)
