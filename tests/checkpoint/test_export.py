"""Export: the cropped layout equals the masked one, files say what the model says, and what does not is not written."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adaptivit
from adaptivit.budget.control import RunSetting
from adaptivit.checkpoint import export
from adaptivit.errors import UserError
from adaptivit.execution.torch import Executor
from adaptivit.forward import forward
from adaptivit.layouts.padded import Padded
from tests.support.commands import refused, run
from tests.support.models import SIDES, assert_close, assert_same_run, pictures, shared, tiny
from tests.support.policies import PAPERS
from tests.support.traces import random_trace

HALTING: dict[str, tuple[str, dict[str, Any]]] = {
    "aht": ("aht", {"beta": -1.0}),
    "received": ("aht_merge", PAPERS | {"beta": -0.5, "feature": "received", "removal": "drop"}),
    "aht_merge": ("aht_merge", PAPERS | {"beta": -1.0}),
    "avit": ("avit", {"gate_center": 1.0}),
    "spvit": ("spvit", {}),
    "act": ("act", {"bias": 0.0}),
    "act, spatial": ("act", {"bias": 0.0, "unit": "token", "gate": "block"}),
    "confidence": ("confidence", {"threshold": 0.2}),
    "entropy of own heads": ("confidence", {"threshold": 0.02, "criterion": "entropy", "heads": "own"}),
    "similarity": ("similarity", {"threshold": 3.0}),
    "pondernet": ("pondernet", {"gate_center": 1.0}),
}
SMALL: dict[str, Any] = {"depth": 2}


def cropped(model: Any, images: Tensor, made: list[Padded] | None = None) -> Any:
    def make(x: Tensor, read: int) -> Padded:
        layout = Padded(x, read)
        if made is not None:
            made.append(layout)
        return layout

    return forward(Executor(model.backbone), make, images, RunSetting(model.policy))


# -- the layout -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("case", HALTING)
def test_cropped_is_masked(case: str, kind: str) -> None:
    policy, given = HALTING[case]
    model, images = tiny(policy, kind, **given), pictures(4)
    with torch.no_grad():
        assert_same_run(cropped(model, images), model(images, layout="masked"), 2e-5)


@pytest.mark.parametrize("seed", range(8))
def test_random_drops_and_merges(seed: int) -> None:
    kinds = ["share", "drop", "drop_zeroed", "none", "merge", "drop_all", "merge_nowhere", "keep", "drop"] * 2
    trace = random_trace(kinds, seed)
    model, images = adaptivit.create(tiny(seed=seed).vit, "replay", trace=trace), pictures(seed=seed)
    with torch.no_grad():
        assert_same_run(cropped(model, images), model(images, layout="masked"), 2e-5)


def test_no_more_rows_than_the_longest_image_has() -> None:
    made: list[Padded] = []
    with torch.no_grad():
        model = tiny("aht", beta=-2.0)
        out = cropped(model, pictures(5), made)
        widths = []
        for image in pictures(5).split(1):
            cropped(model, image, made)
            widths.append(made[-1].rows.shape[1])
    assert made[0].rows.shape[1] == max(int(out.trace.live[-1].max()), 2) == max(widths) < 17
    assert len(set(widths)) > 1, "images differ"


def test_skips_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="sit out"):
        cropped(tiny("mod"), pictures())


# -- which kind -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "asked", "got"),
    [("aht", "auto", "ragged"), ("tome", "auto", "topk"), ("aht", "masked", "masked"), ("static", "auto", "topk")],
)
def test_kinds(policy: str, asked: str, got: str) -> None:
    assert export.choose(tiny(policy), asked) == got


def test_kinds_that_a_policy_does_not_have() -> None:
    with pytest.raises(UserError, match=r"aht keeps more tokens of some images.*expected ragged or masked, got topk"):
        export.choose(tiny("aht"), "topk")
    with pytest.raises(UserError, match=r"tome keeps as many tokens.*expected topk or masked, got ragged"):
        export.choose(tiny("tome"), "ragged")
    with pytest.raises(UserError, match="Did you mean 'ragged'"):
        export.choose(tiny("aht"), "raged")
    with pytest.raises(UserError, match="Unknown format"):
        adaptivit.export(tiny("aht"), "x", format="onxx")
    replay = adaptivit.create(tiny().vit, "replay", trace=random_trace(["none"] * 18, 0))
    with pytest.raises(UserError, match="replay belongs to one batch"):
        export.choose(replay, "auto")


# -- files ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "given", "kind"),
    [
        ("aht", {"beta": -1.0, "planner_blocks": (1,)}, "ragged"),
        ("tome", {"r": 3}, "topk"),
        ("patch_slimming", {"counts": (9,)}, "topk"),
        ("static", {"depth": 1}, "topk"),  # no row is left for the last blocks
    ],
)
def test_onnx_says_what_the_model_says(policy: str, given: Any, kind: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra export")
    model, path = tiny(policy, more=SMALL, **given), tmp_path / "model.onnx"
    model.class_names = [f"class {i}" for i in range(10)]
    done = adaptivit.export(model, path, images=pictures(4))
    assert (done.kind, done.images, done.flipped) == (kind, 4, 0.0)
    assert done.difference < 1e-4
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["images"]
    for count in (1, 2, 7):
        images = pictures(count, seed=count)
        logits, depth = session.run(["logits", "depth"], {"images": images.numpy()})
        with torch.no_grad():
            expected = model(images)
        assert_close(torch.from_numpy(logits), expected.logits, 1e-4)
        assert depth.tolist() == expected.trace.depth.tolist()
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["class_names"]) == model.class_names
    assert json.loads(about["preprocessing"])["size"] == [32, 32]
    assert (about["kind"], about["policy"].split(":")[0]) == (kind, policy)
    assert (about["budget"], about["max_macs"]) == ("none", "none")


@pytest.mark.filterwarnings("ignore")  # torch's own, on reading
@pytest.mark.parametrize(
    ("policy", "given", "kind"),
    [
        ("avit", {"gate_center": 1.0}, "ragged"),
        ("mod", {}, "topk"),
        ("spvit", {}, "ragged"),
        ("aht_merge", {"beta": 0.5, "gamma": 2.0}, "ragged"),
    ],
)
def test_pt2_says_what_the_model_says(policy: str, given: Any, kind: str, tmp_path: Path) -> None:
    model, path = tiny(policy, more=SMALL, **given), tmp_path / "model.pt2"
    done = adaptivit.export(model.to(torch.float64), path, format="pt2", images=pictures(3))
    assert (done.kind, done.size) == (kind, path.stat().st_size)
    again = torch.export.load(io.BytesIO(path.read_bytes())).module()
    model = model.to(torch.float32)
    for count in (1, 5):
        images = pictures(count, seed=count)
        with torch.no_grad():
            expected, (logits, depth) = model(images), again(images)
        assert_close(logits, expected.logits, 1e-4)
        assert torch.equal(depth, expected.trace.depth)


@pytest.mark.filterwarnings("ignore")  # torch's own, on reading
@pytest.mark.parametrize(("policy", "depth"), [("aht", 2), ("evit", 3)])
def test_a_file_is_at_the_budget_of_the_model(policy: str, depth: int, tmp_path: Path) -> None:
    model, images = tiny(policy, more={"depth": depth}), pictures(6)
    dear = model(images).macs.mean()
    model.calibrate(images, "-30%")
    model.max_macs = "-10%" if policy == "aht" else None
    adaptivit.export(model, tmp_path / "model.pt2", format="pt2", images=images)
    again = torch.export.load(io.BytesIO((tmp_path / "model.pt2").read_bytes())).module()
    with torch.no_grad():
        expected, (logits, depth) = model(images), again(images)
    assert expected.macs.mean() < 0.9 * dear
    assert export.about(model, "masked")["budget"] == "-30%"
    assert_close(logits, expected.logits, 1e-4)
    assert torch.equal(depth, expected.trace.depth)


# -- what is not written --------------------------------------------------------------------------------------------
@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Exporters that only say that they ran."""
    monkeypatch.setattr(export, "_traced", lambda program: program)
    monkeypatch.setattr(export, "_as_pt2", lambda *_: b"file")
    return monkeypatch


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda logits, depth: (logits + 0.5, depth), r"differs from the model by 0\.5 in a logit \(allowed: 0\.00"),
        (lambda logits, depth: (logits * torch.nan, depth), "no finite logits"),
        (lambda logits, depth: (logits[:, :3], depth), "no finite logits"),
        (lambda logits, depth: 1 / 0, r"does not run with 4 images \(division by zero\)"),
    ],
)
def test_a_file_that_says_something_else_is_refused(wrong: Any, message: str, instant: Any, tmp_path: Path) -> None:
    model, path = tiny("aht"), tmp_path / "model.pt2"
    path.write_bytes(b"before")

    def answer(images: Tensor) -> Any:
        out = model(images)
        return wrong(out.logits, out.trace.depth)

    instant.setattr(export, "run_pt2", lambda _: answer)
    with pytest.raises(UserError, match=message):
        adaptivit.export(model, path, format="pt2", images=pictures(4))
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]


