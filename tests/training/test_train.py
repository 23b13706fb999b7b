"""Training: recipes say what the papers say and run; distillation, mixup, averages and logs do what they are for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

import adaptivit
from adaptivit.data import dataset
from adaptivit.data.dataset import Loaded
from adaptivit.model import AdaptiveViT
from adaptivit.policies import spec
from adaptivit.training import optim
from adaptivit.training.config import OptimConfig, TrainConfig
from adaptivit.training.recipes import RECIPES, get
from adaptivit.training.run import Trainer, build_objective, fit
from adaptivit.utils.settings import flat
from tests.support.commands import SMALL, assert_same_weights, log, refused, static, train, weights
from tests.support.data_sets import folder, pixels, split_folder
from tests.support.models import model_of
from tests.support.training import batch

AHT = {"aht-high-accuracy": (1e-3, 1.0), "aht-balanced": (5e-2, 0.5), "aht-high-efficiency": (1e-2, 0.2)}
AVIT = {"avit-paper": (5, 10, 0.1, "paper"), "avit-tiny": (10, 30, 1e-3, "reference")}
AVIT |= {"avit-small": (10, 75, 1e-3, "reference")}
TERMS = ("task", "ponder", "target_depth", "prior", "cost", "ratio", "exits", "expected", "geometric")
TERMS = (*TERMS, "self_distill", "distill", "features")


# -- recipes --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", AHT)
def test_the_recipes_of_aht_are_table_2(name: str) -> None:
    config = get(name)
    assert spec.parse(config.policy) == ("aht", {})
    loss, optimiser = config.loss, config.optim
    assert (loss.ponder, loss.target_depth) == AHT[name]
    assert (config.epochs, optimiser.lr, optimiser.weight_decay, config.augment.kind) == (50, 1e-4, 0.05, "rand")
    assert (loss.prior, loss.cost, loss.distill, loss.sigma) == (0, 0, 0, 1.0)


@pytest.mark.parametrize("name", AVIT)
def test_the_recipes_of_avit_are_the_papers(name: str) -> None:
    config, (scale, center, prior, form) = get(name), AVIT[name]
    policy, values = spec.parse(config.policy)
    assert policy == "avit"
    assert (values["gate_scale"], values["gate_center"]) == (scale, center)
    loss = config.loss
    assert (loss.ponder, loss.prior, loss.prior_form, config.epochs) == (5e-4, prior, form, 100)
    assert (loss.target_depth, loss.cost, loss.distill, config.augment.mixup) == (0, 0, 0, 0)


def kind_of(name: str) -> tuple[Any, ...]:
    """What a recipe sets, without the numbers: two of one kind run the same code."""
    settings = flat(get(name))
    policy, values = spec.parse(settings.pop("policy"))
    for other in ("recipe", "backbone", "epochs", "batch_size"):
        settings.pop(other)
    return policy, *sorted(values), *(v if isinstance(v, str) else bool(v) for v in settings.values())


FIRST = {kind_of(name): name for name in reversed(list(RECIPES))}  # of each kind


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in FIRST.values()])
def test_recipes_of_the_same_kind_take_a_step(name: str) -> None:
    config = get(name)
    policy, values = spec.parse(config.policy)
    model = model_of(policy, 3, **values)
    one = Trainer(model, build_objective(config), optim.adamw(model, config), config, Accelerator(cpu=True), model)
    losses, _ = one.step(batch(), 0, 4)
    assert losses.total.isfinite()
    assert set(losses.terms) == {term for term in TERMS if getattr(config.loss, term)}


@pytest.mark.parametrize("name", FIRST.values())
def test_every_kind_of_recipe_trains_through_the_command_line(tmp_path: Path, name: str) -> None:
    where = split_folder(tmp_path / "in")
    starts = get(name).loss.distill or not get(name).optim.backbone_lr
    more = ("--weights", static(tmp_path / "static")) if starts else ()
    assert train(where, tmp_path / "out", "--recipe", name, *more) == 0
    saved = json.loads((tmp_path / "out" / "config.json").read_text())["config"]
    expected = get(name)
    assert saved["recipe"] == name
    settings = flat(expected)
    assert all(saved[k] == settings[k] for k in ("policy", "optim.lr", *(f"loss.{term}" for term in TERMS)))
    terms = {k for k in TERMS if settings[f"loss.{k}"]}
    records = [r for r in log(tmp_path / "out") if r["kind"] == "train"]
    assert len(records) == 3
    for record in records:
        assert {k for k in TERMS if k in record} == terms
        assert math.isfinite(record["loss"])
        total = sum(settings[f"loss.{k}"] * record[k] for k in terms)
        assert record["loss"] == pytest.approx(total, rel=1e-5)
    model = adaptivit.load(tmp_path / "out" / "model")
    assert model.policy_name == spec.parse(expected.policy)[0]
    assert model.class_names == ["a", "b", "c"]


def test_flags_override_a_recipe(tmp_path: Path) -> None:
    where = split_folder(tmp_path / "in")
    words = ("--recipe", "aht-balanced", "--loss.ponder", 0.25, "--policy", "aht:eps=0.1")
    assert train(where, tmp_path / "out", *words) == 0
    saved = json.loads((tmp_path / "out" / "config.json").read_text())["config"]
    assert (saved["loss.ponder"], saved["loss.target_depth"], saved["policy"]) == (0.25, 0.5, "aht:eps=0.1")


def test_the_test_split_is_never_read(tmp_path: Path) -> None:
    where = split_folder(tmp_path / "in")
    assert train(where, tmp_path / "one") == 0
    folder(where / "test", seed=9)
    (where / "test" / "a" / "00.png").write_bytes(b"nobody may look at this")
    assert train(where, tmp_path / "two") == 0
    assert_same_weights(weights(tmp_path / "one"), weights(tmp_path / "two"))


# -- distillation ---------------------------------------------------------------------------------------------------
def test_distillation_is_one_flag(tmp_path: Path) -> None:
    where, teacher = split_folder(tmp_path / "in"), static(tmp_path / "teacher")
    before = (teacher / "model.safetensors").read_bytes()
    assert train(where, tmp_path / "out", "--loss.distill", 1.0, "--weights", teacher, "--optim.lr", 1e-9) == 0
    assert all(r["distill"] >= 0 for r in log(tmp_path / "out") if r["kind"] == "train")
    assert (teacher / "model.safetensors").read_bytes() == before
    assert train(where, tmp_path / "same", "--loss.distill", 1.0, "--teacher", teacher, "--weights", teacher) == 0


def test_the_teacher_is_frozen_and_is_the_static_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, path = split_folder(tmp_path / "in"), static(tmp_path / "teacher")
    step, seen = Trainer.step, []

    def watched(self: Trainer, batch: Loaded, *arguments: Any) -> Any:
        found = step(self, batch, *arguments)
        assert self.teacher is not None
        assert not self.teacher.training
        assert all(not p.requires_grad and p.grad is None for p in self.teacher.parameters())
        with torch.no_grad():
            seen.append(torch.equal(self.teacher(batch.images).logits, adaptivit.load(path)(batch.images).logits))
        return found

    monkeypatch.setattr(Trainer, "step", watched)
    assert train(where, tmp_path / "out", "--loss.distill", 1.0, "--teacher", path, "--policy", "static") == 0
    assert seen == [True] * 3


def test_a_teacher_that_does_not_fit(tmp_path: Path, capsys: Any) -> None:
    where = split_folder(tmp_path / "in")
    words = ("train", "--data", where, "--out", tmp_path / "out", *SMALL, "--loss.distill", 1)
    assert "has 5 classes, the data 3" in refused(capsys, *words, "--teacher", static(tmp_path / "five", 5))
    assert "got neither" in refused(capsys, *words)
    assert not (tmp_path / "out").exists()


# -- mixup, averages, precision, logs -------------------------------------------------------------------------------
@pytest.mark.parametrize("flags", [("--augment.mixup", 0.8), ("--augment.mixup", 0.8, "--augment.cutmix", 1.0)])
def test_mixup_follows_from_the_seed(tmp_path: Path, flags: tuple[Any, ...]) -> None:
    where = split_folder(tmp_path / "in")
    for out in ("one", "two"):
        assert train(where, tmp_path / out, "--policy", "static", "--augment.label-smoothing", 0.1, *flags) == 0
    assert_same_weights(weights(tmp_path / "one"), weights(tmp_path / "two"))


def test_mixup_with_an_odd_batch(tmp_path: Path, capsys: Any) -> None:
    """Trained, or refused in a line: no traceback."""
    where = split_folder(tmp_path / "in")
    assert train(where, tmp_path / "out", "--policy", "static", "--augment.mixup", 0.8, "--batch-size", 7) in (0, 2)


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_saved_model_is_the_average(tmp_path: Path, decay: float) -> None:
    where = split_folder(tmp_path / "in")
    step, states = Trainer.step, []

    def watched(self: Trainer, *arguments: Any) -> Any:
        if not states:
            states.append({k: v.detach().clone() for k, v in self.model.state_dict().items()})
        found = step(self, *arguments)
        states.append({k: v.detach().clone() for k, v in self.model.state_dict().items()})
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", watched)
        assert train(where, tmp_path / "out", "--optim.ema", decay, "--optim.lr", 1e-2, "--policy", "static") == 0
    expected = {k: v.double() for k, v in states[0].items()}
    for n, state in enumerate(states[1:]):
        d = min(decay, (1 + n) / (10 + n))
        expected = {k: d * v + (1 - d) * state[k] for k, v in expected.items()}
    saved = adaptivit.load(tmp_path / "out" / "model").state_dict()
    assert not torch.equal(saved["vit.head.weight"], states[-1]["vit.head.weight"])
    for name, value in saved.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-4, atol=1e-6)
    last = load_file(tmp_path / "out" / "checkpoint" / "model.safetensors")
    assert torch.equal(last["head.weight"], states[-1]["vit.head.weight"]), "training goes on from the model itself"


def test_the_average_starts_from_the_calibrated_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow average over few steps is near the start of the training, the calibrated gate included."""
    where, seen = split_folder(tmp_path / "in"), []
    step = Trainer.step

    def watched(self: Trainer, *arguments: Any) -> Any:
        if not seen:
            assert self.average is not None
            seen.append((self.model.policy.beta.item(), self.average.values["policy.beta"].item()))
        return step(self, *arguments)

    monkeypatch.setattr(Trainer, "step", watched)
    assert train(where, tmp_path / "out", "--policy", "aht", "--optim.ema", 0.999) == 0
    assert seen[0][0] == pytest.approx(seen[0][1])


