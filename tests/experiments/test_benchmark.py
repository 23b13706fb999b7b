"""The benchmark: who takes part, outputs that are checked before anything is timed, rows, charts and refusals."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

import adaptivit
from adaptivit.errors import UserError
from adaptivit.evaluation import halting_profiles
from adaptivit.execution.timing import Timing, interleaved
from adaptivit.experiments.benchmark import contenders
from adaptivit.experiments.benchmark import run as benchmark
from adaptivit.experiments.benchmark.charts import bars, speed_against_macs
from adaptivit.experiments.benchmark.config import BenchmarkConfig
from adaptivit.experiments.benchmark.contenders import BEST, OWN, TIMM, Product, with_product
from adaptivit.experiments.benchmark.rows import COLUMNS, Row, label, read
from adaptivit.model import AdaptiveViT
from adaptivit.utils.csv import append_csv
from tests.support.commands import refused, run
from tests.support.data_sets import folder
from tests.support.models import assert_close, pictures, randomise, tiny

DEPTH, TOKENS = 6, 17  # of digits_vit at 32 px


def config(out: Path, **given: Any) -> BenchmarkConfig:
    values: dict[str, Any] = {"backbones": ("digits_vit",), "img_size": 32, "batch_sizes": (2,), "device": "cpu"}
    values |= {"skip_compiled": True, "repeats": 3, "warm_up": 1, "inner": 1, "out": str(out)}
    return BenchmarkConfig(**values | given)


def by_label(rows: list[Row]) -> dict[str, Row]:
    return {label(row): row for row in rows}


# -- end to end -----------------------------------------------------------------------------------------------------
def test_from_the_command_line_to_table_and_charts(tmp_path: Path, capsys: Any) -> None:
    words = ("benchmark", "--backbones", "digits_vit", "--img-size", 32, "--skip-compiled", "--device", "cpu")
    words = (*words, "--policies", "tome:r=2", "evit", "--profile", "50", "--layouts", "auto", "masked", "padded")
    words = (*words, "--batch-sizes", 1, 3, "--repeats", 3, "--warm-up", 1, "--plot", "--out", tmp_path, "--seed", 5)
    assert run(*words) == 0
    printed = capsys.readouterr().out
    assert "replay 50 (padded)" in printed
    rows = read(tmp_path / "benchmark.csv")
    assert all(tuple(row) == COLUMNS for row in rows)
    assert len(rows) == 2 * (3 + 2 * 3 + 3)
    assert {row["batch"] for row in rows} == {"1", "3"}
    for row in rows:
        assert row["status"] == "ok", row
        assert 0 < float(row["ms_p20"]) <= float(row["ms_p50"]) <= float(row["ms_p80"])
        assert float(row["images_per_s"]) == pytest.approx(1e3 * int(row["batch"]) / float(row["ms_p50"]), rel=1e-4)
        assert float(row["relative_error"]) < 1e-5
        assert float(row["top1_agreement"]) == 1
        assert (row["device"], row["torch"]) == (rows[0]["device"], torch.__version__)
        assert (row["dtype"], row["img_size"], row["seed"], row["peak_mib"]) == ("float32", "32", "5", "")
        assert all(float(row[f"speed_vs_{name}"]) > 0 for name in ("timm", "best_static", "own_static"))
    for batch in ("1", "3"):
        found = by_label([row for row in rows if row["batch"] == batch])
        assert list(found)[:3] == [TIMM, BEST, OWN]
        assert (found[BEST]["static_mode"], found[OWN]["layout"]) == ("eager", "packed")
        assert float(found[BEST]["speed_vs_best_static"]) == float(found[TIMM]["speed_vs_timm"]) == 1
        assert {float(found[name]["mac_share"]) for name in (TIMM, BEST, OWN)} == {1}
        assert float(found["tome:r=2 (gathered)"]["mac_share"]) < 1 < float(found["tome:r=2 (masked)"]["mac_share"])
        share = {
            layout: float(found[f"replay 50 ({layout})"]["mac_share"]) for layout in ("packed", "masked", "padded")
        }
        assert share["packed"] <= share["padded"] < share["masked"] == 1
        assert float(found["replay 50 (masked)"]["mean_live_share"]) < 0.7
    for name in ("bars.png", "speed_vs_macs.png"):
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 300
    text = (tmp_path / "benchmark.md").read_text()
    assert "--policies tome:r=2 evit" in text
    assert "digits_vit, 32 px, float32, batch 3" in text
    # again: rows are added, none is lost
    assert "--profile was given 2 times" in refused(capsys, *words, "--profile", "none")
    benchmark.run(config(tmp_path))
    assert read(tmp_path / "benchmark.csv")[: len(rows)] == rows
    assert len(read(tmp_path / "benchmark.csv")) == len(rows) + 3


def test_a_compiled_static_model_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile itself is replaced: it needs a C++ compiler and time."""
    asked = []

    def compiled(module: Any, mode: str | None = None, dynamic: bool | None = None) -> Any:
        asked.append((mode, dynamic))
        if mode == "max-autotune":
            raise RuntimeError("no such tuner\nand more")
        return module

    monkeypatch.setattr(torch, "compile", compiled)
    modes = ("max-autotune", "default")
    rows = by_label(benchmark.run(config(tmp_path, skip_compiled=False, static_modes=modes)))
    assert asked == [(None, False), ("max-autotune", False), (None, False)]
    assert list(rows) == [TIMM, "timm compiled", BEST, OWN]
    assert rows["timm compiled"]["static_mode"] == rows[BEST]["static_mode"] == "default"
    assert rows[BEST]["reason"] == "a candidate failed: RuntimeError: no such tuner"