def test_a_model_that_is_not_finite_is_no_measure(instant: Any, tmp_path: Path) -> None:
    model = tiny("aht")
    made = lambda images: (torch.zeros(len(images), 10), torch.zeros(len(images), 17))  # noqa: E731
    instant.setattr(export, "run_pt2", lambda _: made)
    with pytest.raises(UserError, match="differs from the model by nan"):
        adaptivit.export(model, tmp_path / "model.pt2", format="pt2", images=pictures(4) * torch.nan)


def test_it_is_tried_with_one_image_too(instant: Any, tmp_path: Path) -> None:
    model = tiny("aht")

    def answer(images: Tensor) -> Any:
        out = model(images)
        return out.logits + (len(images) == 1), out.trace.depth

    instant.setattr(export, "run_pt2", lambda _: answer)
    with pytest.raises(UserError, match="differs from the model by 1"):
        adaptivit.export(model, tmp_path / "x", format="pt2", images=pictures(4))


def test_what_an_exporter_cannot_do_is_one_line(instant: Any, tmp_path: Path) -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("no such\noperator")

    instant.setattr(export, "_traced", fails)
    with pytest.raises(UserError, match=r"aht could not be exported as pt2, ragged \(no such\).*Try --kind masked"):
        adaptivit.export(tiny("aht"), tmp_path / "x", format="pt2", images=pictures())
    assert not (tmp_path / "x").exists()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"needs onnxscript: pip install 'adaptivit\[export\]'"):
        adaptivit.export(tiny("aht"), tmp_path / "x", images=pictures())