def test_precision_can_change_between_runs_of_one_process(tmp_path: Path) -> None:
    where = split_folder(tmp_path / "in")
    config = TrainConfig(str(where), "test_vit", "static", img_size=32, epochs=1, batch_size=8, device="cpu")
    assert fit(replace(config, out=str(tmp_path / "first"), precision="fp32"), show=False).images == 12
    assert fit(replace(config, out=str(tmp_path / "out"), precision="bf16"), show=False).images == 12


def test_validation_is_in_full_precision_and_has_the_workers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training runs under bf16 autocast, validation as the saved model will."""
    dtypes: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    forward, workers, batches = AdaptiveViT.forward, [], dataset.batches

    def watched(self: AdaptiveViT, *given: Any, **more: Any) -> Any:
        output = forward(self, *given, **more)
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # not the look before the first step
            dtypes[self.training].add(output.logits.dtype)
        return output

    def loaded(images: Any, order: Any, given: int = 0) -> Any:
        workers.append(given)
        return batches(images, order, given)

    monkeypatch.setattr(AdaptiveViT, "forward", watched)
    monkeypatch.setattr(dataset, "batches", loaded)
    where = split_folder(tmp_path / "in")
    config = TrainConfig(str(where), "test_vit", "static", img_size=32, epochs=1, batch_size=8, device="cpu")
    fit(replace(config, out=str(tmp_path / "out"), precision="bf16", workers=1), show=False)
    assert dtypes == {True: {torch.bfloat16}, False: {torch.float32}}
    assert workers[-2:] == [1, 1]  # training, validation


def test_loaded_batches_can_be_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU, the loader's workers leave batches where it can fetch them without the host's waiting."""
    seen: list[bool] = []
    loader = dataset.DataLoader
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def made(*given: Any, **more: Any) -> Any:
        seen.append(more.pop("pin_memory"))
        return loader(*given, **more)

    monkeypatch.setattr(dataset, "DataLoader", made)
    images = dataset.Images(dataset.splits(folder(tmp_path))["all"], lambda _: torch.ones(3, 4, 4))
    (batch,) = dataset.batches(images, [[0, 9]], workers=1)
    tuple(dataset.batches(images, [[0, 9]]))
    assert seen == [True, False]
    pinned = batch.pin_memory()
    assert pinned.images is not batch.images
    assert torch.equal(pinned.images, batch.images)
    assert torch.equal(pinned.labels, batch.labels)
    assert torch.equal(pinned.indices, batch.indices)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_writes_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    where = split_folder(tmp_path / "in")
    assert train(where, tmp_path / "out", "--run.tensorboard", "--policy", "static") == 0
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    losses = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert [s for s, _ in losses] == [1, 2, 3]
    logged = [r["loss"] for r in log(tmp_path / "out") if r["kind"] == "train"]
    assert [v for _, v in losses] == pytest.approx(logged, rel=1e-5)
    assert "validation/top1" in events.Tags()["scalars"]


