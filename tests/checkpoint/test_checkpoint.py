"""A checkpoint directory: exact round trips, the formats before, damage that is named, and nothing that runs."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import adaptivit
from adaptivit.checkpoint import format as checkpoint
from adaptivit.checkpoint import model_card
from adaptivit.errors import DataError, UserError, WeightsError
from adaptivit.model import AdaptiveViT
from tests.support.checkpoints import Bomb, same_tensors
from tests.support.commands import refused, run
from tests.support.data_sets import folder
from tests.support.models import TINY, pictures, randomise, shared, tiny

POLICIES: dict[str, dict[str, Any]] = {
    "static": {"depth": 4},
    "aht": {"planner_blocks": (2, 4), "threshold": 0.6, "beta": -1.0},
    "aht_merge": {"gamma": 2.0, "beta": 0.5, "train_budget_range": (0.4, 0.9)},
    "avit": {"gate_center": 1.0, "gate": "network"},
    "mod": {"capacity": 0.4, "router": "mlp"},
    "amod": {"capacity": 0.4},
    "dynamicvit": {"keep": 0.6, "blocks": (1, 3)},
    "spvit": {"keep": (0.6, 0.3), "blocks": (1, 3)},
    "evit": {"keep": 0.6},
    "patch_slimming": {"counts": (14, 9, 9, 5, 2)},
    "tome": {"r": [3, 2, 1]},
    "fold": {"budget": 0.7},
    "act": {"bias": 0.0},
    "confidence": {"threshold": 0.2},
    "similarity": {"threshold": 3.0},
    "pondernet": {"gate_center": 1.0},
}


def logits(model: AdaptiveViT, size: int = 32, layout: str = "auto") -> torch.Tensor:
    with torch.inference_mode():
        dtype = next(model.parameters()).dtype
        return model(pictures(3, size).to(dtype), layout=layout).logits


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny("aht", threshold=0.6, beta=-1.0).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def rewrite(place: Path, **changes: Any) -> None:
    """Other values in config.json; None takes one out."""
    config = json.loads((place / "config.json").read_text()) | changes
    (place / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


# -- round trips ----------------------------------------------------------------------------------------------------
PRECISIONS = [(policy, torch.float32) for policy in POLICIES]
PRECISIONS += [("aht", dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)]


@pytest.mark.parametrize(("policy", "dtype"), PRECISIONS)
def test_every_policy_comes_back_bit_by_bit(policy: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny(policy, **POLICIES[policy])
    randomise(model.policy, 3)
    model = model.to(dtype)
    model.class_names = [f"class {i}" for i in range(10)]
    model.save_pretrained(tmp_path / "saved")
    for again in (adaptivit.load(tmp_path / "saved"), adaptivit.from_pretrained(tmp_path / "saved")):
        assert {p.dtype for p in again.parameters()} == {dtype}
        assert same_tensors(model.state_dict(), again.state_dict())
        assert (again.settings, again.class_names, again.training) == (model.settings, model.class_names, False)
        assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
        if dtype == torch.float32:
            assert torch.equal(logits(model), logits(again))
    made = adaptivit.create(TINY, policy, weights=tmp_path / "saved", **POLICIES[policy])
    assert same_tensors({k: v.float() for k, v in model.state_dict().items()}, made.state_dict())
    assert made.settings == model.settings
    if dtype == torch.float32:
        assert torch.equal(logits(model), logits(made))


def test_precisions_may_be_mixed(tmp_path: Path) -> None:
    model = tiny("aht", beta=-1.0)
    model.vit.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    again = adaptivit.load(tmp_path / "saved")
    assert {k: v.dtype for k, v in again.state_dict().items()} == {k: v.dtype for k, v in model.state_dict().items()}
    assert again.policy.beta.dtype == torch.float32


@pytest.mark.parametrize("given", [{"width": 0.5}, {"share": 0.5, "by": "width"}])
def test_a_narrow_model_comes_back_and_starts_others(given: dict[str, Any], tmp_path: Path) -> None:
    small = adaptivit.create(TINY, "static", img_size=48, **given)
    randomise(small.vit)
    small.save_pretrained(tmp_path / "small")
    images = pictures(2, 48)
    for again in (
        adaptivit.load(tmp_path / "small"),
        adaptivit.create(TINY, "static", weights=tmp_path / "small"),
        adaptivit.create(TINY, "static", weights=tmp_path / "small", **given),
        adaptivit.create(adaptivit.create(TINY, "static").vit, "static", weights=tmp_path / "small"),
        adaptivit.create(json.loads((tmp_path / "small/config.json").read_text())["backbone"]["kwargs"], "static",
                         weights=tmp_path / "small"),
    ):  # fmt: skip
        assert (again.whole, again.shape, again.settings) == (small.whole, small.shape, small.settings)
        assert torch.equal(again(images).logits, small(images).logits)
    adaptive = adaptivit.create(TINY, "tome", weights=tmp_path / "small", r=2, num_classes=4)
    assert (adaptive.shape.dim, adaptive.shape.classes) == (small.shape.dim, 4)
    assert adaptive.whole is not None
    assert (adaptive.whole.dim, adaptive.whole.classes) == (24, 4)
    with pytest.raises(WeightsError, match=r"narrow backbone \(static:.*=0\.5.*\), but width=0\.25 was asked for"):
        adaptivit.create(TINY, "static", weights=tmp_path / "small", width=0.25)
    with pytest.raises(WeightsError, match=r"width 24 with 6 blocks.*width 48 with 6 blocks"):
        adaptivit.create(TINY | {"embed_dim": 48}, "static", weights=tmp_path / "small")


def test_a_narrow_checkpoint_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(0)
    adaptivit.create("test_vit", "static", img_size=32, num_classes=3, width=0.5).save_pretrained(tmp_path / "small")
    images, out = folder(tmp_path / "images", each=2), tmp_path / "row.json"
    words = ("evaluate", "--data", images, "--backbone", "test_vit", "--weights", tmp_path / "small")
    assert run(*words, "--json", out) == 0, capsys.readouterr().err
    by_weights = json.loads(out.read_text())
    assert run("evaluate", "--data", images, "--checkpoint", tmp_path / "small", "--json", out) == 0
    same = ("top1", "gmacs", "gmacs_static", "live", "policy")
    assert [by_weights[k] for k in same] == [json.loads(out.read_text())[k] for k in same]
    assert by_weights["gmacs"] < 0.7 * by_weights["gmacs_static"]
    train = ("--backbone", "test_vit", "--policy", "tome:r=1", "--weights", tmp_path / "small", "--epochs", 1)
    assert run("train", "--data", images, *train, "--out", tmp_path / "run", "--batch-size", 2) == 0
    assert adaptivit.load(tmp_path / "run/model").shape.dim == adaptivit.load(tmp_path / "small").shape.dim
    wrong = ("evaluate", "--data", images, "--backbone", "vit_tiny_patch16_224", "--weights", tmp_path / "small")
    assert "cut out of one of width 64" in refused(capsys, *wrong)


# -- notes ----------------------------------------------------------------------------------------------------------
def test_results_stay_with_the_weights_that_they_were_measured_on(tmp_path: Path) -> None:
    results = {"validation": {"images": 10, "top1": 81.25, "gmacs": 0.75, "gmacs_static": 1.25}}
    first = tiny("aht")
    curve = first.calibrate(pictures(4))
    first.save_pretrained(tmp_path / "a", results=results, note="hello")
    model = adaptivit.load(tmp_path / "a")
    assert model.notes == {"results": results, "note": "hello"}
    assert model.calibration == curve
    assert adaptivit.create(TINY, "aht", weights=tmp_path / "a").calibration == curve
    assert adaptivit.create(TINY, "aht", weights=tmp_path / "a", threshold=0.5).calibration is None
    model.save_pretrained(tmp_path / "b", note="again")
    again = adaptivit.load(tmp_path / "b")
    assert again.notes == model.notes | {"note": "again"}
    card_text = (tmp_path / "b/README.md").read_text()
    assert "| validation | 10 | 81.25 | 0.75 | 1.25 |" in card_text
    assert "calibration curve" in card_text
    with torch.no_grad():
        again.vit.head.bias += 1
    again.save_pretrained(tmp_path / "c")
    assert adaptivit.load(tmp_path / "c").notes == {}
    assert "None are known." in (tmp_path / "c/README.md").read_text()
    other = adaptivit.create(TINY, "aht", weights=tmp_path / "a", threshold=0.5)
    other.save_pretrained(tmp_path / "d")
    assert adaptivit.load(tmp_path / "d").notes == {}


def test_notes_cannot_overrule_the_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'policy' is a field of the model itself"):
        tiny().save_pretrained(tmp_path / "saved", policy="aht")
    with pytest.raises(UserError, match=r"config\.json cannot hold .*Tensor"):
        tiny().save_pretrained(tmp_path / "saved", note=torch.ones(1))
    assert not (tmp_path / "saved").exists()


# -- what is asked beside a directory --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "stored", "asked", "message"),
    [
        (
            "aht",
            {"planner_blocks": (2,)},
            {"planner_blocks": (3,)},
            r"aht with planner_blocks=\(2,\), but planner_blocks=\(3,\)",
        ),
        ("aht", {"beta": -1.0}, {"beta": 2.0}, r"beta=-1\.0, but beta=2\.0 was asked for"),
        ("aht", {"planner_width": 0.5}, {"planner_width": 1.0}, r"planner_width=0\.5, but planner_width=1\.0"),
        ("mod", {}, {"router": "mlp"}, "router=linear, but router=mlp"),
        ("mod", {}, {"blocks": (2,)}, r"blocks=None, but blocks=\(2,\)"),
        ("avit", {}, {"gate": "network"}, "gate=neuron, but gate=network"),
        ("act", {}, {"bias": 1.0}, r"bias=-3\.0, but bias=1\.0"),
        ("dynamicvit", {}, {"blocks": (2,)}, "blocks=None, but blocks="),
    ],
)
def test_settings_that_the_weights_contradict(
    policy: str, stored: Any, asked: Any, message: str, tmp_path: Path
) -> None:
    tiny(policy, **stored).save_pretrained(tmp_path / "saved")
    with pytest.raises(WeightsError, match=message):
        adaptivit.create(TINY, policy, weights=tmp_path / "saved", **asked)
    adaptivit.create(TINY, policy, weights=tmp_path / "saved", **stored)


@pytest.mark.parametrize(
    ("policy", "asked"),
    [("aht", {"threshold": 0.5}), ("tome", {"r": 4}), ("dynamicvit", {"keep": 0.5}), ("mod", {"capacity": 0.3})],
)
def test_settings_that_act_beside_the_weights_may_be_asked_for(policy: str, asked: Any, tmp_path: Path) -> None:
    model = tiny(policy)
    model.save_pretrained(tmp_path / "saved")
    made = adaptivit.create(TINY, policy, weights=tmp_path / "saved", **asked)
    assert made.settings == model.settings | asked
    assert same_tensors(model.state_dict(), made.state_dict())


# -- formats before -------------------------------------------------------------------------------------------------
def format_1(place: Path) -> AdaptiveViT:
    """A directory as adaptivit 0.1.0 wrote it before there was a digest, out of plain JSON and tensors."""
    model = tiny("aht", threshold=0.6, planner_blocks=(2,))
    backbone = {"distilled": False, "norm_eps": 1e-6, "patch_size": [8, 8], "in_chans": 3, "embed_dim": 24, "depth": 6}
    backbone |= {"num_heads": 3, "mlp_ratio": 4.0, "qkv_bias": True, "global_pool": "token", "class_token": True}
    config = {
        "format": 1,
        "adaptivit": "0.1.0",
        "backbone": {"name": None, "kwargs": backbone, "changes": {"num_classes": 10, "img_size": [32, 32]}},
        "policy": "aht",
        "settings": {"threshold": 0.6, "eps": 0.01, "stages": [2], "feature": "fc1"},
        "preprocessing": {"size": [32, 32], "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "crop_pct": 0.9,
                          "interpolation": "bicubic"},
        "class_names": list("abcdefghij"),
        "whole": None,
        "results": {"validation": {"top1": 50.0}},
    }  # fmt: skip
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    save_file({k.removeprefix("vit."): v.clone() for k, v in model.state_dict().items()}, place / "model.safetensors")
    return model  # type: ignore[no-any-return]


def test_format_1_loads_and_becomes_format_3(tmp_path: Path) -> None:
    model = format_1(tmp_path / "old")
    again = adaptivit.load(tmp_path / "old")
    assert torch.equal(logits(model), logits(again))
    assert (again.settings, again.class_names) == (model.settings, list("abcdefghij"))
    assert again.notes == {"results": {"validation": {"top1": 50.0}}}
    assert torch.equal(logits(adaptivit.create(TINY, "aht", weights=tmp_path / "old")), logits(model))
    again.save_pretrained(tmp_path / "new")
    config = json.loads((tmp_path / "new/config.json").read_text())
    assert config["format"] == checkpoint.FORMAT == 3
    assert config["results"] == again.notes["results"]
    assert torch.equal(logits(adaptivit.load(tmp_path / "new")), logits(model))


def test_what_this_version_does_not_know_is_explained(saved: Path) -> None:
    rewrite(saved, settings={"treshold": 1.0})
    with pytest.raises(WeightsError, match=r"config\.json \(saved by adaptivit .*Did you mean 'threshold'.*version"):
        adaptivit.load(saved)
    rewrite(saved, policy="mine")
    advice = r"policy 'mine', which is unknown here .*--import FILE, .*register_policy\('mine'\)"
    with pytest.raises(WeightsError, match=advice):
        adaptivit.load(saved)
    rewrite(saved, format=4)
    with pytest.raises(WeightsError, match=r"newer adaptivit \(format 4\); upgrade"):
        adaptivit.load(saved)


# -- damage ---------------------------------------------------------------------------------------------------------
def damage_cut(place: Path) -> None:
    data = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").write_bytes(data[: len(data) // 2])


def damage_bit(place: Path) -> None:
    data = bytearray((place / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (place / "model.safetensors").write_bytes(bytes(data))


def _edit(place: Path, change: Any) -> None:
    state = load_file(place / "model.safetensors")
    change(state)
    save_file({k: v.clone() for k, v in state.items()}, place / "model.safetensors")


def damage_key(place: Path) -> None:
    _edit(place, lambda state: state.pop("blocks.3.mlp.fc1.bias"))


def damage_policy_key(place: Path) -> None:
    _edit(place, lambda state: state.pop("policy.beta"))


def damage_shape(place: Path) -> None:
    _edit(place, lambda state: state.update({"norm.weight": torch.ones(25)}))


def damage_kind(place: Path) -> None:
    _edit(place, lambda state: state.update({"norm.weight": torch.ones(24, dtype=torch.int32)}))


def damage_swap(place: Path) -> None:
    def swap(state: Any) -> None:
        a, b = "blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"
        state[a], state[b] = state[b], state[a]

    _edit(place, swap)


def damage_exchange(place: Path) -> None:
    tiny("aht", seed=9).save_pretrained(place.parent / "other")
    shutil.copy(place.parent / "other/model.safetensors", place)


def damage_missing(place: Path) -> None:
    (place / "model.safetensors").unlink()


DAMAGE = {
    "cut": "Damaged or unreadable weights file",
    "bit": "sha256",
    "key": r"missing: blocks\.3\.mlp\.fc1\.bias",
    "policy_key": r"missing: (policy\.)?beta",
    "shape": r"other shape: norm\.weight \(expected \[24\], got \[25\]\)",
    "kind": r"no weights: norm\.weight \(torch\.int32\)",
    "swap": "is not the file that config.json beside it was saved with",
    "exchange": "Copy both from one checkpoint",
    "missing": "not found",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights_are_named(damage: str, saved: Path, capsys: Any) -> None:
    globals()[f"damage_{damage}"](saved)
    for use in (adaptivit.load, lambda place: adaptivit.create(TINY, "aht", weights=place)):
        with pytest.raises(WeightsError, match=f"(?s)saved.*{DAMAGE[damage]}|{DAMAGE[damage]}.*saved"):
            use(saved)
    assert str(saved) in refused(capsys, "predict", Path(__file__).parents[2] / "docs/images",
                                 "--checkpoint", saved)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"weights": None},
        {"weights": {}},
        {"weights": "x"},
        {"backbone": None},
        {"settings": []},
        {"format": "2"},
        {"format": True},
        {"format": 0},
        {"class_names": "ab"},
        {"class_names": [1]},
        {"class_names": ["a"]},
        {"whole": 7},
        {"whole": {"dim": 3}},
        {"preprocessing": {"size": [32, 32], "colour": "red"}},
        {"backbone": {"name": None, "changes": {}}},
    ],
)
def test_damaged_configs_are_named(change: dict[str, Any], saved: Path) -> None:
    rewrite(saved, **change)
    with pytest.raises(WeightsError, match=r"Damaged checkpoint: .*config\.json"):
        adaptivit.load(saved)


def test_other_directories_are_told_apart(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"No such directory.*from_pretrained"):
        adaptivit.load(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match=r"A checkpoint is a directory with a config\.json, and .* is a file"):
        adaptivit.load(saved / "config.json")
    with pytest.raises(WeightsError, match=rf"{tmp_path} has no config.json. Did you mean {saved}\?"):
        adaptivit.load(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["ViTModel"]}')
    with pytest.raises(WeightsError, match="written by something else"):
        adaptivit.load(tmp_path)


def test_names_that_do_not_fit_are_not_saved(tmp_path: Path) -> None:
    model = tiny("evit")
    model.class_names = ["a", "b"]
    with pytest.raises(UserError, match="class_names has 2 names for 10 classes"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_nothing_runs_or_is_fetched(saved: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Pickles beside the checkpoint are not opened, and config.json cannot make timm go to the network."""
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    for name in ("pytorch_model.bin", "model.pth", "training.pt"):
        (saved / name).write_bytes(bomb)
    import socket

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("somebody was called"))
    adaptivit.load(saved)
    assert not (tmp_path / "exploded").exists()
    config = json.loads((saved / "config.json").read_text())
    for backbone, message in (
        ({"name": "vit_tiny_patch16_224", "changes": {"pretrained": True}}, "Damaged"),
        ({"name": "hf-hub:timm/vit_tiny_patch16_224.augreg_in21k", "changes": {}}, "Unknown timm model"),
        ({"name": "resnet18", "changes": {}}, "VisionTransformer"),
    ):
        rewrite(saved, **config | {"backbone": backbone})
        with pytest.raises(UserError, match=message):
            adaptivit.load(saved)