def test_the_command(instant: Any, tmp_path: Path, capsys: Any) -> None:
    model = tiny("aht", more={"in_chans": 3})
    model.save_pretrained(tmp_path / "saved")
    seen: list[int] = []

    def answer(images: Tensor) -> Any:
        seen.append(len(images))
        out = model(images, layout="packed")
        return out.logits, out.trace.depth

    instant.setattr(export, "run_pt2", lambda _: answer)
    words = ("export", tmp_path / "saved", "--format", "pt2", "--out", tmp_path / "m.pt2")
    assert run(*words) == 0, capsys.readouterr().err
    assert "m.pt2: pt2, ragged" in capsys.readouterr().out
    assert (tmp_path / "m.pt2").read_bytes() == b"file"
    assert seen == [4, 1, 1], "two photos and noise"
    assert run(*words, "--images", Path(__file__).parents[2] / "docs/images") == 0
    assert "expected ragged or masked, got topk" in refused(capsys, *words, "--kind", "topk")
    assert "tolerance: expected a number > 0" in refused(capsys, *words, "--tolerance", 0)
    assert "Image not found: nowhere.png" in refused(capsys, *words, "--images", "nowhere.png")
    assert "No such directory" in refused(capsys, "export", "nowhere", "--out", "x")


def test_real_weights_cropped(tmp_path: Path) -> None:
    weights = shared("weights/deit_tiny_patch16_224.safetensors")
    model = adaptivit.create("deit_tiny_patch16_224", "aht", weights=weights, beta=-2.0)
    with torch.no_grad():
        images = export.sample(model)
        assert_same_run(cropped(model, images), model(images, layout="masked"), 1e-3)
