"""create, load and save: exact round trips; errors of one line; no half-written files."""

from __future__ import annotations

import errno
import json
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import adaptivit
from adaptivit.errors import UserError, WeightsError
from adaptivit.policies import registry
from adaptivit.utils import atomic_io
from tests.support.checkpoints import Bomb, same_tensors
from tests.support.commands import refused, run
from tests.support.models import BACKBONES, TINY, pictures, randomise, tiny


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A .safetensors file of a tiny ViT in timm's keys."""
    path = tmp_path / "tiny.safetensors"
    save_file({k: v.clone() for k, v in tiny(seed=7).vit.state_dict().items()}, path)
    return path


# -- weights ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrapper", [None, "model", "state_dict", "model_ema"])
def test_weights_of_every_form(weights: Path, wrapper: str | None, tmp_path: Path) -> None:
    state = load_file(weights)
    assert same_tensors(adaptivit.create(TINY, "aht", weights=weights).vit.state_dict(), state)
    path = tmp_path / "tiny.pth"
    torch.save(state if wrapper is None else {wrapper: state, "epoch": 3}, path)
    assert same_tensors(adaptivit.create(TINY, "static", weights=str(path)).vit.state_dict(), state)
    torch.save({f"module.{k}": v for k, v in state.items()}, path)
    assert same_tensors(adaptivit.create(VisionTransformer(**TINY), "avit", weights=path).vit.state_dict(), state)


def test_another_number_of_classes_replaces_the_head(weights: Path) -> None:
    state, model = load_file(weights), adaptivit.create(TINY, "static", weights=weights, num_classes=4)
    own = model.vit.state_dict()
    assert own["head.weight"].shape == (4, 24)
    assert model(pictures()).logits.shape == (3, 4)
    assert same_tensors(own, state, but=("head.weight", "head.bias"))
    assert adaptivit.create(VisionTransformer(**TINY), "static", num_classes=4).shape.classes == 4


def test_another_image_size_resizes_the_position_embedding(weights: Path) -> None:
    state = load_file(weights)
    for backbone in (TINY, VisionTransformer(**TINY)):
        model = adaptivit.create(backbone, "static", weights=weights, img_size=48)
        expected = resample_abs_pos_embed(state["pos_embed"], [6, 6], num_prefix_tokens=1)
        assert torch.equal(model.vit.pos_embed, expected)
        assert same_tensors(model.vit.state_dict(), state, but=("pos_embed",))
        assert model(pictures(2, 48)).trace.attended.shape == (6, 2, 37)


def test_wrong_weights_are_listed(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"other shape: blocks.*proj\.bias \(expected \[48\], got \[24\]\)"):
        adaptivit.create(TINY | {"embed_dim": 48}, "static", weights=weights)
    with pytest.raises(WeightsError, match=r"missing: blocks\.6\..* and \d+ more"):
        adaptivit.create(TINY | {"depth": 8}, "static", weights=weights)
    with pytest.raises(WeightsError, match=r"unknown: blocks\.5\."):
        adaptivit.create(TINY | {"depth": 5}, "static", weights=weights)
    with pytest.raises(WeightsError, match="not found"):
        adaptivit.create(TINY, "static", weights=tmp_path / "nowhere.pth")


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_file_that_would_run_code_is_refused(writer: str, tmp_path: Path) -> None:
    path, trap = tmp_path / "bomb.pth", tmp_path / "exploded"
    if writer == "torch":
        torch.save({"model": Bomb(trap)}, path)
    else:
        path.write_bytes(pickle.dumps({"model": Bomb(trap)}, protocol=2))
    with pytest.raises(WeightsError, match=r"bomb\.pth.*run code"):
        adaptivit.create(TINY, "static", weights=path)
    assert not trap.exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("damage", ["empty", "cut", "noise", "text", "stop", "short", "list", "numbers"])
