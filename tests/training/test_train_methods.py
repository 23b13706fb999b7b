"""What the methods' own training needs: frozen backbones, two learning rates, schedules, features of a teacher."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

import adaptivit
from adaptivit.policies import BUILT_IN, spec
from adaptivit.training import optim
from adaptivit.training.config import OptimConfig, TrainConfig
from adaptivit.training.recipes import RECIPES, get
from adaptivit.training.run import Trainer, build_objective
from tests.support.commands import log, refused, static, train
from tests.support.data_sets import folder, split_folder
from tests.support.training import batch, named

NEW = (
    "dynamicvit",
    "spvit",
    "patch-slimming",
    "evit",
    "mod",
    "amod",
    "act",
    "spatial-act",
    "confidence",
    "branchynet",
    "similarity",
    "pondernet",
)


def trainer(config: TrainConfig) -> Trainer:
    """A trainer on the tiniest model, with a static teacher where a loss wants one."""
    torch.manual_seed(0)
    policy, given = spec.parse(config.policy)
    model = adaptivit.create("test_vit", policy, img_size=32, num_classes=3, **given)
    teacher = None
    if config.loss.distill or config.loss.features:
        teacher = adaptivit.create("test_vit", "static", img_size=32, num_classes=3).requires_grad_(False)
    optimizer = optim.adamw(model, config)
    return Trainer(model, build_objective(config), optimizer, config, Accelerator(cpu=True), model, teacher)


def moved(model: Any, before: dict[str, torch.Tensor]) -> dict[str, float]:
    return {k: float((p.detach() - before[k]).abs().max()) for k, p in model.named_parameters()}


@pytest.mark.parametrize("name", NEW)
def test_a_step_of_each_recipe_moves_the_policy(name: str) -> None:
    config = named(get(name), lr=1e-2, warmup_epochs=0, freeze_epochs=0, mixup=0.0, cutmix=0.0)
    one = trainer(config)
    before = {k: p.detach().clone() for k, p in one.model.named_parameters()}
    losses, output = one.step(batch(), 0, 4)
    assert losses.total.isfinite()
    assert all(v.isfinite() for v in losses.terms.values())
    assert output.layout == ("gathered" if one.model.policy.traits.fixed_counts_in_training else "masked")
    change = moved(one.model, before)
    assert change["vit.blocks.0.attn.qkv.weight"] > 0
    own = {k: v for k, v in change.items() if k.startswith("policy.")}
    assert bool(own) == (name in ("dynamicvit", "spvit", "mod", "act", "spatial-act", "branchynet"))
    assert all(v > 0 for v in own.values()), own


def test_a_frozen_backbone_does_not_move() -> None:
    config = named(get("dynamicvit"), freeze_epochs=2, mixup=0.0, cutmix=0.0, warmup_epochs=0)
    one = trainer(config)
    before = {k: p.detach().clone() for k, p in one.model.named_parameters()}
    for step in range(8):  # two epochs of four steps
        one.step(batch(), step, 4)
    change = moved(one.model, before)
    assert all(v == 0 for k, v in change.items() if k.startswith("vit."))
    assert all(v > 0 for k, v in change.items() if k.startswith("policy."))
    one.step(batch(), 8, 4)
    change = moved(one.model, before)
    assert change["vit.blocks.0.attn.qkv.weight"] > 0


def test_the_backbone_has_its_share_of_the_learning_rate() -> None:
    config = TrainConfig(
        data="", policy="mod", optim=OptimConfig(lr=1e-2, backbone_lr=0.01, warmup_epochs=0, weight_decay=0.0)
    )
    one = trainer(config)
    before = {k: p.detach().clone() for k, p in one.model.named_parameters()}
    one.step(batch(), 0, 4)
    change = moved(one.model, before)
    for name, value in change.items():  # AdamW's first step is the learning rate, whatever the gradient
        expected = 1e-2 if name.startswith("policy.") else 1e-4
        assert value == pytest.approx(expected, rel=0.02) or value == 0, name
    ids = {id(p): g for g in one.optimizer.param_groups for p in g["params"]}
    assert len(ids) == len(list(one.model.parameters()))
    for name, p in one.model.named_parameters():
        assert ids[id(p)]["backbone"] == name.startswith("vit.")


def test_a_second_stage_trains_the_heads_alone(tmp_path: Path, capsys: Any) -> None:
    """FastBERT and DeeBERT: the backbone and its head stay as the first stage left them, and must come from one."""
    where, first = split_folder(tmp_path / "in"), static(tmp_path / "static")
    before = load_file(first / "model.safetensors")
    for name in ("fastbert", "deebert"):
        assert train(where, tmp_path / name, "--recipe", name, "--weights", first, "--optim.lr", 1e-2) == 0
        after = load_file(tmp_path / name / "model" / "model.safetensors")
        assert all(torch.equal(after[k], v) for k, v in before.items())
        assert {k.split(".")[1] for k in after.keys() - before.keys()} == {"heads"}
        fresh = trainer(get(name)).model.policy.state_dict()
        assert all(not torch.equal(after[f"policy.{k}"], v) for k, v in fresh.items())
    words = ("--out", tmp_path / "no", "--backbone", "test_vit", "--img-size", 32, "--batch-size", 8)
    folder(tmp_path / "other" / "train", ("x", "y", "z"))
    folder(tmp_path / "other" / "val", ("x", "y", "z"), each=2, seed=1)
    other = ("--data", tmp_path / "other", "--weights", tmp_path / "deebert" / "model")
    for given in (("--data", where), ("--data", where, "--weights", static(tmp_path / "four", 4)), other):
        message = refused(capsys, "train", *given, *words, "--recipe", "deebert")
        assert "optim.backbone_lr: 0 needs --weights with a head for these classes" in message
    bare = ("--data", where, "--weights", first, "--policy", "confidence", "--optim.backbone-lr", 0)
    message = refused(capsys, "train", *bare, *words)
    assert "0 leaves nothing to train: the policy 'confidence' has no parameters of its own" in message
    assert not (tmp_path / "no").exists()


def test_the_rate_of_evit_follows_the_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called with fractions of an epoch, before each step; validation keeps what will be kept in the end."""
    where, seen = split_folder(tmp_path / "in"), []
    step = Trainer.step

    def watched(self: Trainer, *arguments: Any) -> Any:
        found = step(self, *arguments)
        seen.append((self.model.policy.keep_now, found[1].trace.live_mlp[-1].tolist()))
        return found

    monkeypatch.setattr(Trainer, "step", watched)
    policy = "evit:keep=0.5,warm_epochs=1,shrink_epochs=2,blocks=2,fuse=false"
    assert train(where, tmp_path / "out", "--policy", policy, "--epochs", 4) == 0
    done = [min(max((s / 3 - 1) / 2, 0), 1) for s in range(12)]  # 3 steps an epoch
    keep = [0.5 + 0.25 * (1 + math.cos(math.pi * d)) for d in done]
    assert [k for k, _ in seen] == pytest.approx(keep)
    patches = adaptivit.load(tmp_path / "out" / "model").shape.tokens - 1
    assert [n for _, n in seen] == [[1 + math.ceil(k * patches - 1e-9)] * 8 for k in keep]
    report = [r for r in log(tmp_path / "out") if r["kind"] == "validation"]
    assert len({r["gmacs"] for r in report}) == 1, "validation does not follow the schedule"


