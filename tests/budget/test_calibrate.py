"""Budgets on models: curves that fall, budgets met on images not seen, one an image as alone, saved and loaded."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

import adaptivit
from adaptivit.budget import control, measure
from adaptivit.budget.control import RunSetting
from adaptivit.budget.curve import Calibration, parse
from adaptivit.budget.measure import NEAR, check, static_macs
from adaptivit.data import dataset
from adaptivit.data.dataset import Images
from adaptivit.errors import UserError, WeightsError
from adaptivit.execution import timing
from adaptivit.execution.select import Choice
from adaptivit.execution.torch import Executor
from adaptivit.experiments import calibrate
from adaptivit.layouts import Masked, Packed, PackedOnDevice
from adaptivit.utils import hardware
from tests.support.commands import refused, run
from tests.support.data_sets import folder
from tests.support.models import TINY, assert_close, pictures, shared, tiny
from tests.support.policies import CASES
from tests.support.reference_vit import randomised

pytestmark = pytest.mark.xdist_group("calibrate")  # curves that are measured once

SHIFTS = (
    "aht",
    "aht_merge, few blocks",
    "avit",
    "avit, networks",
    "act",
    "confidence",
    "similarity",
    "pondernet",
    "spvit",
)
COUNTS = ("mod", "amod", "dynamicvit", "spvit, counted", "patch_slimming", "evit", "tome", "fold", "static")
CURVES: dict[str, Calibration] = {}


def calibrated(case: str) -> Any:
    """A model of that case with its curve, which is measured once."""
    name, more = CASES[case]
    model = randomised(name, **more)
    if case not in CURVES:
        CURVES[case] = model.calibrate(pictures(24, seed=9))
    model.budget_state.calibration = CURVES[case]
    return model


def met(model: Any, images: Tensor) -> float:
    """The share of the static model's MACs; masked, which is the quickest on a CPU and counts the same."""
    return float(model(images, layout="masked").macs_deployed.mean()) / static_macs(model)