def test_drop_path_acts_whatever_the_weights_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, start = split_folder(tmp_path / "in"), static(tmp_path / "static")
    rates, step = [], Trainer.step

    def watched(self: Trainer, *arguments: Any) -> Any:
        rates.append(getattr(self.model.vit.blocks[-1].drop_path1, "drop_prob", 0.0))
        return step(self, *arguments)

    monkeypatch.setattr(Trainer, "step", watched)
    for i, source in enumerate((start / "model.safetensors", start)):
        assert train(where, tmp_path / str(i), "--policy", "static", "--optim.drop-path", 0.3, "--weights", source) == 0
    assert rates == pytest.approx([0.3] * 6)


def test_an_image_cut_short_stops_training_with_its_name_or_is_left_out(tmp_path: Path, capsys: Any) -> None:
    """A JPEG without its end passes the look at headers; the run says its name when it meets it."""
    from PIL import Image

    where = split_folder(tmp_path / "in")
    bad = where / "train" / "a" / "bad.jpg"
    Image.fromarray(pixels(1, 64)[0]).save(bad)
    bad.write_bytes(bad.read_bytes()[:900])
    more = ("--policy", "static", "--batch-size", 25)
    assert train(where, tmp_path / "out", *more) == 2
    assert str(bad) in capsys.readouterr().err
    assert train(where, tmp_path / "allowed", *more, "--allow-corrupt") == 0