def test_features_alone_need_a_teacher(tmp_path: Path, capsys: Any) -> None:
    where = split_folder(tmp_path / "in")
    given = ("--policy", "dynamicvit", "--loss.features", 1.0, "--weights", static(tmp_path / "s"))
    assert train(where, tmp_path / "out", *given) == 0
    assert all(r["features"] >= 0 for r in log(tmp_path / "out") if r["kind"] == "train")
    words = ("--data", where, "--out", tmp_path / "no", "--backbone", "test_vit", "--img-size", 32, "--batch-size", 8)
    assert "got neither" in refused(capsys, "train", *words, "--policy", "dynamicvit", "--loss.features", 1)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("term", ["ratio", "exits", "expected", "geometric", "ponder", "cost"])
def test_a_loss_that_the_policy_cannot_serve_is_said_before_training(tmp_path: Path, capsys: Any, term: str) -> None:
    where = split_folder(tmp_path / "in")
    words = ("--data", where, "--out", tmp_path / "no", "--backbone", "test_vit", "--img-size", 32, "--batch-size", 8)
    message = refused(capsys, "train", *words, "--policy", "static", f"--loss.{term}", 1)
    assert f"--loss.{term}: the policy 'static' cannot serve it" in message
    assert "has no fact" in message
    assert not (tmp_path / "no").exists()


def test_every_policy_with_a_loss_of_its_own_has_a_recipe() -> None:
    for policy, name in ((p, r.recipe) for p, r in BUILT_IN.items() if r.recipe):
        assert spec.parse(get(name).policy)[0] == policy
    assert set(NEW) <= set(RECIPES)


def test_the_recipes_are_the_papers() -> None:
    d, e, a, m, p = (get(n) for n in ("dynamicvit", "evit", "amod", "mod", "pondernet"))
    dynamic = {"ratio": 2.0, "distill": 0.5, "features": 0.5, "backbone_lr": 0.01, "freeze_epochs": 5, "epochs": 30}
    assert d == named(d, **dynamic)
    assert spec.parse(e.policy)[1] == {"warm_epochs": 10, "shrink_epochs": 15}
    for routed in (a, m):
        assert routed == named(routed, epochs=100, batch_size=128, lr=1e-5)
    assert p == named(p, task=0, expected=1.0, geometric=0.01)
    assert get("confidence") == named(get("confidence"), task=0, exits=1.0)
    assert get("act").loss.ponder == 5e-4


def test_validation_may_be_rarer_than_epochs(tmp_path: Path, capsys: Any) -> None:
    where = split_folder(tmp_path / "in")
    assert train(where, tmp_path / "out", "--policy", "static", "--epochs", 5, "--run.val-epochs", 2) == 0
    assert [r["epoch"] for r in log(tmp_path / "out") if r["kind"] == "validation"] == [2, 4, 5]
    words = ("--data", where, "--out", tmp_path / "no", "--backbone", "test_vit", "--img-size", 32)
    assert "val_epochs: expected at least 1, got 0" in refused(capsys, "train", *words, "--run.val-epochs", 0)
