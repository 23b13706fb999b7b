"""Patch Slimming: its masks against a loop, by hand and on a small model; and what keeps them."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adaptivit
from adaptivit.errors import UserError, WeightsError
from adaptivit.policies.patch_slimming import Fit
from adaptivit.testing import same_outputs
from tests.support.commands import refused, run, train
from tests.support.data_sets import folder
from tests.support.models import ALL_LAYOUTS, TINY, assert_close, pictures, tiny
from tests.support.reference_vit import attention, embedded, logits_of, mlp, randomised

COUNTS = (14, 9, 9, 5, 2)


def fitted(**given: Any) -> Any:
    model = randomised("patch_slimming", **given)
    model.policy.init_gate(model, pictures(8, seed=5))
    return model


@torch.no_grad()
def test_inference() -> None:
    """A patch is a key of the next block if it is in the mask of this one; in the last block none goes on."""
    model = fitted(counts=COUNTS)
    rank = model.policy.rank.tolist()
    assert sorted(rank) == list(range(16))
    assert rank != list(range(16))
    for layout in ALL_LAYOUTS:
        out = model(pictures(), layout=layout)
        assert out.trace.live_mlp[:, 0].tolist() == [1 + n for n in (*COUNTS, 0)]
        for b, image in enumerate(pictures()):
            x, slots = embedded(model.vit, image), list(range(17))
            for block, count in zip(model.vit.blocks, (*COUNTS, 0), strict=True):
                x = attention(block, x)[0]
                stay = [i for i, slot in enumerate(slots) if slot == 0 or rank[slot - 1] < count]
                x, slots = mlp(block, x[stay]), [slots[i] for i in stay]
            assert_close(out.logits[b], logits_of(model.vit, x))


def errors(vit: Any, layer: int, image: Tensor, kept: list[int], keys: list[int]) -> tuple[float, float]:
    """Squared change of the `kept` tokens after a block if it has the `keys` alone, and their square."""
    x = embedded(vit, image)
    for block in vit.blocks[:layer]:
        x = mlp(block, attention(block, x)[0])
    block = vit.blocks[layer]
    whole = mlp(block, attention(block, x)[0])[kept]
    less = mlp(block, attention(block, x[keys])[0])[[keys.index(i) for i in kept]]
    return float((less - whole).square().sum()), float(whole.square().sum())


@torch.no_grad()
def test_masks_top_down() -> None:
    """The scores by loops over images, heads and tokens, and the fewest patches within the tolerance."""
    model, images, step, tolerance = tiny("patch_slimming", step=2, tolerance=0.05), pictures(3), 2, 0.05
    model.policy.init_gate(model, images)
    kept, counts = [0], []
    reach = [{0: 1.0} for _ in images]
    for layer in (5, 4, 3, 2, 1):
        score, after = dict.fromkeys(range(17), 0.0), []
        for b, image in enumerate(images):
            x = embedded(model.vit, image)
            for block in model.vit.blocks[:layer]:
                x = mlp(block, attention(block, x)[0])
            block = model.vit.blocks[layer]
            a = attention(block, x)[1]
            v = block.attn.qkv(block.norm1(x)).reshape(17, 3, 3, 8)[:, 2]
            flow = [[sum(w * float(a[h, i, t]) for i, w in reach[b].items()) for t in range(17)] for h in range(3)]
            for t in range(17):
                score[t] += sum(flow[h][t] ** 2 * float(v[t, h].square().sum()) for h in range(3)) / 3
            after.append({t: reach[b].get(t, 0.0) + sum(f[t] for f in flow) / 3 for t in range(17)})
        order = kept + sorted((t for t in range(17) if t not in kept), key=lambda t: -score[t])
        for more in range(max(len(kept) - 1, 1), 17 + step, step):
            parts = [errors(model.vit, layer, image, kept, sorted(order[: 1 + more])) for image in images]
            if sum(e for e, _ in parts) <= tolerance * sum(s for _, s in parts):
                break
        kept = order[: 1 + min(more, 16)]
        counts.append(len(kept) - 1)
        reach = [{t: found[t] for t in kept} for found in after]
    assert model.policy.counts == tuple(reversed(counts))
    assert len(set(counts)) > 2
    rank = model.policy.rank.tolist()
    assert [t - 1 for t in order[1:]] == sorted(range(16), key=lambda p: rank[p])


class ByHand(Fit):
    """One image, one head, a class token and three patches, two blocks; blocks change nothing."""

    def __init__(self, attention: list[list[float]], values: list[float]) -> None:
        self.shape: Any = type("Shape", (), {"num_prefix_tokens": 1, "head_tokens": 1, "layers": 3})
        self.rows = [torch.zeros(1, 4, 1)] * 4
        self.a, self.v = torch.tensor([[attention]]), torch.tensor(values).view(1, 1, 4, 1)

    def _attention(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows[0], self.a, self.v


def test_scores_by_hand() -> None:
    """Last block: the class row (.4 .1 .3 .2) times values (1 4 1 1) squared is (.16 .16 .09 .04): patch 1 stays.

    Before it: reach is 1.4 for the class token and .1 for patch 1, so that with their rows .4 .1 .3 .2 and .0 .0 .2 .8
    the patches 2 and 3 get .44 and .36: patch 2 follows. With 9 in place of .8 of patch 1's row 3 would: .28 + .9.
    """
    rows = [[0.4, 0.1, 0.3, 0.2], [0.0, 0.0, 0.2, 0.8], [0.25] * 4, [0.25] * 4]
    asked = []

    def choose(block: int, least: int, error: Any) -> int:
        asked.append((block, least))
        return (2, 1)[block]

    order, counts = ByHand(rows, [1.0, 4.0, 1.0, 1.0]).masks(lambda *given: choose(*given))
    assert (order.tolist(), counts, asked) == ([0, 1, 2], (2, 1), [(1, 1), (0, 1)])
    rows[1][3] = 9.0
    assert ByHand(rows, [1.0, 4.0, 1.0, 1.0]).masks(choose)[0].tolist() == [0, 2, 1]


@torch.no_grad()
def test_not_fitted_it_is_static() -> None:
    model = tiny("patch_slimming")
    out = model(pictures())
    assert_close(out.logits, model.vit(pictures()))
    assert not out.trace.steps


def test_a_smaller_tolerance_keeps_more() -> None:
    few, many = (fitted(tolerance=t, step=1).policy.counts for t in (0.2, 0.01))
    assert all(a <= b for a, b in zip(few, many, strict=True))
    assert few != many


@torch.no_grad()
def test_a_checkpoint_has_the_masks(tmp_path: Path) -> None:
    model = fitted(tolerance=0.05, step=1)
    model.save_pretrained(tmp_path / "m")
    again = adaptivit.load(tmp_path / "m")
    assert again.policy.counts == model.policy.counts
    same_outputs(model(pictures()), again(pictures()), "loaded", exact=True)
    assert copy.deepcopy(again).policy.counts == model.policy.counts
    other = adaptivit.create(TINY, "patch_slimming", weights=tmp_path / "m", step=3)  # how it was fitted may differ
    assert other.policy.counts == model.policy.counts
    half = adaptivit.load(tmp_path / "m").to(torch.bfloat16)
    assert torch.equal(half.policy.rank, model.policy.rank)  # which bfloat16 could not count
    with pytest.raises(WeightsError, match="other shape: rank"):
        adaptivit.create(TINY, "patch_slimming", weights=tmp_path / "m", img_size=48)


def test_what_a_file_may_not_hold() -> None:
    model = fitted(counts=COUNTS)
    for name, value in (("left", [9, 14, 9, 5, 2]), ("left", [17, 9, 9, 5, 2]), ("rank", [0] * 16)):
        state = model.state_dict() | {f"policy.{name}": torch.tensor(value)}
        with pytest.raises(UserError, match=f"{name}: expected"):
            copy.deepcopy(model).load_state_dict(state)


def test_the_dial_is_the_mean_share_over_the_blocks() -> None:
    policy = adaptivit.create(TINY, "patch_slimming", counts=(16, 8, 8, 4, 4)).policy
    assert policy.at_position(0.5).counts == (16, 8, 8, 4, 4)  # (1 + 2 / 2 + 2 / 4) / 5
    assert policy.at_position(1.0).counts == (16,) * 5
    assert policy.at_position(0.3).counts == (16, 3, 3, 1, 1)  # shares to the power 2.46
    plain = adaptivit.create(TINY, "patch_slimming").policy
    assert plain.at_position(0.5).counts == (13, 11, 8, 5, 3)  # in a line


@pytest.mark.parametrize("kind", ["average", "average_with_class", "map"])
def test_a_head_that_reads_patches_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match="expected a backbone whose head reads a class token"):
        tiny("patch_slimming", kind)


def test_images_of_another_size_are_refused() -> None:
    model = tiny("patch_slimming", more={"dynamic_img_size": True}, counts=COUNTS)
    with pytest.raises(UserError, match="its masks are for images of 16 patches, got 36"):
        model(pictures(1, 48))


def test_apply_finds_the_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("apply", "--backbone", "test_vit", "--img-size", 32, "--policy", "patch_slimming:step=1,tolerance=0.02")
    message = refused(capsys, *words, "--out", tmp_path / "none")
    assert "chooses its patches on images: give some as --data" in message
    run(*words, "--data", folder(tmp_path / "data"), "--out", tmp_path / "m", "--budget", "-10%")
    said = capsys.readouterr().out
    assert "patches after the blocks" in said
    model = adaptivit.load(tmp_path / "m")
    with torch.no_grad():
        out = model(torch.randn(2, 3, 32, 32))
    assert float(out.macs[0]) <= 0.9 * out.costs.static


def test_training_finds_the_masks_and_a_resumed_run_has_them(tmp_path: Path) -> None:
    words = (folder(tmp_path / "data"), tmp_path / "run", "--policy", "patch_slimming:step=1,tolerance=0.05")
    assert train(*words) == 0
    found = adaptivit.load(tmp_path / "run").policy
    assert found.counts[-1] < 4
    shutil.rmtree(tmp_path / "run" / "model")
    assert train(*words, "--resume") == 0  # nothing is left to do but to save again
    again = adaptivit.load(tmp_path / "run").policy
    assert again.counts == found.counts
    assert torch.equal(again.rank, found.rank)