# -- the optimiser --------------------------------------------------------------------------------------------------
def test_the_schedule_warms_up_and_follows_a_cosine() -> None:
    config = TrainConfig(data="", epochs=5, optim=OptimConfig(lr=1.0, min_lr=0.1, warmup_epochs=1))
    rates = [optim.learning_rate(config, s, 4) for s in range(20)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    expected = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * np.arange(16) / 16))
    assert rates[4:] == pytest.approx(expected.tolist())


def test_weight_decay_is_for_matrices_alone() -> None:
    model = adaptivit.create("test_vit", "aht", img_size=32, num_classes=3)
    groups = optim.adamw(model, TrainConfig(data="", optim=OptimConfig(weight_decay=0.3))).param_groups
    decay = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    for name, p in model.named_parameters():
        plain = p.ndim < 2 or name in ("vit.pos_embed", "vit.cls_token")
        assert decay[id(p)] == (0.0 if plain else 0.3), name
    assert len(decay) == sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_gradients_are_clipped() -> None:
    config = TrainConfig(data="", policy="static", optim=OptimConfig(clip_grad=0.01, lr=1e-9))
    model = adaptivit.create("test_vit", "static", img_size=32, num_classes=3)
    trainer = Trainer(model, build_objective(config), optim.adamw(model, config), config, Accelerator(cpu=True), model)
    images = torch.randn(4, 3, 32, 32)
    trainer.step(Loaded(images, torch.tensor([0, 1, 2, 0]), torch.arange(4), []), 0, 10)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)
