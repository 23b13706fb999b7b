"""A second task in one class, and nothing else: trained, evaluated, predicted, pictured, served, saved and loaded."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import adaptivit
from adaptivit import tasks
from adaptivit.data import dataset
from adaptivit.errors import DataError, UserError, WeightsError
from adaptivit.serve import Service
from adaptivit.tasks import registry
from adaptivit.tasks.protocol import Judged, Labels, Metric
from adaptivit.training import losses
from tests.support.commands import SMALL, log, refused, run, train
from tests.support.data_sets import folder
from tests.support.models import pictures, tiny
from tests.support.serving import running


class Brightness(adaptivit.Task):
    """Brightness of the left and of the right half of an image, in 0..1: labels [B, 2], mean absolute error."""

    noun: ClassVar[str] = "halves"
    schema: ClassVar[Mapping[str, Any]] = {"brightness": {"type": "array", "items": {"type": "number"}}}
    score: ClassVar[str] = "error"
    metrics: ClassVar[Mapping[str, Metric]] = {"mae": Metric("mean error", "", 4), "rmse": Metric("RMSE", "", 4)}

    def encode(
        self, labels: Mapping[str, Labels], names: tuple[str, ...], source: str
    ) -> tuple[dict[str, Labels], tuple[str, ...]]:
        found: dict[str, Labels] = {}
        for split, values in labels.items():
            try:
                found[split] = np.asarray(values, np.float32).reshape(len(values), 2)
            except (TypeError, ValueError):
                raise DataError(f"{source}:{split}: expected two numbers an image, got {values[0]!r}.") from None
        return found, ("left", "right")

    def collate(self, labels: Labels) -> Tensor:
        return torch.tensor(np.asarray(labels))

    def outputs(self, names: tuple[str, ...]) -> int:
        return 2

    def loss(self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        return (logits - targets).square().mean(-1)

    def distance(self, logits: Tensor, teacher: Tensor) -> Tensor:
        return self.loss(logits, teacher)

    def judge(self, logits: Tensor, labels: Tensor) -> Judged:
        error = (logits.float() - labels).double()
        mean = error.abs().mean(-1)
        return Judged(mean, {"mae": mean.sum(), "square": error.square().mean(-1).sum()})

    def figures(self, sums: Mapping[str, Tensor], images: int) -> dict[str, float]:
        return {"mae": float(sums["mae"]) / images, "rmse": (float(sums["square"]) / images) ** 0.5}

    def answer(self, logits: Tensor, names: Sequence[str] | None, top_k: int = 3) -> dict[str, Any]:
        return {"brightness": logits.tolist()}

    def caption(self, answer: Mapping[str, Any]) -> str:
        return "left {:.2f}, right {:.2f}".format(*answer["brightness"])


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    adaptivit.register_task("brightness")(Brightness)
    yield
    registry.PLUGINS.registered.pop("brightness", None)


def halves(count: int, seed: int) -> tuple[Any, Any]:
    x = np.random.default_rng(seed).integers(0, 256, (count, 2), dtype=np.uint8)
    return np.repeat(np.broadcast_to(x[:, None, :, None], (count, 32, 2, 3)), 16, 2).copy(), x / 255


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (x, y), (a, b) = halves(64, 0), halves(16, 1)
    place = tmp_path_factory.mktemp("brightness") / "x.npz"
    np.savez(place, train_x=x, train_y=y, val_x=a, val_y=b)
    return place


METHOD = ("--policy", "aht:straight_through=true", "--task", "brightness", "--epochs", 4, "--optim.lr", 2e-3)


def test_one_class_is_enough(data: Path, tmp_path: Path, capsys: Any) -> None:
    flags = ("--augment.kind", "none", "--run.accumulate", 2, "--augment.on", "device", "--loss.ponder", 0.001)
    assert train(data, tmp_path / "out", *METHOD, *flags) == 0, capsys.readouterr().err
    assert "mean error" in capsys.readouterr().out
    steps = [r for r in log(tmp_path / "out") if r["kind"] == "train"]
    assert steps[-1]["error"] < 0.5 * steps[0]["error"], "it learns"
    assert {"mae", "rmse"} <= log(tmp_path / "out")[-1].keys()

    place = tmp_path / "out" / "model"
    model = adaptivit.load(place)
    assert (model.task, model.class_names) == ("brightness", ["left", "right"])
    assert "| mean error |" in (card := (place / "README.md").read_text())
    assert "2 halves (left, right)" in card
    model.save_pretrained(tmp_path / "again")
    assert adaptivit.load(tmp_path / "again").task == "brightness"

    words = ("--data", data, "--checkpoint", place, "--json", tmp_path / "r.json", "--compare-to", place)
    assert run("evaluate", *words) == 0
    row, printed = json.loads((tmp_path / "r.json").read_text()), capsys.readouterr().out
    assert row["mae"] == pytest.approx(log(tmp_path / "out")[-1]["mae"], abs=1e-3)
    assert row["difference"] == 0
    assert "mean error / RMSE" in printed

    x, y = halves(3, 2)
    for i in range(3):
        Image.fromarray(x[i]).save(tmp_path / f"{i}.png")
    shots = [tmp_path / f"{i}.png" for i in range(3)]
    for kind in ("jsonl", "csv"):
        assert run("predict", *shots, "--checkpoint", place, "--format", kind, "--out", tmp_path / f"p.{kind}") == 0
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert np.abs(np.array([line["brightness"] for line in lines]) - y).mean() < 0.25
    assert "brightness" in next(csv.DictReader(io.StringIO((tmp_path / "p.csv").read_text())))
    assert run("predict", *shots, "--checkpoint", place) == 0
    assert "left 0." in capsys.readouterr().out

    with running(Service(model, wait=0.0)) as live, live.client() as client:
        sent = {"images": ("0.png", shots[0].read_bytes())}
        answer = client.post("/v1/predict", files=sent)
        assert answer.json()["images"][0]["brightness"] == pytest.approx(lines[0]["brightness"], rel=1e-3)
        assert "brightness" in json.dumps(client.get("/openapi.json").json())
        assert "left 0." in client.post("/demo/look", files=sent).json()["caption"]


def test_it_is_pictured(data: Path, tmp_path: Path) -> None:
    model = tiny("avit", more={"num_classes": 2})
    model.task = "brightness"
    page = adaptivit.visualize.report(model, adaptivit.visualize.data_set(data, model), tmp_path / "report", shown=2)
    assert "left " in page.read_text()
    assert "left " in (tmp_path / "report/images.csv").read_text()


@torch.no_grad()
def test_its_loss_is_that_of_exits_and_of_a_teacher() -> None:
    task, targets = tasks.get("brightness"), torch.rand(3, 2)
    output = tiny("pondernet", more={"num_classes": 2})(pictures(), aux=("exits",))
    batch = losses.Batch(targets, teacher_logits=targets)
    each = [float(task.loss(y, targets).mean()) for y in output.trace.fact("exits")]
    assert float(losses.Exits(task=task)(output, batch)) == pytest.approx(np.mean(each), rel=1e-5)
    assert torch.equal(losses.Distillation(task)(output, batch), losses.TaskLoss(0.0, task)(output, batch))


def test_a_task_is_part_of_what_fits(data: Path, tmp_path: Path, capsys: Any) -> None:
    words = ("--out", tmp_path / "out", *METHOD[:-4])
    assert "two numbers an image" in refused(capsys, "train", "--data", folder(tmp_path / "in"), *words)
    assert "task 'bright'" in refused(capsys, "train", "--data", data, *words, "--task", "bright")
    small = (*SMALL[:6], "--augment.mixup", 0.5)
    assert "leave them at 0" in refused(capsys, "train", "--data", data, *words, *small)
    with pytest.raises(DataError, match="read for the task 'brightness', the model has 'classification'"):
        dataset.for_evaluation(data, "val", "brightness").for_model(tiny("static"))
    model = tiny("static", more={"num_classes": 2})
    model.task = "brightness"
    model.save_pretrained(tmp_path / "saved")
    registry.PLUGINS.registered.pop("brightness")
    with pytest.raises(WeightsError, match=r"task 'brightness', which is unknown here .*register_task\('brightness'\)"):
        adaptivit.load(tmp_path / "saved")
    with pytest.raises(UserError, match="built in"):
        adaptivit.register_task("classification")(Brightness)