def test_weights_data_checkpoint_and_dtypes(tmp_path: Path) -> None:
    model = adaptivit.create("digits_vit", "avit", img_size=32)
    randomise(model, 3)
    model.save_pretrained(tmp_path / "model")
    where = folder(tmp_path / "in", each=2)
    both = {"weights": str(tmp_path / "model"), "checkpoint": str(tmp_path / "model"), "data": str(where)}
    given = config(tmp_path / "out", dtypes=("float32", "bfloat16"), policies=("avit",), threads=1, **both)
    rows = benchmark.run(given)
    assert [row["status"] for row in rows] == ["ok"] * 10
    fp32, bf16 = by_label(rows[:5]), by_label(rows[5:])
    assert float(fp32[OWN]["relative_error"]) < 1e-5 < float(bf16[OWN]["relative_error"]) < 3e-2
    trained = fp32[f"checkpoint {both['checkpoint']} (packed)"]
    assert trained["gmacs"] == fp32["avit (packed)"]["gmacs"]  # the weights brought the policy's settings too
    with pytest.raises(UserError, match="another backbone"):
        benchmark.run(config(tmp_path / "other", img_size=64, checkpoint=both["checkpoint"]))
    with pytest.raises(UserError, match="expected 99 readable images"):
        benchmark.run(config(tmp_path / "other", batch_sizes=(99,), data=str(where)))
    assert not (tmp_path / "other").exists()