def test_damaged_files_are_named(weights: Path, damage: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"bad{suffix}"
    if suffix == ".pth":
        torch.save(load_file(weights), path)
    else:
        path.write_bytes(weights.read_bytes())
    data = path.read_bytes()
    bad = {"empty": b"", "cut": data[: len(data) // 2], "text": b"not weights", "stop": b".", "short": b"M\x01"}
    path.write_bytes(bad.get(damage, b"\x07" * 99))
    if damage in ("list", "numbers") and suffix == ".pth":
        torch.save([1, 2] if damage == "list" else {"a": 1}, path)
    with pytest.raises(WeightsError, match=rf"bad\{suffix}") as caught:
        adaptivit.create(TINY, "static", weights=path)
    assert "run code" not in str(caught.value), "damage is not an attack, and the user is told to do other things"


# -- checkpoints of ours ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", BACKBONES)
def test_save_and_load_is_exact(kind: str, tmp_path: Path) -> None:
    given = {"planner_blocks": (1, 5), "threshold": 0.8, "index": 3}
    model = tiny("aht", kind, **given)
    model.class_names = [str(i) for i in range(10)]
    model.save_pretrained(tmp_path / "saved", note="hello")
    again = adaptivit.load(tmp_path / "saved")
    assert same_tensors(model.state_dict(), again.state_dict())
    assert (again.settings, again.policy_name, again.class_names) == (model.settings, "aht", model.class_names)
    with torch.no_grad():
        assert torch.equal(model(pictures()).logits, again(pictures()).logits)
    assert json.loads((tmp_path / "saved/config.json").read_text())["note"] == "hello"
    assert set(load_file(tmp_path / "saved/model.safetensors")) >= set(model.vit.state_dict())  # timm's own keys


def test_modules_and_names_round_trip(tmp_path: Path) -> None:
    vit = VisionTransformer(**TINY, norm_layer=lambda *a, **k: nn.LayerNorm(*a, **k | {"eps": 1e-3}))  # type: ignore
    randomise(vit)
    with torch.device("meta"):
        named = adaptivit.create("test_vit", "avit", img_size=64, num_classes=3, gate_center=7.0)
    randomise(named.vit.to_empty(device="cpu"))
    for i, (model, size) in enumerate([(adaptivit.create(vit, "avit", gate_center=1.0), 32), (named, 64)]):
        model.save_pretrained(tmp_path / str(i))
        again = adaptivit.load(tmp_path / str(i))
        assert torch.equal(model(pictures(2, size)).logits, again(pictures(2, size)).logits)
        assert again.settings == model.settings
    assert again.backbone_name == "test_vit"


@pytest.mark.parametrize(
    "special", [{"act_layer": nn.ReLU}, {"act_layer": lambda: nn.GELU("tanh")}, {"dynamic_img_pad": True}]
)
def test_what_cannot_be_described_is_not_saved_wrongly(special: dict[str, Any], tmp_path: Path) -> None:
    """Either it comes back the same, or saving refuses: never silently another model."""
    vit = VisionTransformer(**TINY, dynamic_img_size=True, **special)
    randomise(vit)
    model, images = adaptivit.create(vit, "static"), pictures(2, 36 if "dynamic_img_pad" in special else 32)
    try:
        model.save_pretrained(tmp_path / "saved")
    except UserError as error:
        assert "cannot be described" in str(error)  # noqa: PT017
    else:
        assert torch.equal(model(images).logits, adaptivit.load(tmp_path / "saved")(images).logits)


def test_weights_from_a_directory(tmp_path: Path) -> None:
    aht = tiny("aht", threshold=0.7, planner_blocks=(2,))
    aht.save_pretrained(tmp_path / "aht")
    tiny("static", seed=4).save_pretrained(tmp_path / "static")
    again = adaptivit.create(TINY, "aht", weights=tmp_path / "aht", eps=0.02)
    assert same_tensors(aht.state_dict(), again.state_dict())
    assert (again.settings["threshold"], again.settings["eps"]) == (0.7, 0.02)
    started = adaptivit.create(TINY, "avit", weights=tmp_path / "static", num_classes=3, img_size=48)
    assert torch.equal(started.vit.blocks[0].attn.qkv.weight, tiny(seed=4).vit.blocks[0].attn.qkv.weight)
    assert started(pictures(1, 48)).logits.shape == (1, 3)
    with pytest.raises(WeightsError, match=r"'aht'.*'avit'"):
        adaptivit.create(TINY, "avit", weights=tmp_path / "aht")
    with pytest.raises(WeightsError, match="do not fit"):
        adaptivit.create(TINY | {"depth": 5}, "static", weights=tmp_path / "static")
    with pytest.raises(WeightsError, match="do not fit"):
        adaptivit.create(TINY, "aht", weights=tmp_path / "aht", planner_blocks=(3,))


def test_weights_never_overrule_an_argument(weights: Path) -> None:
    assert adaptivit.create(TINY | {"num_classes": 4}, "static", weights=weights).shape.classes == 4


@pytest.mark.parametrize("asked", [{"drop_path_rate": 0.5}, {"num_classes": 4}, {"img_size": 48}])
@pytest.mark.parametrize("module", [False, True])
def test_what_is_asked_for_beside_a_directory_is_given(module: bool, asked: dict[str, Any], tmp_path: Path) -> None:
    tiny("static").save_pretrained(tmp_path / "static")
    backbone = VisionTransformer(**TINY, drop_path_rate=asked.get("drop_path_rate", 0.0)) if module else TINY
    model = adaptivit.create(backbone, "static", weights=tmp_path / "static", **asked)
    assert getattr(model.vit.blocks[-1].drop_path1, "drop_prob", 0.0) == asked.get("drop_path_rate", 0.0)
    size = asked.get("img_size", 32)
    assert model(pictures(1, size)).logits.shape == (1, asked.get("num_classes", 10))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "{", '{"format": "x"}', '{"format": 1}', '{"format": 1, "backbone": "a"}']
)
def test_damaged_configs_are_named(text: str, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/config.json").write_text(text)
    for use in (adaptivit.load, lambda place: adaptivit.create(TINY, "static", weights=place)):
        with pytest.raises(WeightsError, match="saved"):
            use(tmp_path / "saved")
    (tmp_path / "saved/config.json").write_text('{"format": 99}')
    with pytest.raises(WeightsError, match="newer"):
        adaptivit.load(tmp_path / "saved")


@pytest.mark.parametrize(  # moves: model, config, card, what was there out of the way, the new one in its place
    ("existing", "failing"), [(True, n) for n in (1, 2, 3, 4, 5)] + [(False, n) for n in (1, 2, 3, 4)]
)
def test_nothing_half_written(existing: bool, failing: int, tmp_path: Path, monkeypatch: Any) -> None:
    """The n-th move fails (a full disk): the place is as it was before, with nothing left beside it."""
    place, old, new = tmp_path / "saved", tiny(seed=1), tiny(seed=2)
    if existing:
        old.save_pretrained(place)
    real, moves = os.replace, []

    def replace(source: Any, target: Any) -> None:
        moves.append(target)
        if len(moves) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(atomic_io.os, "replace", replace)
    with pytest.raises(UserError, match=r"Cannot write .*No space left"):
        new.save_pretrained(place)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == (["saved"] if existing else [])
    if existing:
        assert same_tensors(adaptivit.load(place).state_dict(), old.state_dict())


# -- mistakes -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "given", "message"),
    [
        ("ath", {}, "Did you mean 'aht'"),
        ("aht", {"treshold": 1.0}, "Did you mean 'threshold'"),
        ("aht_merge", {"feature": "fc2"}, "Did you mean 'fc1'"),
        ("aht", {"threshold": 0.0}, "threshold: expected a number > 0"),
        ("aht", {"threshold": -1}, "threshold: expected a number > 0"),
        ("aht", {"threshold": float("nan")}, "threshold: expected a .*number"),
        ("aht", {"beta": "nan"}, "beta: expected a .*number"),
        ("aht", {"beta": "much"}, "beta: expected a .*number"),
        ("aht", {"eps": 1.0}, "eps"),
        ("aht", {"planner_blocks": (3, 7)}, r"planner_blocks: .*1\.\.5, got 7"),
        ("aht", {"planner_blocks": (0,)}, "planner_blocks"),
        ("aht", {"planner_blocks": (2, 2)}, "planner_blocks"),
        ("aht_merge", {"index": 24, "feature": "residual", "halt_point": "after"}, "index"),
        ("aht", {"index": 1.5}, "index: expected a whole number"),
        ("aht", {"straight_through": "perhaps"}, "straight_through: expected true or false"),
        ("avit", {"eps": float("nan")}, "eps"),
        ("avit", {"index": 24}, "index"),
        ("static", {"threshold": 1.0}, "threshold"),
        ("replay", {}, "(?i)trace"),
        ("replay", {"trace": "nowhere.safetensors"}, "not found"),
    ],
)
def test_wrong_settings_are_explained(policy: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        adaptivit.create(TINY, policy, **given)


def test_a_policy_of_ones_own(tmp_path: Path, monkeypatch: Any) -> None:
    @dataclass(frozen=True)
    class Settings:
        layer: int = 2
        names: tuple[str, ...] = ("a",)

    class Half(adaptivit.Policy):
        def __init__(self, settings: Settings, shape: Any) -> None:
            super().__init__(settings, shape)
            self.scale = nn.Parameter(torch.ones(3))

        def after(self, ctx: Any, state: None) -> adaptivit.Drop | None:
            leaving = torch.arange(ctx.present.shape[1]) > 8
            return adaptivit.Drop(leaving.expand_as(ctx.present)) if ctx.layer + 1 == self.settings.layer else None

    monkeypatch.setattr(registry.PLUGINS, "registered", {})
    adaptivit.register_policy("half", Settings)(Half)
    model = tiny("half", layer=3, names=("x", "y"))
    nn.init.constant_(model.policy.scale, 0.25)
    model.save_pretrained(tmp_path / "half")
    again = adaptivit.load(tmp_path / "half")
    assert again.settings == {"layer": 3, "names": ("x", "y")}
    assert torch.equal(again.policy.scale, model.policy.scale)
    assert again(pictures()).trace.live[:, 0].tolist() == [17, 17, 17, 9, 9, 9]
    with pytest.raises(UserError, match="built in"):
        adaptivit.register_policy("aht", Settings)
    with pytest.raises(UserError, match="dataclass"):
        adaptivit.register_policy("other", dict)
    with pytest.raises(UserError, match="subclass"):
        adaptivit.register_policy("other", Settings)(dict)  # type: ignore[type-var]


# -- names of a place -----------------------------------------------------------------------------------------------
@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A directory as timm writes it for local-dir: and the Hub."""
    import timm

    torch.manual_seed(0)
    module = timm.create_model("test_vit", num_classes=7, img_size=32)
    (tmp_path / "local").mkdir()
    save_file(module.state_dict(), tmp_path / "local/model.safetensors")
    cfg = {"mean": [0.1] * 3, "num_classes": 7, "input_size": [3, 32, 32], "classifier": "head"}
    about = {"architecture": "test_vit", "num_classes": 7, "pretrained_cfg": cfg, "model_args": {"img_size": 32}}
    (tmp_path / "local/config.json").write_text(json.dumps(about))
    return tmp_path / "local"


def test_a_local_directory_of_timms_brings_its_weights(local: Path, tmp_path: Path, capsys: Any) -> None:
    name, stored = f"local-dir:{local}", load_file(local / "model.safetensors")
    model = adaptivit.create(name, "tome", r=2)
    assert all(torch.equal(v, stored[k]) for k, v in model.vit.state_dict().items())
    assert (model.backbone_name, model.shape.classes, model.preprocessing.mean) == ("test_vit", 7, (0.1,) * 3)
    model.save_pretrained(tmp_path / "saved")
    assert "local" not in (tmp_path / "saved/config.json").read_text()  # what lies there may be another one tomorrow
    again = adaptivit.load(tmp_path / "saved")
    assert torch.equal(again(pictures(2)).logits, model(pictures(2)).logits)
    for asked in (name, "test_vit"):
        made = adaptivit.create(asked, "tome", weights=tmp_path / "saved")
        assert torch.equal(made(pictures(2)).logits, model(pictures(2)).logits)
    fresh = adaptivit.create(name, "static", weights=False)
    assert not torch.equal(fresh.vit.head.weight, stored["head.weight"])
    images = tmp_path / "images"
    images.mkdir()
    Image.new("RGB", (32, 32)).save(images / "a.png")
    assert run("predict", images, "--backbone", name, "--policy", "tome:r=2") == 0
    assert "random" not in capsys.readouterr().err
    for wrong in (f"local-dir:{tmp_path}", "elsewhere:x", "local-dir:"):
        assert "timm could not make" in refused(capsys, "predict", images, "--backbone", wrong)
