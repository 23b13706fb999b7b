"""What A-ViT's figures measure, on tiny models."""

from __future__ import annotations

from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from adaptivit.data.dataset import Images, Labelled
from adaptivit.experiments.benchmark.contenders import BEST, OWN, TIMM
from adaptivit.experiments.reproduce.figures import Found, Given, entry_zeroing, throughput, token_depth
from adaptivit.experiments.reproduce.figures.entry_zeroing import PLACES
from adaptivit.experiments.reproduce.tables import Table
from adaptivit.model import AdaptiveViT
from adaptivit.visualize.collect import look
from adaptivit.visualize.pictures import through
from tests.support.models import model_of


@dataclass(frozen=True)
class Ready(Given):
    """Models in place of jobs."""

    models: dict[str, AdaptiveViT] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(self.models)

    def model(self, name: str) -> AdaptiveViT:
        return self.models[name].eval()


def ready(models: dict[str, AdaptiveViT], count: int = 4, **options: Any) -> Ready:
    """A table of these models on random pictures."""
    given = Ready(Table("avit-test", "", "", (), "", options=options), {}, {}, torch.device("cpu"), True, models)
    pixels = np.random.default_rng(0).integers(0, 255, (count, 32, 32, 3), np.uint8)
    given.__dict__["images"] = Labelled("pictures", list(pixels), [i % 9 for i in range(count)], tuple("abcdefghi"))
    return given


def test_throughput_beside_the_best_static_model_of_each_backbone() -> None:
    models = {"static": model_of(), "ToMe": model_of("tome", r=2), "half": model_of("static", share=0.5)}
    found = throughput.measure(ready(models, batch=6, paper={"ToMe": "2,900"}))
    rows = {str(row["contender"]): row for row in found.rows}
    assert set(rows) == {TIMM, BEST, OWN, *models}
    assert {row["batch"] for row in rows.values()} == {"6"}
    for row in rows.values():
        assert float(row["images_per_s"]) == pytest.approx(6e3 / float(row["ms_p50"]), rel=1e-3)
    assert float(rows["half"]["mac_share"]) < 0.6
    lines = {line["what"].partition(",")[0]: line for line in found.compared}
    assert list(lines) == list(models)
    assert lines["ToMe"]["paper"] == "2,900"
    assert lines["ToMe"]["ours"].endswith(f"({float(rows['ToMe']['speed_vs_best_static']):.2f})")
    assert found.pictures["throughput.png"][1:4] == b"PNG"


def test_zeroing_an_entry_is_that_of_timms_model() -> None:
    model = model_of()
    with torch.no_grad():
        model.vit.blocks[1].mlp.fc2.bias[5] = 40.0  # an entry that matters
    given = ready({"DeiT-T": model, "A-ViT": model_of("avit")}, count=40, repeats=10**6, paper={"DeiT-T": "-0.08"})
    given.images.labels[:] = _answers(model, given, None)
    found = entry_zeroing.measure(given)
    rows = {(str(row["where"]), int(row["entry"])): row for row in found.rows}
    assert set(rows) == {(place, entry) for place in PLACES for entry in range(model.shape.dim)}
    assert {row["row"] for row in rows.values()} == {"DeiT-T"}
    for (place, entry), row in rows.items():
        if entry in (0, 5):
            right = [a == b for a, b in zip(_answers(model, given, entry, place), given.images.labels, strict=True)]
            assert row["top1_zeroed"] == pytest.approx(100 * sum(right) / 40)
            assert row["change"] == pytest.approx(row["top1_zeroed"] - 100)
    for place, line in zip(PLACES, found.compared, strict=True):
        changes = [float(row["change"]) for (where, _), row in rows.items() if where == place]
        assert min(changes) < 0
        ours = f"{np.mean(changes):+.2f} ± {np.std(changes, ddof=1):.2f}"
        assert line["ours"].startswith(f"{ours} (± ")
        assert (line["what"], line["paper"]) == (f"DeiT-T, zero in {place}, points", "-0.08")


def _answers(model: AdaptiveViT, given: Ready, entry: int | None, place: str = "") -> list[int]:
    """Classes by timm's modules, with an entry set to zero before the first or every block and the norm."""

    def zero(_: Any, rows: tuple[torch.Tensor]) -> torch.Tensor:
        return rows[0].clone().index_fill_(-1, torch.tensor([] if entry is None else [entry], dtype=torch.long), 0)

    places = [*model.vit.blocks, model.vit.norm][: 1 if place == PLACES[0] else None]
    hooks = [module.register_forward_pre_hook(zero) for module in places]
    images = Images(given.images, model.preprocessing.evaluation())
    with torch.inference_mode():
        answers = [int(model.vit(images[i].image[None]).argmax()) for i in range(len(images))]
    for hook in hooks:
        hook.remove()
    return answers


def drawn(models: dict[str, AdaptiveViT], **options: Any) -> Found:
    found = token_depth.measure(ready(models, count=18, **options))
    for name, picture in found.pictures.items():
        with Image.open(BytesIO(picture)) as image:
            assert min(image.size) > 200, name
    return found


def test_depths_places_and_extremes_are_the_models() -> None:
    model = model_of("avit", gate_scale=2, gate_center=1)
    seen = look(model, ready({}, count=18).images)
    assert not seen.equal
    maps = drawn({"A-ViT": model}, draw="maps", shown=6, first=1)
    assert [row["mean_depth"] for row in maps.rows] == [float(seen.mean_depth[i]) for i in (1, 4, 7, 10, 13, 16)]
    places = drawn({"A-ViT": model}, draw="places")
    assert set(places.pictures) == {"positions.png", "scores.png"}
    depth = {(row["row"], row["column"]): row["mean"] for row in places.rows if row["what"] == "depth"}
    assert depth[1, 0] == pytest.approx(seen.depth[:, seen.grid[1]].mean())
    first = next(row for row in places.rows if row["what"] == "score")
    assert seen.scores is not None
    assert first["median"] == pytest.approx(np.median(np.nan_to_num(seen.scores.values[0]).mean(-1)), rel=1e-5)
    ends = drawn({"A-ViT": model}, draw="extremes", shown=1)
    right = seen.mean_depth[seen.correct] if seen.correct is not None and seen.correct.sum() > 1 else seen.mean_depth
    assert [row["mean_depth"] for row in ends.rows] == [right.min(), right.max()]


def test_methods_side_by_side_and_classes_that_gain_and_lose() -> None:
    models = {"static": model_of(), "A-ViT": model_of("avit", gate_scale=2, gate_center=1)}
    beside = drawn(models, draw="beside", shown=2)
    whole = {(row["row"], row["image"]): row["through_all_percent"] for row in beside.rows}
    assert whole["static", "image 1"] == 100 > whole["A-ViT", "image 1"]
    given = ready({}, count=18).images
    static, seen = (look(model, given) for model in models.values())
    assert static.correct is not None
    assert seen.correct is not None
    classes = drawn(models, draw="classes")
    change = sum(float(row["change"]) * int(row["images"]) for row in classes.rows) / 18
    assert change == pytest.approx(100 * (seen.correct.mean() - static.correct.mean()))
    assert "2.0 images a class" in classes.notes[0]


def test_patches_that_left_are_white() -> None:
    seen = look(model_of("avit", gate_scale=2, gate_center=1), ready({}, count=2).images)
    picture = np.asarray(through(seen, 0, 32)).reshape(seen.grid[0], 32 // seen.grid[0], seen.grid[1], -1, 3)
    white = (picture == 255).all((1, 3, 4))
    assert (white == (seen.depth[0] < seen.layers).reshape(seen.grid)).all()
    assert white.any()
