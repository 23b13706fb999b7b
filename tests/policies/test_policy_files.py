"""Every policy is saved and loaded exactly; authors' files load as they are; a bad setting is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import adaptivit
from adaptivit.errors import UserError, WeightsError
from adaptivit.policies import BUILT_IN
from adaptivit.policies.spec import parse, spec
from tests.support.models import TINY, assert_same_run, pictures, tiny
from tests.support.policies import CASES
from tests.support.reference_vit import randomised


@pytest.mark.parametrize("case", [c for c in CASES if "aht" not in c])
@torch.no_grad()
def test_every_policy_is_saved_and_loaded(case: str, tmp_path: Path) -> None:
    policy, given = CASES[case]
    model = randomised(policy, **given)
    model.save_pretrained(tmp_path / "m")
    again = adaptivit.load(tmp_path / "m")
    assert again.policy.settings == model.policy.settings
    mine, theirs = model.state_dict(), again.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert_same_run(model(pictures()), again(pictures()), 0.0)


@torch.no_grad()
def test_a_narrowed_model_is_not_narrowed_again(tmp_path: Path) -> None:
    """Neither by load nor by going on from its weights."""
    model = tiny("static", width=0.5)
    assert model.shape.dim == 12
    model.save_pretrained(tmp_path / "m")
    assert adaptivit.load(tmp_path / "m").shape.dim == 12
    kwargs = json.loads((tmp_path / "m" / "config.json").read_text())["backbone"]["kwargs"]
    assert kwargs["embed_dim"] == 12
    again = adaptivit.create(kwargs, "static", weights=tmp_path / "m")
    assert again.shape.dim == 12
    assert_same_run(model(pictures()), again(pictures()), 0.0)


@torch.no_grad()
def test_weights_are_cut_after_loading(tmp_path: Path) -> None:
    """A narrower model inherits the channels of the weights it was made from."""
    wide = tiny("static")
    wide.save_pretrained(tmp_path / "wide")
    for source in (tmp_path / "wide", tmp_path / "wide" / "model.safetensors"):
        small = adaptivit.create(TINY, "static", weights=source, width=0.5)
        assert torch.equal(small.vit.head.weight, wide.vit.head.weight[:, :12])
        assert torch.equal(small.vit.blocks[2].mlp.fc1.weight, wide.vit.blocks[2].mlp.fc1.weight[:48, :12])


# -- authors' files -------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_a_file_with_the_predictors_beside_the_backbone(tmp_path: Path) -> None:
    model = randomised("dynamicvit")
    state = model.vit.state_dict() | model.policy.state_dict()
    assert "score_predictor.0.in_conv.0.weight" in state
    torch.save({"model": state}, tmp_path / "public.pth")
    again = adaptivit.create(TINY, "dynamicvit", weights=tmp_path / "public.pth")
    assert_same_run(model(pictures()), again(pictures()), 0.0)
    with pytest.raises(WeightsError, match="score_predictor"):  # another policy does not know them
        adaptivit.create(TINY, "evit", weights=tmp_path / "public.pth")
    del state["score_predictor.2.out_conv.4.bias"]
    torch.save(state, tmp_path / "cut.pth")
    with pytest.raises(WeightsError, match=r"missing: score_predictor\.2\.out_conv\.4\.bias"):
        adaptivit.create(TINY, "dynamicvit", weights=tmp_path / "cut.pth")


# -- settings -------------------------------------------------------------------------------------------------------
BAD: dict[str, tuple[str, ...]] = {
    "static": ("depth=0", "depth=7", "width=0", "width=1.5", "share=0", "share=0.001", "by=height"),
    "aht": ("planner_width=0", "planner_context=all", "index=96", "planner_blocks=6", "planner_blocks=2+2"),
    "aht_merge": ("feature=keys", "removal=fold", "center_per_image=2", "halting_blocks=5", "train_budget_range=0.5"),
    "avit": ("gate=mlp", "removal=fold", "surrogate_width=0", "index=24"),
    "mod": ("capacity=0", "capacity=1.1", "first_block=6", "blocks=6", "blocks=1+1", "router=deep", "gate=tanh"),
    "amod": ("capacity=0", "first_block=0", "first_block=6", "blocks=0+2", "blocks=9", "multiply=perhaps"),
    "dynamicvit": ("keep=0", "keep=1.5", "blocks=6", "blocks=2+2", "removal=fold"),
    "spvit": ("keep=0", "keep=0.7+0.8+0.1", "keep=0.7", "blocks=6", "blocks=2+2", "select=best"),
    "patch_slimming": ("tolerance=0", "step=0", "counts=9+9+9", "counts=9+9+9+9+10", "counts=17+9+9+9+9", "counts=0"),
    "evit": ("keep=0", "keep=2", "blocks=-1", "blocks=3+3", "warm_epochs=-1", "shrink_epochs=-1", "fuse=2"),
    "tome": ("r=-1", "r=2.5", "r=many", "r=1+1+1+1+1+1+1", "inflection=2", "prop_attn=2"),
    "fold": (
        "keep=0",
        "keep=nan",
        "budget=0",
        "budget=1.1",
        "first_block=-1",
        "first_block=6",
        "blocks=6",
        "blocks=2+2",
    ),
    "fold ": ("power=-1", "value=-1", "evidence=row"),
    "act": ("eps=1", "eps=-1", "surrogate_width=0", "bias=high", "unit=patch", "gate=layer"),
    "confidence": ("threshold=0", "threshold=1.1", "patience=0", "criterion=margin", "heads=two"),
    "similarity": ("threshold=-1", "patience=0", "of=head", "measure=ssim"),
    "pondernet": ("prior=0", "prior=1", "index=-1", "index=24", "unit=batch", "sample=x"),
}


@pytest.mark.parametrize(("policy", "item"), [(p.strip(), item) for p, items in BAD.items() for item in items])
def test_a_bad_setting_is_named(policy: str, item: str) -> None:
    name, value = item.split("=")
    with pytest.raises(UserError, match=rf"\b{name}\b"):
        adaptivit.create(TINY, policy, **{name: value})


def test_every_policy_has_bad_settings_to_name() -> None:
    assert {p.strip() for p in BAD} == set(BUILT_IN) - {"replay"}


@pytest.mark.parametrize(
    ("policy", "given", "message"),
    [
        ("static", {"depth": 2, "share": 0.5}, "depth and share"),
        ("similarity", {"measure": "lpips", "of": "token"}, "leave of=token out"),
        ("dynamicvit", {"removal": "merge", "blocks": (0, 2)}, r"blocks: .*1\.\.5"),
        ("tome", {"r": [1, 2], "inflection": 0.5}, "inflection"),
        ("tome", {"r": []}, "r: "),
        ("tome", {"r": (2, 3.0)}, "inflection"),
        ("mod", {"blocks": ()}, "blocks"),
    ],
)
def test_settings_that_do_not_go_together(policy: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        adaptivit.create(TINY, policy, **given)


@pytest.mark.parametrize(
    ("policy", "given"),
    [
        ("evit", {}),
        ("aht_merge", {"feature": "class_row"}),
        ("aht", {"planner_context": "class"}),
        ("pondernet", {"unit": "token"}),
        ("avit", {"finish_with_class": True}),
    ],
)
def test_a_class_token_that_is_not_there(policy: str, given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"class token|class_row"):
        tiny(policy, "average", **given)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("tome:r=16+12+8", {"r": [16, 12, 8]}),
        ("tome:r=7,inflection=-0.5", {"r": 7, "inflection": -0.5}),
        ("mod:blocks=1+2,gate=none", {"blocks": (1, 2), "gate": "none"}),
        ("static:share=0.5,by=width", {"share": 0.5, "by": "width"}),
        ("fold:budget=0.67,blocks=3+6+9", {"budget": 0.67, "blocks": (3, 6, 9)}),
        ("fold:budget=-25%", {"budget": 0.75}),
        ("pondernet:sample=4", {"sample": 4}),
    ],
)
def test_settings_as_text(text: str, settings: dict[str, Any]) -> None:
    name, values = parse(text)
    assert values == settings
    made = BUILT_IN[name].settings(**values)
    assert parse(spec(name, made)) == (name, values)