# -- what is wrong is not timed -------------------------------------------------------------------------------------
def test_a_wrong_or_failing_contender_is_a_row_and_the_others_go_on(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = contenders._padded

    def wrong_by_a_hundredth(model: AdaptiveViT, images: torch.Tensor) -> Any:
        output = real(model, images)
        return replace(output, logits=output.logits * 1.01)

    monkeypatch.setattr(contenders, "_padded", wrong_by_a_hundredth)
    rows = benchmark.run(config(tmp_path, profile=("65",), layouts=("packed", "padded"), policies=("static:depth=99",)))
    found = by_label(rows)
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "failed", "failed", "ok", "failed"]
    wrong = found["replay 65 (padded)"]
    assert "relative error 0.01" in wrong["reason"]
    assert (wrong["ms_p50"], wrong["images_per_s"], wrong["layout"]) == ("", "", "padded")
    assert "depth" in found["static:depth=99 (packed)"]["reason"]
    assert float(found["replay 65 (packed)"]["ms_p50"]) > 0
    assert "output check" in (tmp_path / "benchmark.md").read_text()
    words = ("benchmark", "--backbones", "digits_vit", "--img-size", 32, "--skip-compiled", "--device", "cpu")
    words = (*words, "--batch-sizes", 2, "--repeats", 1, "--profile", "50", "--layouts", "gathered", "--out", tmp_path)
    monkeypatch.setattr(contenders, "with_product", lambda vit: _raise)
    assert run(*words) == 1
    assert "2 of 4 contenders failed" in capsys.readouterr().err
    last = by_label(read(tmp_path / "benchmark.csv")[-4:])
    assert "Expected as many tokens in every image" in last["replay 50 (gathered)"]["reason"]
    assert last[BEST]["reason"] == "RuntimeError: broken"
    assert last[TIMM]["speed_vs_best_static"] == ""
    assert float(last[TIMM]["speed_vs_timm"]) == 1


def _raise(images: Any) -> Any:
    raise RuntimeError("broken\nin two lines")


def test_when_the_baselines_fail_there_still_are_charts() -> None:
    row = dict.fromkeys(COLUMNS, "1") | {"contender": "evit", "policy": "evit", "layout": "packed", "status": "ok"}
    none = row | {"speed_vs_best_static": "", "speed_vs_timm": "", "speed_vs_own_static": ""}
    assert bars([none])[:4] == b"\x89PNG"
    many = [row | {"contender": f"own:{i}", "policy": f"own:{i}", "batch": str(i % 9)} for i in range(30)]
    assert bars(many)[:4] == speed_against_macs(many)[:4] == b"\x89PNG"
    with pytest.raises(UserError, match="static"):
        speed_against_macs([none])


# -- contenders -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["class", "distilled", "registers", "average", "max", "deit3"])
def test_padding_and_the_patch_product_give_what_masks_give(kind: str) -> None:
    model, images = tiny("static", kind), pictures(4)
    tokens, prefix = model.shape.tokens, model.shape.num_prefix_tokens
    trace = halting_profiles.drawn_trace(
        halting_profiles.resampled(halting_profiles.PROFILES["50"], 6), 4, tokens, 3, prefix
    )
    live = trace.live
    assert live[-1].min() < live[-1].max() < tokens
    with torch.inference_mode():
        masked = AdaptiveViT(model.vit, "replay", {"trace": trace}).eval()(images, layout="masked")
        replay = AdaptiveViT(model.vit, "replay", {"trace": trace}).eval()
        assert_close(contenders._padded(replay, images).logits, masked.logits)
        twin = with_product(model.vit)
        assert isinstance(twin.patch_embed, Product)
        assert_close(twin(images), model.vit(images))
    assert twin.blocks is model.vit.blocks
    assert not isinstance(model.vit.patch_embed, Product)


