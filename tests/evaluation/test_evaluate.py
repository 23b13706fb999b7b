"""evaluate: figures against literal recomputation, files whole or not there, timm's own answers on real images."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import adaptivit
from adaptivit.data import dataset
from adaptivit.data.dataset import Images, batches, in_order
from adaptivit.evaluation.evaluate import Result, evaluate, flipped_decisions, paired_difference
from adaptivit.utils.csv import append_csv
from tests.support.commands import SMALL, refused, run, static
from tests.support.data_sets import folder, npz, split_folder
from tests.support.models import model_of, shared

TIMM = ["model", "top1", "top1_err", "top5", "top5_err", "param_count", "img_size", "crop_pct", "interpolation"]


def labelled(tmp_path: Path, classes: int = 9) -> dataset.Labelled:
    return dataset.for_evaluation(folder(tmp_path / "in", tuple("abcdefghij"[:classes]), each=3), "auto")


def measured(model: adaptivit.AdaptiveViT, images: Images, batch: int = 8, **given: Any) -> Result:
    return evaluate(model, dataset.batches(images, dataset.in_order(len(images), batch)), **given)


# -- the figures ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["masked", "packed"])
def test_accuracy_cost_and_depth_against_one_image_at_a_time(tmp_path: Path, layout: str) -> None:
    model = model_of("aht")
    images = Images(labelled(tmp_path), model.preprocessing.evaluation())
    result = measured(model, images, layout=layout)
    top1, top5, macs, blocks, depth, live = [], [], [], [], [], []
    with torch.no_grad():
        for i in range(len(images)):
            sample = images[i]
            assert sample.image is not None
            out = model(sample.image[None], layout="masked")
            order = out.logits[0].argsort(descending=True).tolist()
            top1.append(order[0] == sample.label)
            top5.append(sample.label in order[:5])
            macs.append(float(out.macs_deployed) / 1e9)
            blocks.append(float(out.macs_blocks) / 1e9)
            depth.append(float(out.trace.attended[:, 0, 1:].double().sum(0).mean()))
            live.append(out.trace.attended[:, 0].sum(1).double().numpy())
    assert (result.images, result.unreadable, result.layout) == (27, 0, layout)
    assert result.scores == [100.0 * hit for hit in top1]
    assert result.indices == list(range(27))
    assert result.score == result.metrics["top1"] == pytest.approx(100 * np.mean(top1))
    assert result.metrics["top5"] == pytest.approx(100 * np.mean(top5))
    assert 0 < result.metrics["top5"] < 100
    assert result.gmacs == pytest.approx(np.mean(macs))
    assert result.gmacs_blocks == pytest.approx(np.mean(blocks))
    assert result.mean_depth == pytest.approx(np.mean(depth))
    assert result.live == pytest.approx(np.mean(live, 0).tolist())
    assert result.saved == pytest.approx(1 - np.mean(macs) / result.gmacs_static)
    assert 0 < result.saved < 1


def test_plan_gap_and_correlation_against_numpy(tmp_path: Path) -> None:
    model = model_of("aht")
    images = Images(labelled(tmp_path), model.preprocessing.evaluation())
    result = measured(model, images)
    halts, plans = [], []
    with torch.no_grad():
        for batch in dataset.batches(images, dataset.in_order(len(images), 5)):
            facts = model(batch.images, aux={"plan"}).trace.facts
            for stage in range(len(facts["plan"])):
                chosen = facts["planned"][stage]
                halts += facts["halt"].expand(facts["planned"].shape)[stage][chosen].tolist()
                plans += facts["plan"][stage][chosen].tolist()
    assert np.std(halts) > 0
    assert result.plan_gap == pytest.approx(np.mean(np.array(halts) - plans), rel=1e-5)
    assert result.plan_correlation == pytest.approx(np.corrcoef(halts, plans)[0, 1], rel=1e-4)
    assert measured(model_of("static"), images).plan_gap is None


def result_of(correct: list[bool], indices: list[int] | None = None) -> Result:
    n = len(correct)
    return Result(
        *(n, 0, {}, 1, 1, 1, 1, [], [], "", 1), scores=[100.0 * c for c in correct], indices=indices or list(range(n))
    )


def test_paired_difference_by_hand() -> None:
    """Five images, differences 100, 0, 0, 100, -100 points: mean 20, variance 7000, half width 1.96 sqrt(7000 / 5)."""
    first = result_of([True, True, False, True, False])
    second = result_of([False, True, False, False, True])
    assert paired_difference(first, second) == pytest.approx((20.0, 1.96 * math.sqrt(7000 / 5), 5))
    shuffled = result_of([True, False, False, True, False, True], [4, 3, 2, 1, 0, 77])
    assert paired_difference(first, shuffled) == pytest.approx((20.0, 1.96 * math.sqrt(7000 / 5), 5))
    assert paired_difference(first, first) == (0.0, 0.0, 5)
    with pytest.raises(adaptivit.UserError, match="no image in common"):
        paired_difference(first, result_of([True], [9]))


def test_flipped_decisions_counts_depths_that_differ() -> None:
    model, images = model_of("aht"), torch.randn(4, 3, 32, 32)
    assert flipped_decisions(model, model, images) == 0.0
    other = model_of("aht", threshold=0.4)
    depths = [m(images).trace.depth for m in (model, other)]
    expected = float((depths[0] != depths[1]).double().mean())
    assert flipped_decisions(model, other, images) == pytest.approx(expected)
    assert expected > 0


# -- adaptivit evaluate ---------------------------------------------------------------------------------------------
def test_the_command_writes_json_and_csv_with_timms_columns(tmp_path: Path, capsys: Any) -> None:
    model = model_of("aht")
    model.save_pretrained(tmp_path / "model")
    images = Images(labelled(tmp_path), model.preprocessing.evaluation())
    expected = measured(model, images)
    start = ("evaluate", "--data", tmp_path / "in", "--checkpoint", tmp_path / "model", "--device", "cpu")
    assert run(*start, "--json", tmp_path / "r.json", "--csv", tmp_path / "r.csv") == 0
    printed = capsys.readouterr().out
    assert f"{expected.metrics['top1']:.2f} % / {expected.metrics['top5']:.2f} %" in printed
    assert "mean N - N_target" in printed
    row = json.loads((tmp_path / "r.json").read_text())
    assert row["top1"] == round(expected.score, 4)
    assert row["top1_err"] == round(100 - expected.score, 4)
    assert row["gmacs"] == pytest.approx(expected.gmacs)
    assert row["param_count"] == round(sum(p.numel() for p in model.parameters()) / 1e6, 3)
    assert (row["img_size"], row["crop_pct"]) == (32, model.preprocessing.crop_pct)
    with (tmp_path / "r.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 1
    assert set(TIMM) <= table[0].keys()
    assert table[0]["model"] == str(tmp_path / "model")
    assert float(table[0]["top1"]) == row["top1"]


def test_the_csv_grows_by_rows_and_columns(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    append_csv(path, {"model": "a, b", "top1": 1.5, "live": [1.0, 2.25]})
    append_csv(path, {"model": "c", "top1": 2, "new": "x"})
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {"model": "a, b", "top1": "1.5", "live": "1.00 2.25", "new": ""}
    assert rows[1] == {"model": "c", "top1": "2", "live": "", "new": "x"}


def test_compare_to_prints_the_paired_difference(tmp_path: Path, capsys: Any) -> None:
    first, second = model_of("aht"), model_of("static")
    first.save_pretrained(tmp_path / "one")
    static(tmp_path / "two", 9)
    second = adaptivit.load(tmp_path / "two")
    images = Images(labelled(tmp_path), first.preprocessing.evaluation())
    difference, half, n = paired_difference(measured(first, images), measured(second, images))
    start = ("evaluate", "--data", tmp_path / "in", "--checkpoint", tmp_path / "one", "--json", tmp_path / "r.json")
    assert run(*start, "--compare-to", tmp_path / "two") == 0
    assert f"{difference:+.2f} ± {half:.2f} points (paired, 95 %, {n} images)" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["difference_ci95"] == pytest.approx(half)


def test_an_unreadable_image_is_left_out_and_named(tmp_path: Path, capsys: Any) -> None:
    where = folder(tmp_path / "in", each=2)
    (where / "b" / "01.png").write_bytes(b"no picture")
    start = ("evaluate", "--data", where, "--checkpoint", static(tmp_path / "model"))
    assert run(*start, "--json", tmp_path / "r.json") == 0
    assert f"left out: 1 file\n  {where / 'b' / '01.png'}: cannot be read" in capsys.readouterr().err
    row = json.loads((tmp_path / "r.json").read_text())
    assert (row["images"], row["unreadable"]) == (5, 1)
    for file in where.rglob("*.png"):
        file.write_bytes(b"no picture")
    assert run(*start) == 2
    assert "No image could be read (6 unreadable)" in capsys.readouterr().err


def test_predict_goes_on_past_a_bad_file(tmp_path: Path, capsys: Any) -> None:
    where = folder(tmp_path / "in", each=2)
    (where / "b" / "01.png").write_bytes(b"no picture")
    (where / "b" / "notes.txt").write_text("no picture")
    start = ("predict", "--checkpoint", static(tmp_path / "model"), "--format", "jsonl", "--batch-size", 1)
    capsys.readouterr()
    assert run(*start, where) == 1
    said = capsys.readouterr()
    images = [json.loads(line)["image"] for line in said.out.splitlines()]
    assert images == [str(p) for p in sorted(where.rglob("*.png")) if p != where / "b" / "01.png"]
    assert f"left out: 2 files\n  Cannot read the image {where / 'b' / '01.png'} (" in said.err
    assert f"  {where / 'b' / 'notes.txt'}: no image by its suffix" in said.err
    assert run(*start, where / "a") == 0
    assert "Cannot read the image" in refused(capsys, *start, where / "b" / "01.png")
    assert "no images, but 1 other files" in refused(capsys, *start, text_folder(tmp_path / "texts"))


def text_folder(root: Path) -> Path:
    root.mkdir()
    (root / "notes.txt").write_text("no picture")
    return root


def test_limit_split_layout_precision_and_npz(tmp_path: Path, capsys: Any) -> None:
    path = npz(tmp_path / "x.npz")
    model_of("aht", 3).save_pretrained(tmp_path / "model")
    start = ("evaluate", "--data", path, "--checkpoint", tmp_path / "model", "--json", tmp_path / "r.json")
    for more, count in (((), 6), (("--limit", 4), 4), (("--split", "train", "--workers", 1), 24)):
        assert run(*start, *more) == 0
        assert json.loads((tmp_path / "r.json").read_text())["images"] == count
    assert run(*start, "--precision", "bf16", "--layout", "masked") == 0
    row = json.loads((tmp_path / "r.json").read_text())
    assert (row["precision"], row["layout"]) == ("bf16", "masked")
    assert 0 <= row["flipped_decisions"] < 0.5
    capsys.readouterr()
    assert "no split 'val'" in refused(capsys, *start, "--split", "val")


def test_classes_are_matched_by_name_or_refused(tmp_path: Path, capsys: Any) -> None:
    """A folder with some of the model's classes must not be scored against other ones."""
    model = model_of("static", 3)
    model.class_names = ["a", "b", "c"]
    model.save_pretrained(tmp_path / "model")
    only = folder(tmp_path / "in", ("c",), each=4)
    transform, right = model.preprocessing.evaluation(), 0
    with torch.no_grad():
        for path in (only / "c").iterdir():
            with Image.open(path) as file:
                right += int(model(transform(file.convert("RGB"))[None]).logits.argmax()) == 2
    code = run("evaluate", "--data", only, "--checkpoint", tmp_path / "model", "--json", tmp_path / "r.json")
    if code == 0:
        assert json.loads((tmp_path / "r.json").read_text())["top1"] == 100 * right / 4
    else:
        assert code == 2
        assert "class" in capsys.readouterr().err


