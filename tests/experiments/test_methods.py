"""What a method of a comparison means, and the embedded data and backbone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptivit import policies
from adaptivit.data import dataset, digits
from adaptivit.data.digits import Digits
from adaptivit.errors import UserError
from adaptivit.experiments.compare.config import CompareConfig
from adaptivit.factory import create, load
from adaptivit.policies import BUILT_IN
from adaptivit.training.config import LOSSES, TrainConfig, with_settings
from adaptivit.training.methods import full_spec, parse_method, slug
from adaptivit.training.recipes import get
from adaptivit.utils.settings import flat
from tests.support.commands import refused
from tests.support.training import named

SHARED = named(TrainConfig("d"), policy="static", epochs=3, seed=4, lr=5e-4, distill=0.5, augment="flip")
TINY = ("--backbone", "test_vit", "--img-size", 32, "--batch-size", 8, "--device", "cpu", "--augment.kind", "none")


def losses_of(config: TrainConfig) -> dict[str, Any]:
    return {k: v for k, v in flat(config).items() if k in LOSSES}


# -- what a method means --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "policy", "losses"),
    [
        ("static", "static", {}),
        ("aht", "aht:straight_through=true", {"cost": 10.0, "target_depth": 0.1}),
        ("aht:balanced", "aht", {"ponder": 5e-2, "target_depth": 0.5}),
        ("aht:aht-balanced", "aht", {"ponder": 5e-2, "target_depth": 0.5}),
        ("aht:budget,straight_through=false", "aht:straight_through=false", {"cost": 10.0, "target_depth": 0.1}),
        (
            "aht:balanced,planner_blocks=3+6,loss.ponder=0.2",
            "aht:planner_blocks=3+6",
            {"ponder": 0.2, "target_depth": 0.5},
        ),
        ("aht:high-accuracy, loss.mass = hazard", "aht", {"ponder": 1e-3, "target_depth": 1.0, "mass": "hazard"}),
        ("avit:paper", "avit:gate_scale=5,gate_center=10", {"ponder": 5e-4, "prior": 0.1}),
        ("avit:tiny", "avit:gate_scale=10,gate_center=30", {"ponder": 5e-4, "prior": 1e-3, "prior_form": "reference"}),
    ],
)
def test_a_method_changes_the_policy_and_its_losses_alone(spec: str, policy: str, losses: dict[str, Any]) -> None:
    made = parse_method(spec, SHARED)
    plain = TrainConfig(data="")
    assert made.policy == policy
    assert losses_of(made) == losses_of(named(plain, **losses))
    assert with_settings(made, {"policy": "static", **losses_of(SHARED)}) == SHARED


def test_a_policy_without_a_recipe_takes_its_default_ones_losses() -> None:
    for policy, name in ((p, r.recipe) for p, r in BUILT_IN.items() if r.recipe):
        if policy in policies.names():
            made = parse_method(policy, SHARED)
            assert losses_of(made) == losses_of(get(name))
            assert made.loss.distill == SHARED.loss.distill


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ahtt", "'aht'"),
        ("aht:balancd", "'balanced'"),
        ("aht:avit-paper", "recipe of method 'aht'"),
        ("aht:treshold=1", "'threshold'"),
        ("aht:optim.lr=1", "setting or loss"),
        ("aht:budget_share=0.5", "it is 'loss.cost_target' now"),
        ("aht:balanced,budget", "at most one recipe"),
        ("aht:loss.ponder=much", "expected a number"),
        ("aht:loss.ponder=-1", "at least 0"),
        ("aht:loss.mass=sum", "crossing"),
        ("aht:threshold=-1", "threshold"),
        ("replay", "one batch"),
    ],
)
def test_mistakes_in_a_method_are_explained(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(spec, SHARED)
    with pytest.raises(UserError, match=message):
        CompareConfig(data="digits", methods=("avit", spec))


@pytest.mark.parametrize("spec", ["aht", "aht:balanced", "aht:beta=-3.0,loss.cost_target=0.5", "avit:small", "static"])
def test_a_method_written_out_is_the_same_method(spec: str) -> None:
    made = parse_method(spec, SHARED)
    again = parse_method(full_spec(made), SHARED)
    assert replace(again, policy=made.policy) == made
    assert full_spec(again) == full_spec(made)
    assert ("beta=-3.0" in again.policy) == ("beta" in spec)


def test_names_of_runs_are_unique_and_plain() -> None:
    specs = ["aht", "aht:balanced", "aht-balanced", "aht:a=1,b=2", "aht:a=1;b=2", "../x", "static, trained on", "AHT"]
    names = [slug(s, seed).lower() for s in specs for seed in (0, 1)]
    assert len(set(names)) == len(names)
    assert all(set(n) <= set("abcdefghijklmnopqrstuvwxyz0123456789.=+-") and not n.startswith(".") for n in names)


# -- the embedded data and backbone ---------------------------------------------------------------------------------
def test_digits_without_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = dataset.splits("digits")
    assert [(name, len(part)) for name, part in found.items()] == [("train", 7764), ("val", 572), ("test", 1440)]
    model = create("digits_vit", "static")
    images = dataset.Images(found["test"], model.preprocessing.evaluation())
    quick = torch.cat([b.images for b in Digits.load().testing()])
    chosen = range(0, 1440, 97)
    seen = torch.stack([x for x in (images[i].image for i in chosen) if x is not None])
    assert float((seen - quick[list(chosen)]).abs().max()) * digits.STD <= 0.51 / 255
    assert found["test"].labels == torch.cat([b.labels for b in Digits.load().testing()]).tolist()
    (tmp_path / "digits").mkdir()
    with pytest.raises(UserError, match="no class folders"):
        dataset.splits("digits")


def test_digits_held_out_are_other_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "placed", lambda x, places, seed, distort: x[:, None].expand(-1, 3, -1, -1).clone())
    drawn = digits.splits.__wrapped__()
    kinds = [{item.tobytes() for item in drawn[name].items} for name in ("train", "val", "test")]
    assert not kinds[0] & kinds[1] | kinds[0] & kinds[2] | kinds[1] & kinds[2]


def test_the_backbone_of_the_quickstart_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = create("digits_vit", "avit")
    assert 0.15 < float(model.vit.pos_embed.detach().std()) < 0.25
    made = model.preprocessing
    assert (made.mean, made.std, made.crop_pct, made.interpolation) == ((0.2,) * 3, (0.25,) * 3, 1.0, "bilinear")
    model.save_pretrained(tmp_path / "m")
    images = torch.randn(2, 3, 64, 64)
    for again in (load(tmp_path / "m"), create("digits_vit", "avit", weights=tmp_path / "m")):
        assert again.backbone_name == "digits_vit"
        assert again.preprocessing == made
        torch.testing.assert_close(again(images).logits, model(images).logits)
    assert create("digits_vit", "static", num_classes=7, img_size=32).vit.num_classes == 7
    with pytest.raises(UserError, match="download"):
        create("digits_vit", "static", weights=True)


def test_a_list_is_written_as_it_is_read() -> None:
    config = parse_method("tome:r=2+2+1", SHARED)
    assert parse_method(full_spec(config), SHARED) == config
    with pytest.raises(UserError, match="lists 3\\+6"):
        parse_method("evit:blocks=3,6", SHARED)


def test_a_flag_given_twice_is_refused(tmp_path: Path, capsys: Any) -> None:
    message = refused(capsys, "compare", "--methods", "tome", "--methods", "fold", "--data", "digits")
    assert "--methods was given 2 times" in message