# -- the curve ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", [*SHIFTS, *COUNTS])
@torch.no_grad()
def test_curves(case: str) -> None:
    """They fall, from no token leaving to the least that the policy can do, and are what the images cost."""
    model = calibrated(case)
    curve: Calibration = model.calibration
    assert all(a.macs > b.macs for a, b in itertools.pairwise(curve.points))
    assert curve.points[0].macs >= 0.99 * curve.static
    assert curve.points[-1].macs <= 0.7 * curve.static
    assert curve.continuous == (case in SHIFTS)
    images = pictures(24, seed=9)
    assert curve.settings.macs == pytest.approx(float(model(images).macs.mean()))
    if case in SHIFTS:
        gaps = [a.macs - b.macs for a, b in itertools.pairwise(curve.points)]
        assert max(gaps) < 0.1 * curve.static
        zero = model.run(model.choose("auto", images.device), images, setting=RunSetting(model.policy, torch.zeros(24)))
        assert torch.equal(zero.trace.attended, model(images).trace.attended)  # 0 is what the settings say
    for point in curve.points[:: len(curve.points) // 3]:
        if case in COUNTS or point in curve.points[:1]:
            model.budget = point.macs if point.macs <= curve.static else None
            if model.budget is not None:
                assert float(model(images).macs.mean()) == pytest.approx(point.macs, rel=1e-9)


@pytest.mark.parametrize(("case", "count"), [("aht", 192), ("avit", 384)])
@torch.no_grad()
def test_met_on_images_not_seen(case: str, count: int) -> None:
    name, more = CASES[case]
    model = randomised(name, **more)
    model.calibrate(pictures(count, seed=1), "-33%")
    unseen = pictures(384, seed=2)
    assert model.budget == "-33%"
    assert met(model, unseen) == pytest.approx(0.67, rel=0.02)
    for share in (0.8, 0.5):
        model.budget = f"-{round(100 * (1 - share))}%"  # needs no data
        assert met(model, unseen) == pytest.approx(share, rel=0.02)
    (row,) = check(model, unseen, ["-20%"])
    assert abs(row.error) < 0.02
    assert row.point.live < 17


@torch.no_grad()
@pytest.mark.parametrize("share", [0.83, 0.67, 0.52])
@pytest.mark.parametrize("case", ["aht", "avit"])
def test_a_budget_is_met_on_the_images_of_the_curve(case: str, share: float) -> None:
    name, more = CASES[case]
    model, images = randomised(name, **more), pictures(48, seed=3)
    model.calibrate(images, f"{100 * (share - 1):.4g}%")
    # one token of one image in one block
    least = 1.5 / (len(images) * model.shape.tokens * model.shape.layers)
    assert met(model, images) == pytest.approx(share, abs=max(NEAR, least))


@pytest.mark.parametrize("case", ["confidence", "aht"])
@torch.no_grad()
def test_it_knows_how_well_a_budget_is_met(case: str) -> None:
    """The spread is that of the images' costs, and budgets are missed by about as much as the curve says."""
    name, more = CASES[case]
    model = randomised(name, **more)
    images = pictures(512, seed=11)
    missed = []
    for start in range(0, 192, 24):
        curve = model.calibrate(images[start : start + 24], "-33%")
        wanted = 0.67 * curve.static
        error = curve.error(wanted)
        missed.append((met(model, images[192:]) / 0.67 - 1) / error)
        assert (curve.accuracy_warning("-33%") is None) == (error <= 0.02)
    assert sum(abs(m) <= 1 for m in missed) >= 6  # of 8; 19 of 20 in the long run, of new images without end
    assert max(map(abs, missed)) < 2.5
    at = curve.points[len(curve.points) // 2]
    shift = torch.full((24,), at.position)
    macs = model.run(model.choose("auto", images.device), images[168:192], setting=RunSetting(model.policy, shift)).macs
    assert at.spread == pytest.approx(float(macs.std()), rel=0.2)
    assert model.calibrate(images[:1]).points[0].spread is None  # one image says nothing of it


@pytest.mark.parametrize("case", COUNTS)
@torch.no_grad()
def test_the_nearest_step_below(case: str) -> None:
    model = calibrated(case)
    costs = [p.macs / model.calibration.static for p in model.calibration.points]
    for share in (0.95, 0.8, 0.7):
        model.budget = share * model.calibration.static
        assert met(model, pictures(2, seed=3)) == pytest.approx(max(c for c in costs if c <= share))


def test_static_is_cut_between_blocks() -> None:
    curve = calibrated("static").calibration
    assert [p.position for p in curve.points] == [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]


def test_digits() -> None:
    """A model that has learned a little."""
    torch.manual_seed(0)
    train = dataset.splits("digits")["train"].spread(160)
    model = adaptivit.create("digits_vit", "aht", straight_through=True, beta=-2.0)
    images = Images(train, model.preprocessing.evaluation())
    batches = list(dataset.batches(images, dataset.in_order(len(images), 32)))
    steps = torch.optim.AdamW(model.parameters(), 1e-3)
    model.train()
    for batch in batches[:3]:
        out = model(batch.images)
        loss = F.cross_entropy(out.logits, batch.labels) + 0.05 * out.trace.fact("remainder").mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
    curve = model.calibrate([b.images for b in batches[:2]], "-33%")
    assert model.training
    model.eval()
    with torch.no_grad():
        spent = torch.cat([model(b.images).macs for b in batches[2:]]).mean() / curve.static
    assert float(spent) == pytest.approx(0.67, rel=0.02)


@torch.no_grad()
def test_real_weights() -> None:
    """DeiT-T at 64 px, to be quick: calibrated on some photographs, checked on others, all cut and resized alike."""
    weights = shared("weights/deit_tiny_patch16_224.safetensors")
    seen, unseen = shared("data/imagenet/adapt"), shared("data/imagenet/eval")
    policy = {"feature": "class_row", "removal": "drop", "gate": "shared", "gamma": 1.0, "center_per_image": 0.0}
    model = adaptivit.create("deit_tiny_patch16_224", "aht_merge", weights=weights, img_size=64, **policy)
    steps = v2.Compose([v2.CenterCrop(224), model.preprocessing.evaluation()])

    def some(where: Path) -> Tensor:
        images = Images(dataset.for_evaluation(where, "auto").spread(64), steps)
        return next(dataset.batches(images, dataset.in_order(64, 64))).images

    curve = model.calibrate(some(seen), "-33%")
    shares = model(some(unseen)).macs / curve.static
    chance = 2 * float(shares.std()) * (2 / 64) ** 0.5  # so few photographs differ; results/calibration.csv has more
    assert float(shares.mean()) == pytest.approx(0.67, abs=0.02 * 0.67 + chance)
    assert chance < 0.05


# -- one an image ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", [*SHIFTS, *COUNTS])
@torch.no_grad()
def test_each_image_has_its_own(case: str) -> None:
    """A batch of different budgets gives what single calls give, on every layout."""
    model = calibrated(case)
    curve, images = model.calibration, pictures(4, seed=4)
    least = curve.points[-1].macs / curve.static
    asked = ["-5%", "none", f"-{100 * (1 - least) * 0.6:.3f}%", 0.9 * curve.static]
    for layout in ("masked", "packed", *(["gathered"] if model.policy.traits.fixed_counts else [])):
        many = model(images, budget=asked, layout=layout)
        assert many.layout == layout
        for i, one in enumerate(asked):
            alone = model(images[i : i + 1], budget=one, layout=layout)
            assert torch.equal(many.trace.attended[:, i], alone.trace.attended[:, 0])
            assert torch.equal(many.macs[i], alone.macs[0])
            assert torch.equal(many.parts["blocks"][i], alone.parts["blocks"][0])
            assert_close(many.logits[i], alone.logits[0])
            assert_close(many.features[i], alone.features[0])
    assert len(set(many.macs.tolist())) > 1
    numbers = torch.tensor([0.9, 0.8, 0.9, 0.75]) * curve.static
    tensors, lists = model(images, budget=numbers), model(images, budget=numbers.tolist())
    assert torch.equal(tensors.logits, lists.logits)
    if case in COUNTS:
        kept = model(images, budget=asked, aux=("tokens",)).tokens
        assert_close(kept[2], model(images[2:3], budget=asked[2], aux=("tokens",)).tokens[0])


@pytest.mark.parametrize("case", ["aht", "avit", "confidence"])
def test_on_the_device_layout(case: str) -> None:
    """The layout of the GPU, here with timm's modules: no host is asked, shifts are tensors."""
    model = calibrated(case)
    images, shift = pictures(4, seed=5), torch.tensor([-3.0, 0.0, 0.7, 4.0])
    runs = [
        model.run(Choice(kind, Executor(model.backbone)), images, setting=RunSetting(model.policy, shift))
        for kind in (Masked, Packed, PackedOnDevice)
    ]
    for other in runs[1:]:
        assert torch.equal(runs[0].trace.attended, other.trace.attended)
        assert_close(runs[0].logits, other.logits, 1e-4)


# -- what holds beside ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", ["aht", "evit"])
@torch.no_grad()
def test_without_a_budget_nothing_changes(case: str) -> None:
    name, more = CASES[case]
    plain, model = randomised(name, **more), calibrated(case)
    images = pictures()
    want = plain(images)
    model.budget = "-30%"
    assert not torch.equal(model(images).macs, want.macs)
    assert torch.equal(model(images, budget="none").logits, want.logits)
    model.budget = None
    assert model.budget is None
    assert torch.equal(model(images).logits, want.logits)
    model.budget = "-20%"
    assert list(model.state_dict()) == list(plain.state_dict())  # the dial is no parameter
    model.train()
    plain.train()
    assert torch.equal(model(images).trace.attended, plain(images).trace.attended)  # training ignores it
    with pytest.raises(UserError, match="for evaluation"):
        model(images, budget="-20%")


@pytest.mark.parametrize("case", ["aht", "evit"])
@torch.no_grad()
def test_compiled(case: str) -> None:
    """One graph, and none other for another shift."""
    torch._dynamo.reset()
    model = calibrated(case)
    model.budget = "-25%"
    images = pictures()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    want, got = model(images, layout="masked"), compiled(images, layout="masked")
    assert torch.equal(want.trace.attended, got.trace.attended)
    assert_close(want.logits, got.logits)
    if case != "evit":
        choice = Choice(Masked, Executor(model.backbone))

        def shifted(images: Tensor, shift: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
            out = model.run(choice, images, setting=RunSetting(model.policy, shift, limit))
            return out.logits, out.trace.attended

        quick = torch.compile(shifted, fullgraph=True, backend="eager")
        for number, (shift, share) in enumerate(((0.5, 0.9), (-1.0, 0.7), (3.0, 0.6))):
            given = (images, torch.full((3,), shift), torch.full((3,), share * model.calibration.static).double())
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                logits, attended = quick(*given)
            want_logits, want_attended = shifted(*given)
            assert torch.equal(attended, want_attended)
            assert_close(logits, want_logits)
    torch._dynamo.reset()


@pytest.mark.parametrize("case", ["aht", "fold"])
@torch.no_grad()
def test_saved_and_loaded(case: str, tmp_path: Path) -> None:
    model = calibrated(case)
    model.budget, model.max_macs = "-25%", "-10%"
    model.save_pretrained(tmp_path / "m")
    again = adaptivit.load(tmp_path / "m")
    assert (again.budget, again.max_macs) == ("-25%", "-10%")
    assert again.calibration.points == model.calibration.points
    assert torch.equal(model(pictures()).logits, again(pictures()).logits)
    again.budget = "-15%"
    again.save_pretrained(tmp_path / "m")
    assert adaptivit.load(tmp_path / "m").budget == "-15%"
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    old = {k: v for k, v in config.items() if k not in ("calibration", "max_macs")}
    (tmp_path / "m" / "config.json").write_text(json.dumps(old))
    assert adaptivit.load(tmp_path / "m").calibration is None  # a checkpoint of before
    config["calibration"]["points"] = []
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="Damaged checkpoint"):
        adaptivit.load(tmp_path / "m")


@pytest.mark.parametrize(
    "change",
    [
        {"dial": "keep"},
        {"continuous": False},
        {"continuous": "yes"},
        {"tokens": 26},
        {"static": "1"},
        {"static": 0},
        {"images": 0},
        {"images": None},
        {"points": [{"position": 0.0, "macs": float("nan"), "live": 3.0}]},
        {"points": [{"position": 0.0, "macs": 1.0}]},
        {"budget": "3 parsecs"},
        {"other": 1},
    ],
)
def test_a_curve_that_was_tampered_with_is_named(change: dict[str, Any], tmp_path: Path) -> None:
    """Not taken on, by load and by create alike; nor is a limit that is none."""
    calibrated("aht").save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    for odd in (config | {"calibration": config["calibration"] | change}, config | {"max_macs": [3]}):
        path.write_text(json.dumps(odd))
        for use in (adaptivit.load, lambda place: adaptivit.create(TINY, "aht", weights=place, **CASES["aht"][1])):
            if use is not adaptivit.load and "tokens" in change:
                continue  # there, that is another image size (below)
            with pytest.raises(WeightsError, match=r"config\.json"):
                use(tmp_path / "m")


@pytest.mark.parametrize("case", ["aht", "evit"])
def test_a_curve_belongs_to_one_image_size_and_head(case: str, tmp_path: Path) -> None:
    """The weights of a checkpoint at another size, or with another head, are not calibrated."""
    name, more = CASES[case]
    model = calibrated(case)
    model.budget, model.max_macs = "-25%", "-10%"
    model.save_pretrained(tmp_path / "m")
    same = adaptivit.create(TINY, name, weights=tmp_path / "m", **more)
    assert (same.budget, same.max_macs) == ("-25%", "-10%")
    larger = adaptivit.create(TINY, name, weights=tmp_path / "m", img_size=48, **more)
    assert (larger.calibration, larger.budget) == (None, None)
    assert larger.max_macs == ("-10%" if case == "aht" else None)  # what needs no curve holds
    other = adaptivit.create(TINY, name, weights=tmp_path / "m", num_classes=3, **more)
    assert other.calibration is None


@torch.no_grad()
def test_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured here; neither another device nor a checkpoint that goes there takes them on."""
    model = randomised(*[CASES["aht"][0]], **CASES["aht"][1])

    def steady(*given: Any, **more: Any) -> dict[str, timing.Timing]:
        """What was measured, but falling with the work, however busy this machine is."""
        measured = timing.interleaved(*given, **more)
        assert all(min(one.seconds) > 0 for one in measured.values())
        return {
            name: replace(one, seconds=(1e-3 * (50 - i),) * len(one.seconds))
            for i, (name, one) in enumerate(measured.items())
        }

    monkeypatch.setattr(measure, "interleaved", steady)
    model.calibrate(pictures(8), latency_batch=4)
    latency = model.calibration.latency
    assert latency.batch == 4
    assert latency.device == hardware.device_name(torch.device("cpu"))
    assert "thread" in latency.device
    slow, fast = latency.points[0][1], latency.points[-1][1]
    assert (slow, fast) == (50.0, pytest.approx(51.0 - len(latency.points)))
    model.budget = f"{(slow + fast) / 2:.9f} ms"
    position = model.budget_state.position(torch.device("cpu"))
    dear, cheap = model.calibration.points[0].position, model.calibration.points[-1].position
    assert dear <= position <= cheap
    model(pictures())
    model.save_pretrained(tmp_path / "m")
    assert torch.equal(adaptivit.load(tmp_path / "m")(pictures()).logits, model(pictures()).logits)
    with pytest.raises(UserError, match="below the least that this model can do here"):
        model.budget = f"{fast / 100:.9f} ms"
    monkeypatch.setattr(control, "device_name", lambda _: "another machine")
    elsewhere = adaptivit.load(tmp_path / "m")
    with pytest.raises(UserError, match="do not hold on another machine"):
        elsewhere(pictures())
    elsewhere.budget = "-20%"  # MACs do
    elsewhere(pictures())


def test_errors() -> None:
    model = tiny("aht")
    for ask in (lambda: setattr(model, "budget", "-33%"), lambda: model(pictures(), budget="-33%")):
        with pytest.raises(UserError, match=r"budget: this model is not calibrated; call model.calibrate\(images\)"):
            ask()
    model = calibrated("aht")
    for bad, message in {
        "-150%": "between -0% and -100%",
        "3 parsecs": "got '3 parsecs'",
        1.01 * model.calibration.static: "above the static model",
        "-99%": "below the least",
        0.8: "below the least .* A number alone means MACs; write '0.8 GMACs' or '-33%'",
        "3 ms": "no milliseconds have been measured",
    }.items():
        with pytest.raises(UserError, match=message):
            model.budget = bad
        with pytest.raises(UserError, match=message):
            model(pictures(), budget=bad)
    assert model.budget is None
    with pytest.raises(UserError, match="one for each of the 3 images, got 2"):
        model(pictures(), budget=["-10%", "-20%"])
    with pytest.raises(UserError, match="above the static model"):
        model.calibrate(pictures(), budget="9 GMACs")
    with pytest.raises(UserError, match="expected images, got none"):
        model.calibrate([])
    with pytest.raises(UserError, match="Expected images of 32 x 32 px"):
        model.calibrate(pictures(size=40))
    with pytest.raises(UserError, match="latency_batch: expected at least 1"):
        model.calibrate(pictures(), latency_batch=0)
    with torch.no_grad():
        replay = adaptivit.create(model.vit, "replay", trace=model(pictures()).trace)
    with pytest.raises(UserError, match="'replay' has no dial"):
        replay.calibrate(pictures())
    least = randomised("amod", multiply=True)
    with pytest.raises(UserError, match="below the least that this model can do"):
        least.calibrate(pictures(1), "-60%")
    assert least.calibration is not None  # the curve is kept for another budget
    assert least.budget is None


@torch.no_grad()
def test_another_image_size() -> None:
    model = tiny("aht", more={"dynamic_img_size": True})
    model.calibrate(pictures(4))
    model.budget = "-20%"
    with pytest.raises(UserError, match="of 17 tokens, these have 26"):
        model(pictures(size=40))
    out = model(pictures(size=40), budget="none", max_macs="-30%")
    assert (out.macs <= 0.7 * out.costs.static).all()


# -- the command ----------------------------------------------------------------------------------------------------
def test_the_command(tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(0)
    adaptivit.create("test_vit", "evit", img_size=32, num_classes=3).save_pretrained(tmp_path / "m", mark="kept")
    photos = folder(tmp_path / "photos")
    assert run("calibrate", tmp_path / "m", "--data", photos, "--budget", "-20%", "--out", tmp_path / "new") == 0
    printed = capsys.readouterr().out
    assert "-20%" in printed
    assert "nearest step below" in printed
    assert {f.name for f in (tmp_path / "new").iterdir()} == {
        *("config.json", "model.safetensors", "README.md", "calibration.csv", "calibration.png")
    }
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["mark"] == "kept"
    assert config["calibration"]["budget"] == "-20%"
    assert json.loads((tmp_path / "m" / "config.json").read_text())["calibration"] is None  # as it was
    lines = (tmp_path / "new" / "calibration.csv").read_text().splitlines()
    assert sum(line.startswith("unseen") for line in lines) >= 2
    assert adaptivit.load(tmp_path / "new").budget == "-20%"
    assert run("calibrate", tmp_path / "m", "--data", photos) == 0  # in place, no budget
    capsys.readouterr()
    picture = next(photos.rglob("*.png"))
    cost = []
    for more in ([], ["--budget", "-20%"], ["--budget=-20%", "--max-macs", "-25%"]):
        assert run("predict", picture, "--checkpoint", tmp_path / "m", "--format", "jsonl", *more) == 0
        cost.append(json.loads(capsys.readouterr().out)["gmacs"])
    assert cost[0] > cost[1] > cost[2]
    assert run("evaluate", "--data", photos, "--checkpoint", tmp_path / "m", "--budget", "-20%") == 0
    assert "against static" in capsys.readouterr().out


def test_the_command_takes_enough_images(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where images differ in cost: as many as 2 % need, and a note where there are too few."""
    for name, value in (("FIRST", 8), ("LEAST", 12), ("MOST", 40)):
        monkeypatch.setattr(calibrate, name, value)
    torch.manual_seed(0)
    randomised("confidence", more={"depth": 3}).save_pretrained(tmp_path / "m")
    images = (pictures(100, seed=12) * 40 + 128).clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    np.savez(tmp_path / "many.npz", x=images)
    np.savez(tmp_path / "some.npz", x=images[:30])

    def note(*more: object) -> tuple[str, int]:
        assert run("calibrate", tmp_path / "m", "--budget", "-33%", *more) == 0
        printed = " ".join(capsys.readouterr().out.split())
        curve = adaptivit.load(tmp_path / "m").calibration
        assert ("note: -33% is met within about ±" in printed) == (curve.error(0.67 * curve.static) > 0.02)
        return printed, curve.images

    printed, count = note("--data", tmp_path / "many.npz")
    assert count == 40
    assert "±" in printed.partition("expected")[2]
    assert "would bring it to ±2 %" in printed
    assert note("--data", tmp_path / "some.npz")[1] == 15  # all there are, in two halves
    assert note("--data", tmp_path / "many.npz", "--limit", "10")[1] == 10
    header, first, *_ = (tmp_path / "m" / "calibration.csv").read_text().splitlines()
    assert float(dict(zip(header.split(","), first.split(","), strict=True))["gmacs_sd"]) >= 0


def test_mistakes_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(0)
    adaptivit.create("test_vit", "evit", img_size=32, num_classes=3).save_pretrained(tmp_path / "m")
    photos = folder(tmp_path / "photos")
    message = partial(refused, capsys)
    assert "-150%" in message("calibrate", tmp_path / "m", "--data", photos, "--budget", "-150%")
    assert "3 parsecs" in message("calibrate", tmp_path / "m", "--data", photos, "--budget", "3 parsecs")
    assert "not found" in message("calibrate", tmp_path / "m", "--data", tmp_path / "nowhere")
    assert "config.json" in message("calibrate", tmp_path / "nowhere", "--data", photos)
    assert "not calibrated" in message("predict", photos, "--checkpoint", tmp_path / "m", "--budget", "-20%")
    assert parse("-20%").share == 0.8
    assert not (tmp_path / "m" / "calibration.csv").exists()
