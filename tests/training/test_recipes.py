"""Recipes: each says what its paper prints, and what the papers print has a recipe. That every recipe trains is in
test_train.py; here are those whose backbone or start is special."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import adaptivit
from adaptivit.policies import spec
from adaptivit.training import methods, optim, recipes
from adaptivit.training.config import LOSSES, TrainConfig
from adaptivit.training.recipes import RECIPES, get
from adaptivit.training.run import Trainer, build_objective
from adaptivit.utils.settings import flat
from tests.support.commands import refused, run, train
from tests.support.data_sets import CLASSES, folder, split_folder
from tests.support.models import BACKBONES, TINY
from tests.support.tables import ELSEWHERE
from tests.support.training import batch, named

T, S = "deit_tiny_patch16_224", "deit_small_patch16_224"
CARS = {"tiny": T, "small": S, "base": "vit_base_patch16_224"}
B, L = "vit_base_patch16_224", "vit_large_patch16_224"
TD, SD = "deit_tiny_distilled_patch16_224", "deit_small_distilled_patch16_224"
AHT = {"epochs": 50, "lr": 1e-4, "weight_decay": 0.05, "augment": "rand", "sigma": 1.0, "mixup": 0.0}
AVIT = {"epochs": 100, "lr": 1.5e-3, "mixup": 0.0, "cutmix": 0.0, "distill": 0.0}
AMOD = {"epochs": 100, "lr": 1e-5, "batch_size": 128}
FROZEN = {"lr": 2e-5, "backbone_lr": 0.0, "task": 0.0, "label_smoothing": 0.0}
HEADS = "criterion=entropy,heads=own"

# What the papers print, written down from them: recipe -> (backbone, policy and its settings, fields, words).
Fact = tuple[str, str, dict[str, Any], tuple[str, ...]]
FACTS: dict[str, Fact] = {
    # AHT-ViT Sec. 3.5, Tables 2 to 5
    "aht-high-accuracy": (S, "aht", AHT | {"ponder": 1e-3, "target_depth": 1.0}, ("79.8", "3.8", "Table 3")),
    "aht-balanced": (S, "aht", AHT | {"ponder": 5e-2, "target_depth": 0.5}, ("79.4", "3.1", "Table 3")),
    "aht-high-efficiency": (S, "aht", AHT | {"ponder": 1e-2, "target_depth": 0.2}, ("78.5", "2.4", "Table 3")),
    "aht-no-target-depth": (S, "aht", AHT | {"target_depth": 0.0}, ("78.8", "3.4", "Table 5")),
    "aht-places365": (S, "aht", {"ponder": 5e-2, "target_depth": 0.5}, ("80.2", "2.8", "81.6", "Table 4")),
    "aht-cifar100": (S, "aht", {"ponder": 5e-2, "target_depth": 0.5}, ("89.6", "3.7", "90.1", "Table 4")),
    "static-aht": (S, "static", AHT | {"ponder": 0.0, "distill": 0.0}, ("79.9", "4.6", "81.6", "90.1")),
    "dynamicvit-aht": (S, "dynamicvit:keep=0.7", AHT | {"ratio": 2.0}, ("79.3", "2.9", "Table 3")),
    "avit-aht": (S, "avit:gate_scale=10,gate_center=75", AHT | {"ponder": 5e-4}, ("78.6", "3.6", "Table 3")),
    # A-ViT Sec. 4, Tables 2 and 3, Fig. 7
    "avit-paper": (T, "avit:gate_scale=5,gate_center=10", AVIT | {"ponder": 5e-4, "prior": 0.1}, ("71.0", "0.8")),
    "avit-paper-small": (S, "avit:gate_scale=5,gate_center=10", AVIT | {"ponder": 5e-4, "prior": 0.1}, ("78.6", "3.6")),
    "avit-distilled-tiny": (TD, "avit:gate_scale=5,gate_center=10", AVIT | {"prior": 0.1}, ("72.4", "0.8", "Table 3")),
    "avit-distilled-small": (SD, "avit:gate_scale=5,gate_center=10", AVIT | {"prior": 0.1}, ("80.7", "3.6", "Table 3")),
    "avit-no-prior": (T, "avit:gate_scale=5,gate_center=10", AVIT | {"ponder": 5e-4, "prior": 0.0}, ("6.4", "Fig. 7")),
    "avit-prior-only": (T, "avit:gate_scale=5,gate_center=10", AVIT | {"ponder": 0.0, "prior": 0.1}, ("2 points",)),
    "avit-network": (T, "avit:gate_scale=5,gate_center=10,gate=network", AVIT | {"prior": 0.1}, ("+0.06", "12.6 %")),
    "static-avit-tiny": (T, "static", AVIT | {"ponder": 0.0, "prior": 0.0}, ("71.3", "1.3")),
    "static-avit-small": (S, "static", AVIT | {"ponder": 0.0, "prior": 0.0}, ("78.9", "4.6")),
    "static-sharp": (T, "static:share=0.68", AVIT, ("1.4 points",)),
    "act": (T, "act", {"epochs": 100}, ("71.0", "1.0 GMACs", "10.01")),
    "confidence": (T, "confidence", {"epochs": 100}, ("65.8", "1.1 GMACs", "10.63")),
    "similarity": (T, "similarity", {"epochs": 100}, ("69.4", "1.1 GMACs", "10.68")),
    "pondernet-tokens": (T, "pondernet:unit=token", {"epochs": 100}, ("66.2", "1.0 GMACs", "9.74")),
    # AHT-ViT's related work
    "spatial-act": (T, "act:unit=token,gate=block", {"ponder": 5e-3}, ("Figurnov", "2017")),
    "branchynet": (
        T,
        f"confidence:{HEADS}",
        {"task": 0.0, "exits": 1.0, "exits_last": 0.3},
        ("Teerapittayanon", "2016"),
    ),
    "fastbert": (T, f"confidence:{HEADS},threshold=0.9", FROZEN | {"epochs": 5, "self_distill": 1.0}, ("speed 0.1",)),
    "deebert": (T, f"confidence:{HEADS},threshold=0.9", FROZEN | {"epochs": 3, "exits": 1.0}, ("Xin", "2020")),
    # A-MoD Table 1
    "amod-tiny-50": (T, "amod:capacity=0.5", AMOD, ("71.8 %", "0.92 GMACs", "Table 1")),
    "mod-tiny-50": (T, "mod:capacity=0.5", AMOD, ("69.78 %", "0.92 GMACs")),
    "amod-tiny-12.5": (T, "amod:capacity=0.125", AMOD, ("69.76 %", "0.71 GMACs")),
    "mod-tiny-12.5": (T, "mod:capacity=0.125", AMOD, ("67.52 %", "0.71 GMACs")),
    "amod-small-50": (S, "amod:capacity=0.5", AMOD, ("78.66 %", "3.42 GMACs")),
    "mod-small-50": (S, "mod:capacity=0.5", AMOD, ("77.43 %", "3.42 GMACs")),
    "amod-small-12.5": (S, "amod:capacity=0.125", AMOD, ("76.98 %", "2.6 GMACs")),
    "mod-small-12.5": (S, "mod:capacity=0.125", AMOD, ("76.07 %", "2.6 GMACs")),
    "amod-base-50": (B, "amod:capacity=0.5", AMOD, ("80.4 %", "13.1 GMACs")),
    "mod-base-50": (B, "mod:capacity=0.5", AMOD, ("79.5 %", "13.1 GMACs")),
    "amod-base-12.5": (B, "amod:capacity=0.125", AMOD, ("78.42 %", "9.8 GMACs")),
    "mod-base-12.5": (B, "mod:capacity=0.125", AMOD, ("78.49 %", "9.8 GMACs")),
    "amod-large-50": (L, "amod:capacity=0.5", AMOD, ("82.82 %", "45.92 GMACs")),
    "mod-large-50": (L, "mod:capacity=0.5", AMOD, ("82.04 %", "45.92 GMACs")),
    "amod-large-12.5": (L, "amod:capacity=0.125", AMOD, ("81.37 %", "34.5 GMACs")),
    "mod-large-12.5": (L, "mod:capacity=0.125", AMOD, ("81.1 %", "34.5 GMACs")),
    # A-MoD Tables 5 and 6, Fig. 3 and 7
    "amod-small-70": (S, "amod:capacity=0.7", AMOD, ("79.63", "3.8", "Table 5")),
    "amod-multiply": (T, "amod:capacity=0.5,multiply=true", AMOD, ("Fig. 7",)),
    "amod-scratch-small": (S, "amod:capacity=0.5", {"epochs": 300}, ("76.63 %", "Table 6")),
    "mod-scratch-small": (S, "mod:capacity=0.5", {"epochs": 300}, ("75.9 %", "Table 6")),
    "amod-scratch-base": (B, "amod:capacity=0.5", {"epochs": 160}, ("73.66 %", "Table 6")),
    "mod-scratch-base": (B, "mod:capacity=0.5", {"epochs": 160}, ("72.47 %", "Table 6")),
    **{f"amod-cars-{n}": (b, "amod:capacity=0.5", AMOD, ("Cars", "Fig. 3")) for n, b in CARS.items()},
    **{f"mod-cars-{n}": (b, "mod:capacity=0.5", AMOD, ("Cars", "Fig. 3")) for n, b in CARS.items()},
    **{
        f"amod-cars-later-{n}": (b, "amod:capacity=0.5,first_block=4", AMOD, ("Cars", "fifth layer"))
        for n, b in CARS.items()
    },
}
# isoFLOP rows of A-MoD's Table 1: (width, blocks in all), GFLOPs and top-1 as printed, and blocks that have as many
ISOFLOP = {
    "static-isoflop-tiny-50": (192, 12, 0.95, "71.1", 9),
    "static-isoflop-tiny-12.5": (192, 12, 0.75, "67.4", 7),
    "static-isoflop-small-50": (384, 12, 3.47, "78.04", 9),
    "static-isoflop-small-12.5": (384, 12, 2.3, "73.53", 6),
    "static-isoflop-base-50": (768, 12, 13.21, "79.28", 9),
    "static-isoflop-base-12.5": (768, 12, 8.8, "77.69", 6),
    "static-isoflop-large-50": (1024, 24, 46.24, "80.28", 18),
    "static-isoflop-large-12.5": (1024, 24, 33.4, "77.64", 13),
}


def words_of(name: str) -> str:
    return " ".join(RECIPES[name].text().split())


@pytest.mark.parametrize("name", FACTS)
def test_a_recipe_is_what_its_paper_prints(name: str) -> None:
    config, (backbone, policy, fields, words) = get(name), FACTS[name]
    assert config.backbone == backbone
    assert spec.parse(config.policy) == spec.parse(policy)
    assert config == named(config, **fields)
    for word in words:
        assert word in words_of(name)


@pytest.mark.parametrize("name", ISOFLOP)
def test_an_isoflop_model_has_the_printed_cost(name: str) -> None:
    width, depth, gmacs, top1, expected = ISOFLOP[name]
    n = 197
    block = 12 * n * width**2 + 2 * n**2 * width
    around = 196 * 768 * width + 1000 * width
    share = spec.parse(get(name).policy)[1]["share"]
    blocks = max(k for k in range(depth + 1) if around + k * block <= share * (around + depth * block))
    assert blocks == expected
    assert (around + blocks * block) / 1e9 == pytest.approx(gmacs, rel=0.02)
    assert top1 in words_of(name)
    assert get(name) == named(get(name), **AMOD)


def test_every_recipe_of_a_paper_has_its_facts_here_or_beside() -> None:
    others = ELSEWHERE | {"dynamicvit"}
    cars = {f"static-isoflop-cars-{n}" for n in CARS}
    assert set(RECIPES) == set(FACTS) | set(ISOFLOP) | others | cars


@pytest.mark.parametrize("name", RECIPES)
def test_the_text_has_the_command_and_says_that_we_have_not_run_it(name: str) -> None:
    words = words_of(name)
    assert f"adaptivit train --recipe {name} --data " in words
    assert "Not run by us" in words
    config, policy = get(name), get(name).policy.partition(":")[0]
    spec.make(*spec.parse(config.policy))
    made = methods.parse_method(f"{policy}:{name}", TrainConfig(data="x"))  # and `compare` can name it
    mine, there = flat(made), flat(config)
    assert {k: mine[k] for k in LOSSES} == {k: there[k] for k in LOSSES}


def test_from_scratch_takes_no_weights_and_others_do() -> None:
    for name in RECIPES:
        assert ("--weights" in words_of(name)) != ("scratch" in name)


@pytest.mark.parametrize("name", ["avit-distilled-tiny", "avit-distilled-small"])
def test_a_step_with_a_distillation_token(name: str) -> None:
    config = named(get(name), warmup_epochs=0)
    policy, given = spec.parse(config.policy)
    torch.manual_seed(0)
    model = adaptivit.create(TINY | BACKBONES["distilled"] | {"num_classes": 3}, policy, **given)
    one = Trainer(model, build_objective(config), optim.adamw(model, config), config, Accelerator(cpu=True), model)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    losses, _ = one.step(batch(), 0, 4)
    assert set(losses.terms) == {"task", "ponder", "prior"}
    assert losses.total.isfinite()
    moved = {k for k, p in model.named_parameters() if not torch.equal(p, before[k])}
    assert {"vit.dist_token", "vit.head.weight", "vit.head_dist.weight"} <= moved


def test_a_transfer_starts_from_the_model_that_balanced_saved(tmp_path: Path) -> None:
    first, more = split_folder(tmp_path / "in"), ("x", "y", "z", "w")
    assert train(first, tmp_path / "balanced", "--recipe", "aht-balanced") == 0
    start = adaptivit.load(tmp_path / "balanced" / "model")
    for name in ("aht-cifar100", "aht-places365"):
        where = tmp_path / name
        folder(where / "train", more)
        folder(where / "val", more, each=2, seed=1)
        weights = ("--weights", tmp_path / "balanced" / "model", "--optim.lr", 1e-12, "--optim.min-lr", 0)
        assert train(where, tmp_path / f"{name}-out", "--recipe", name, *weights) == 0
        model = adaptivit.load(tmp_path / f"{name}-out" / "model")
        assert model.class_names == sorted(more) != list(CLASSES)
        torch.testing.assert_close(model.policy.state_dict(), start.policy.state_dict())  # planners and gate came along


def test_the_listing_and_one_recipe(capsys: Any) -> None:
    assert run("recipes") == 0
    printed = capsys.readouterr().out
    assert printed.strip() == recipes.listing().strip()
    for name, recipe in RECIPES.items():
        assert f" {name}: {recipe.title} " in " ".join(printed.split()) + " "
    assert run("recipes", "avit-network") == 0
    printed = capsys.readouterr().out
    for line in (
        "+0.06 points",
        "--policy avit:gate_scale=5,gate_center=10,gate=network",
        "--optim.lr 0.0015",
        "--loss.prior 0.1",
    ):
        assert line in printed
    assert "--loss.target-depth" not in printed  # as by default
    assert "Did you mean 'avit-network'?" in refused(capsys, "recipes", "avit-netwrk")
