"""What a comparison consists of: its rows in order, the images that all are judged by, and the model of a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...data import dataset
from ...data.dataset import Labelled
from ...factory import create, load
from ...model import AdaptiveViT
from ...policies import spec
from ...training.config import TrainConfig
from ...training.gate_init import calibrate
from ...training.methods import parse_method, slug
from ...utils.settings import changed
from .config import CompareConfig
from .results import STATIC, TRAINED_ON


@dataclass(frozen=True)
class Entry:
    """A row to come: one method with one seed."""

    method: str  # as it was written
    seed: int
    training: TrainConfig
    epochs: int  # on this data since --weights

    @property
    def run(self) -> Path:
        return Path(self.training.out)


def plan(config: CompareConfig) -> list[Entry]:
    """Every row in the order in which it is run: for each seed static first, then the methods as they were given."""
    out = Path(config.out)
    methods = [m for m in dict.fromkeys(m.strip() for m in config.methods) if m != STATIC]
    entries = []
    for seed in dict.fromkeys(config.seeds):
        shared = config.shared(seed)
        first = parse_method(STATIC, shared)
        if config.start == "static":  # there is no teacher yet
            first = changed(first, {"loss.distill": 0.0})
            model = str(out / "runs" / slug(STATIC, seed) / "model")
            shared = replace(shared, weights=model, teacher=shared.teacher or (model if shared.loss.distill else None))
        entries.append(Entry(STATIC, seed, first, config.epochs))
        again = [(TRAINED_ON, parse_method(STATIC, shared))] if config.start == "static" else []
        for method, training in again + [(m, parse_method(m, shared)) for m in methods]:
            entries.append(Entry(method, seed, training, config.epochs * (2 if config.start == "static" else 1)))
    return [replace(e, training=replace(e.training, out=str(out / "runs" / slug(e.method, e.seed)))) for e in entries]


def report_images(config: CompareConfig, seed: int) -> Labelled:
    """The images that all methods are judged by; none of them was trained on."""
    found = dataset.splits(config.data)
    wanted = ("test", "val") if config.split == "auto" else (config.split,)
    labelled = next((found[name] for name in wanted if name in found), None)
    if labelled is None and config.split != "test":
        if config.epochs:
            labelled = dataset.for_training(config.data, config.val_split, seed)[1]
        else:
            labelled = dataset.for_evaluation(config.data, "auto")
    if labelled is None:
        labelled = dataset.for_evaluation(config.data, "test")  # says that there is none
    return labelled if config.limit is None else labelled.spread(config.limit)


def model_of(config: CompareConfig, entry: Entry) -> AdaptiveViT:
    """The model of a row: as training saved it, or the weights adapted without training."""
    if config.epochs:
        return load(entry.run / "model").float()
    training = entry.training
    policy, values = spec.parse(training.policy)
    found = dataset.splits(config.data)
    some = found.get("val") or found.get("train") or next(iter(found.values()))
    torch.manual_seed(entry.seed)
    model = create(
        training.backbone,
        policy,
        weights=training.weights,
        num_classes=len(some.classes) if training.weights is None else None,
        img_size=training.img_size,
        **values,
    )
    if training.weights is None:
        model.class_names = list(some.classes)
    calibrate(model, values, training, some, "cpu")  # as training does before its first step
    return model