# -- where it is written --------------------------------------------------------------------------------------------
def test_other_peoples_files_are_not_replaced(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(UserError, match=r"photos holds other things than a checkpoint \(cat\.jpg\)"):
        tiny().save_pretrained(photos)
    assert [p.name for p in photos.iterdir()] == ["cat.jpg"]
    with pytest.raises(UserError, match="this is a file"):
        tiny().save_pretrained(photos / "cat.jpg")


def test_files_beside_a_checkpoint_and_a_card_of_ones_own_stay(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    tiny().save_pretrained(place)
    (place / ".git").mkdir()
    (place / ".git/head").write_text("main")
    (place / "notes.txt").write_text("mine")
    tiny(seed=1).save_pretrained(place)
    assert ((place / ".git/head").read_text(), (place / "notes.txt").read_text()) == ("main", "mine")
    (place / "README.md").write_text("# my card")
    new = tiny("evit", seed=2)
    new.save_pretrained(place)
    assert (place / "README.md").read_text() == "# my card"
    assert torch.equal(logits(adaptivit.load(place)), logits(new))


# -- the card -------------------------------------------------------------------------------------------------------
def test_the_card_says_what_is_known(tmp_path: Path) -> None:
    model = tiny("aht", threshold=0.6)
    model.class_names = ["a|b", "<c>", *map(str, range(8))]
    model.save_pretrained(tmp_path / "saved")
    text = (tmp_path / "saved/README.md").read_text()
    assert text.startswith("---\nlibrary_name: adaptivit\n")
    assert "| threshold | 0.6 |" in text
    assert "10 classes (a|b, &lt;c>, 0," in text
    assert "None are known." in text
    assert model_card.PICTURE not in text
    assert not (tmp_path / "saved" / model_card.PICTURE).exists()


@pytest.mark.parametrize("images", ["samples", "files", "pictures"])
def test_the_card_shows_where_tokens_stopped(images: str, tmp_path: Path) -> None:
    Image.effect_noise((80, 60), 90).save(tmp_path / "noise.png")
    given: Any = {"samples": "samples", "files": [tmp_path / "noise.png"], "pictures": [Image.new("L", (40, 40))]}
    model = tiny("aht", beta=-1.0).train()
    model.save_pretrained(tmp_path / "saved", images=given[images])
    assert model.training
    with Image.open(tmp_path / "saved" / model_card.PICTURE) as picture:
        assert picture.size[0] > 300
    text = (tmp_path / "saved/README.md").read_text()
    assert f"]({model_card.PICTURE})" in text
    assert ("creativecommons.org" in text) == (images == "samples")
    model.save_pretrained(tmp_path / "saved")  # a picture of other weights does not stay
    assert not (tmp_path / "saved" / model_card.PICTURE).exists()


def test_wrong_pictures_are_named_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no picture")
    for images, message in (([tmp_path / "bad.png"], r"bad\.png"), ([tmp_path / "no.png"], r"no\.png"), ([7], "7")):
        with pytest.raises(DataError, match=message):
            tiny().save_pretrained(tmp_path / "saved", images=images)
    for images in ([], "sample", 7):
        with pytest.raises(UserError, match="images: expected a list of pictures"):
            tiny().save_pretrained(tmp_path / "saved", images=images)
    with pytest.raises(UserError, match="5 channels"):
        tiny(more={"in_chans": 5}).save_pretrained(tmp_path / "saved", images="samples")
    assert not (tmp_path / "saved").exists()


def test_real_weights_round_trip(tmp_path: Path) -> None:
    weights = shared("weights/deit_tiny_patch16_224.safetensors")
    model = adaptivit.create("deit_tiny_patch16_224", "fold", weights=weights, budget=0.67)
    model.save_pretrained(tmp_path / "saved", images="samples")
    assert torch.equal(logits(model, 224), logits(adaptivit.load(tmp_path / "saved"), 224))