def test_a_captured_model_is_checked_by_its_recorded_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does on a GPU, with a stand-in for the CUDA graph: steps come from its own pass, recorded."""

    recorded: list[torch.Tensor] = []

    class Captured:
        def __init__(self, model: AdaptiveViT, batch: int, profile: Any) -> None:
            assert batch == 2
            assert profile is not None
            self.model = model

        def __call__(self, images: torch.Tensor) -> Any:
            output = self.model(images, layout="packed")
            return replace(output, trace=replace(output.trace, steps=()))

        def record(self, images: torch.Tensor) -> Any:
            recorded.append(images)
            return self.model(images, layout="packed")

        def explain(self) -> str:
            return "a stand-in"

    monkeypatch.setattr(AdaptiveViT, "capture", lambda self, batch, profile, compile: Captured(self, batch, profile))
    given = config(tmp_path, profile=("50",))
    base = adaptivit.create("digits_vit", "static", img_size=32)
    at = benchmark._setting(given, base, "digits_vit", "float32", 2, torch.device("cpu"))
    trace = at.traces["50"]
    make = partial(contenders._on_layout, at, "captured", True, lambda: contenders._replaying(at, trace))
    checked = benchmark._checked(make, at)
    assert len(recorded) == 1
    assert (checked.figures["layout"], checked.contender.graph) == ("captured", True)
    assert checked.figures["plan"] == "a stand-in"
    assert checked.figures["relative_error"] < 1e-5
    assert checked.figures["mac_share"] < 0.8
    with pytest.raises(UserError, match="no steps"):
        benchmark._checked(lambda: replace(make(), recording=None), at)


def test_anything_that_can_be_called_is_timed() -> None:
    calls: list[int] = []

    def short(images: torch.Tensor) -> torch.Tensor:
        calls.append(len(images))
        return images

    model = tiny()
    times = interleaved({"a": short, "b": (model, "packed")}, pictures(2), 4, inner=None)
    assert (times["a"].layout, times["b"].layout, times["a"].batch) == ("", "packed", 2)
    assert len(times["a"].seconds) == 4
    assert len(calls) > 100  # a measurement lasts
    assert times["a"].speed(times["b"]) > 1
    five = Timing((5.0, 1.0, 2.0, 4.0, 3.0), "", 1)
    assert [five.percentile(p) for p in (0, 0.2, 0.5, 0.8, 1)] == pytest.approx([1, 1.8, 3, 4.2, 5])


# -- profiles -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", halting_profiles.PROFILES)
def test_profiles_are_resampled_and_drawn_as_they_say(name: str) -> None:
    profile = halting_profiles.PROFILES[name]
    assert halting_profiles.resampled(profile, 12) == pytest.approx(profile)
    assert halting_profiles.resampled(profile, 1) == [1]
    for layers in (2, 6, 23, 24):
        shares = halting_profiles.resampled(profile, layers)
        assert (len(shares), shares[0], shares[-1]) == (layers, 1, pytest.approx(profile[-1]))
        assert shares == sorted(shares, reverse=True)
    assert halting_profiles.resampled(profile, 23)[::2] == pytest.approx(profile)
    trace = halting_profiles.trace_of(name, layers=12, batch=64, tokens=197, prefix=1, seed=0)
    drawn = trace.attended[:, :, 1:].double().mean((1, 2))
    assert drawn.tolist() == pytest.approx(profile, abs=0.015)
    assert trace.attended[:, :, 0].all()
    again, other = (halting_profiles.trace_of(name, layers=12, batch=64, tokens=197, prefix=1, seed=s) for s in (0, 1))
    assert torch.equal(trace.attended, again.attended)
    assert name == "none" or not torch.equal(trace.attended, other.attended)


def test_a_recorded_trace_is_replayed(tmp_path: Path) -> None:
    model = adaptivit.create("digits_vit", "tome", img_size=32, r=3)
    with torch.inference_mode():
        adaptivit.save_trace(model(pictures(2)).trace, tmp_path / "tome.safetensors")
    name = f"replay:{tmp_path}/tome.safetensors"
    rows = by_label(benchmark.run(config(tmp_path, profile=(name,), layouts=("gathered", "padded"))))
    gathered, padded = (rows[f"replay tome ({layout})"] for layout in ("gathered", "padded"))
    assert gathered["status"] == padded["status"] == "ok"
    assert float(gathered["mac_share"]) == float(padded["mac_share"]) < 1  # all images are equally long
    with pytest.raises(UserError, match="2 images of 17 tokens in 6 blocks; this benchmark has 3 of 17"):
        benchmark.run(config(tmp_path, profile=(name,), batch_sizes=(2, 3)))


# -- refusals -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"profile": ("haltin",)}, "Did you mean 'halting'"),
        ({"profile": ("replay:",)}, "no FILE"),
        ({"batch_sizes": (0,)}, "at least 1, got 0"),
        ({"batch_sizes": ()}, "at least one value"),
        ({"dtypes": ("float31",)}, "Did you mean 'float32'"),
        ({"layouts": ("pact",)}, "Unknown layout"),
        ({"policies": ("tome:q=1",)}, "Unknown setting"),
        ({"policies": ("replay:trace=x",)}, "--profile replay:FILE"),
        ({"static_modes": ("fastest",)}, "Unknown static mode"),
        ({"weights": "w", "backbones": ("a", "b")}, "one file fits one backbone"),
        ({"repeats": 0}, "repeats"),
    ],
)
def test_mistakes_in_the_settings(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(tmp_path, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layouts": ("captured",)}, "needs a GPU"),
        ({"static_modes": ("eager+graph",)}, "needs a GPU"),
        ({"static_modes": ("default",)}, "skip-compiled"),
        ({"profile": ("replay:nowhere",)}, "not found"),
        ({"backbones": ("test_vitt",)}, "Unknown timm model"),
        ({"data": "nowhere"}, "not found"),
    ],
)
def test_mistakes_that_the_machine_and_the_files_show(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        benchmark.run(config(tmp_path / "out", **given))
    assert not (tmp_path / "out").exists()


def test_another_file_is_left_alone_and_other_columns_are_kept(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "benchmark.csv"
    path.write_text("a,b\n1,2\n")
    words = ("benchmark", "--backbones", "digits_vit", "--img-size", 32, "--device", "cpu", "--skip-compiled")
    assert "not a benchmark's CSV file" in refused(capsys, *words, "--out", tmp_path)
    assert path.read_text() == "a,b\n1,2\n"
    path.write_text("contender,ms_p50,status,mine\nx,1,ok,2\n")
    append_csv(path, dict.fromkeys(COLUMNS, ""), columns=COLUMNS)
    with path.open(newline="") as file:
        old, new = csv.DictReader(file)
    assert (old["mine"], old["contender"], old["gmacs"], new["mine"]) == ("2", "x", "", "")


def test_defaults_follow_the_device() -> None:
    some = BenchmarkConfig()
    assert [some.layouts_on(d) for d in ("cpu", "cuda")] == [("auto",), ("captured",)]
    assert [some.dtypes_on(d) for d in ("cpu", "cuda")] == [("float32",), ("bfloat16",)]
    assert some.modes_on("cpu") == ("eager", "default")
    assert some.modes_on("cuda") == ("default+graph", "max-autotune-no-cudagraphs+graph", "reduce-overhead")
    assert BenchmarkConfig(skip_compiled=True).modes_on("cuda") == ("eager+graph",)
    given = BenchmarkConfig(policies=("tome:r=13",), batch_sizes=(1, 2), skip_compiled=True, plot=True)
    command = "adaptivit benchmark --policies tome:r=13 --batch-sizes 1 2 --skip-compiled --plot"
    assert given.command() == command


def test_the_fastest_way_to_run_static_is_taken_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three modes; one fails."""

    def checked(mode: str, at: Any) -> benchmark.Checked:
        if mode == "broken":
            raise UserError("does not compile")
        return benchmark.Checked(SimpleNamespace(static_mode=mode, call=mode), {"plan": ""})  # type: ignore[arg-type]

    def turns(calls: dict[str, str], *_: Any, **__: Any) -> dict[str, Any]:
        seconds = {"slow": [0.003, 0.003, 0.001], "fast": [0.002, 0.009, 0.0015]}
        return {name: SimpleNamespace(seconds=seconds[call]) for name, call in calls.items()}

    monkeypatch.setattr(benchmark, "_checked", checked)
    monkeypatch.setattr(benchmark, "interleaved", turns)
    entry, at = SimpleNamespace(makes=["slow", "broken", "fast"]), SimpleNamespace(images=None)
    found, reason = benchmark._prepare(entry, at)  # type: ignore[arg-type]
    assert found is not None
    assert found.contender.static_mode == "fast"
    assert found.figures["plan"] == "tried: fast 2 ms; slow 3 ms"
    assert reason == "a candidate failed: does not compile"