# -- real weights on real images ------------------------------------------------------------------------------------
def timm_answers(images: Images) -> list[int]:
    vit = timm.create_model("deit_tiny_patch16_224")
    from safetensors.torch import load_file

    weights = load_file(shared("weights/deit_tiny_patch16_224.safetensors"))
    vit.load_state_dict({k: v.float() for k, v in weights.items()})
    vit.eval()
    transform = timm.data.create_transform(
        input_size=(3, 224, 224),
        crop_pct=1.0,
        interpolation="bicubic",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    with torch.no_grad():
        stack = torch.stack([transform(images.labelled.image(i)) for i in range(len(images))])
        return [int(y) for x in stack.split(20) for y in vit(x).argmax(1)]


def deit(limit: int) -> tuple[adaptivit.AdaptiveViT, Images]:
    where = shared("data/imagenet/eval")
    weights = shared("weights/deit_tiny_patch16_224.safetensors")
    model = adaptivit.create("deit_tiny_patch16_224", "static", weights=weights)
    return model, Images(dataset.for_evaluation(where, "auto").spread(limit), model.preprocessing.evaluation())


def test_static_deit_answers_as_timm_does_image_for_image() -> None:
    model, images = deit(20)
    expected = timm_answers(images)
    labels = [int(y) for y in images.labelled.labels]
    assert len(set(labels)) == 20
    result = measured(model, images, 20)
    assert result.scores == [100.0 * (a == b) for a, b in zip(expected, labels, strict=True)]
    with torch.no_grad():
        ours = [int(model(images[i].image[None]).logits.argmax()) for i in range(0, 20, 4)]  # type: ignore[index]
    assert ours == expected[::4]


def test_static_deit_on_many_images() -> None:
    """Images of imagenet/eval through timm's own forward and through the packed layout: every fortieth, or with
    ADAPTIVIT_SLOW=1 all, which gives the accuracy that the docs quote."""
    count = 2000 if os.environ.get("ADAPTIVIT_SLOW") == "1" else 50
    model, images = deit(count)
    hits = []
    with torch.inference_mode():
        for batch in batches(images, in_order(count, 50)):
            timm, ours = model.vit(batch.images).argmax(1), model(batch.images, layout="packed").logits.argmax(1)
            assert torch.equal(timm, ours), "a prediction differs from timm's"
            hits.append(ours == batch.labels)
    top1 = 100 * float(torch.cat(hits).double().mean())
    assert top1 == pytest.approx(70.90, abs=1e-6 if count == 2000 else 12.0)


# -- a full disk ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, capsys: Any, monkeypatch: Any, call: str) -> None:
    where, model = split_folder(tmp_path / "in"), static(tmp_path / "model")
    csv = tmp_path / "r.csv"
    csv.write_text("model,top1\nold,1\n")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        for words in (
            ("train", "--data", where, "--out", tmp_path / "out", *SMALL),
            ("predict", where / "val", "--checkpoint", model, "--format", "csv", "--out", tmp_path / "p.csv"),
        ):
            assert "No space left" in refused(capsys, *words)
        for flag, path in (("--json", tmp_path / "r.json"), ("--csv", csv)):
            assert run("evaluate", "--data", where, "--checkpoint", model, flag, path) == 2
            assert "No space left" in capsys.readouterr().err
    assert csv.read_text() == "model,top1\nold,1\n"
    assert {p.name for p in tmp_path.iterdir()} <= {"in", "model", "r.csv", "out"}
    assert not list((tmp_path / "out").glob("*")), "an output that failed is not there at all"
