"""Every field of config.json in every wrong way: one line, in no time, without memory, and nothing is built by it."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adaptivit
from adaptivit.errors import UserError, WeightsError
from tests.support.checkpoints import Bomb
from tests.support.commands import refused, without_torch
from tests.support.models import TINY, pictures, tiny

SECONDS, KIBIBYTES = 2.0, 500_000  # of the process's own work, and more than it had
DEEP: Any = ["deep"]  # stands for 10,000 lists in each other, which only text can hold
WRONG: dict[str, Any] = {"null": None, "text": "x", "list": [1], "object": {"a": 1}, "true": True, "negative": -7}
WRONG |= {"zero": 0, "huge": 10**9, "endless": 10**400, "half": 0.5, "nan": float("nan"), "inf": float("inf")}
WRONG |= {"long": "9" * 10**6, "deep": DEEP, "lists": [[1], [1]], "empty": []}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated model of AHT-ViT."""
    model = tiny("aht", beta=-1.0)
    model.class_names = [f"class {i}" for i in range(10)]
    model.calibrate(pictures(4), "-10%")
    model.max_macs = "-5%"
    place: Path = tmp_path_factory.mktemp("hostile") / "saved"
    model.save_pretrained(place)
    return place


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value of a good config.json."""
    if path:
        yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, one in inside:
        yield from fields(one, (*path, key))


def changed(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> str:
    config = copy.deepcopy(config)
    at: Any = config
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(config).replace('["deep"]', "[" * 10_000 + "]" * 10_000)


def write(place: Path, text: str, whole: Path) -> Path:
    """The checkpoint with another config.json, beside the same weights."""
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(text)
    if not (place / "model.safetensors").exists():
        (place / "model.safetensors").symlink_to(whole / "model.safetensors")
    return place


def held(place: Path) -> str:
    """What loading says, which takes no time and no memory; nothing where it loads after all."""
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found: UserError | None = None
    try:
        model = adaptivit.load(place)
        with torch.inference_mode():
            model(pictures(2))
    except UserError as error:  # of the pass where a budget turns out to be none
        found = error
    said = str(found or "")
    assert "\n" not in said
    assert len(said) < 1500
    assert (str(place) in said) == (type(found) is WeightsError)
    assert time.process_time() - begun < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < KIBIBYTES
    return said


@pytest.mark.parametrize("kind", WRONG)
def test_every_field_in_every_wrong_way(kind: str, saved: Path, tmp_path: Path) -> None:
    """Every third field for each kind, another third for the next; all 1,315 pairs were tried."""
    config = json.loads((saved / "config.json").read_text())
    paths = [path for path in fields(config) if path[0] != "results"][list(WRONG).index(kind) % 3 :: 3]
    refusals = [held(write(tmp_path / "changed", changed(config, path, WRONG[kind]), saved)) for path in paths]
    assert sum(map(bool, refusals)) > len(paths) / 2


BACKBONES: dict[str, dict[str, Any]] = {
    "depth": {"depth": 10**9},
    "depth_of_many": {"depth": 1024},
    "width": {"embed_dim": 2**16, "num_heads": 1},
    "wider": {"embed_dim": 2**16, "num_heads": 2**12, "mlp_ratio": 1024.0},
    "channels": {"in_chans": 4096, "patch_size": [8192, 8192]},
    "heads": {"num_heads": 5},
    "registers": {"reg_tokens": 4096},
    "no_patch": {"patch_size": [0, 8]},
    "one_patch": {"patch_size": [8]},
    "another_argument": {"weight_init": "jax"},
    "a_module": {"norm_layer": "torch.nn.LayerNorm"},
    "epsilon": {"norm_eps": -1e-6},
    "infinite_epsilon": {"norm_eps": 1e400},
}
NAMES = ("vit_7b_patch16_dinov3", "vit_gigantic_patch14_224", "efficientnet_l2", "local-dir:/tmp", "\n", "x" * 10**6)


@pytest.mark.parametrize("what", [*BACKBONES, *NAMES], ids=lambda what: what[:20].strip() or "newline")
def test_backbones_that_are_not_those_of_the_weights(what: str, saved: Path, tmp_path: Path, capsys: Any) -> None:
    config = json.loads((saved / "config.json").read_text())
    if what in BACKBONES:
        config["backbone"]["kwargs"] |= BACKBONES[what]
    else:
        config["backbone"] = {"name": what, "changes": config["backbone"]["changes"]}
    place = write(tmp_path / "changed", json.dumps(config), saved)
    assert held(place)
    assert str(place) in refused(capsys, "demo", place)


def test_fields_without_torch(saved: Path, tmp_path: Path) -> None:
    """98 in 100 of all 1,261 pairs that are refused are so before torch is imported; here every ninth pair."""
    config = json.loads((saved / "config.json").read_text())
    pairs = [(path, WRONG[kind]) for kind in WRONG for path in fields(config) if path[0] != "results"][::9]
    places = [write(tmp_path / f"{i}", changed(config, *pair), saved) for i, pair in enumerate(pairs)]
    refusals = without_torch([("demo", place) for place in places])
    assert sum(str(place) in said for place, said in zip(places, refusals, strict=True)) > 0.88 * len(places)


def test_every_command_without_torch(saved: Path, tmp_path: Path) -> None:
    """What is not of the weights in the file, and what is no checkpoint, is refused before torch is imported."""
    config, data, backbone = json.loads((saved / "config.json").read_text()), tmp_path, ("--backbone", "test_vit")
    known = [config["backbone"]["kwargs"] | BACKBONES[k] for k in BACKBONES.keys() - {"heads", "registers"}]
    texts = [changed(config, ("backbone", "kwargs"), value) for value in known]
    texts += ["[" * 100_000, "{}", "null", '{"policy": 1}', changed(config, ("max_macs",), "1e400 GMACs")]
    texts += [changed(config, ("settings", "beta"), "x"), changed(config, ("policy",), "ahtt")]
    places = [write(tmp_path / f"{i}", text, saved) for i, text in enumerate(texts)]
    words: list[tuple[Any, ...]] = [("demo", place) for place in places]
    last = write(tmp_path / "last", "{}", saved)
    words += [("export", last, "--out", "x.onnx"), ("serve", last), ("calibrate", last, "--data", data)]
    words += [("visualize", last, "--images", data), ("predict", data, "--checkpoint", last)]
    words += [("predict", data, *backbone, "--weights", last), ("train", "--data", data, "--teacher", last)]
    words += [("evaluate", "--data", data, *backbone, "--compare-to", last), ("benchmark", "--weights", last)]
    for place, given, said in zip([*places, *[last] * 9], words, without_torch(words), strict=True):
        assert str(place) in said, (given, said)


def test_hostile_in_other_ways(saved: Path, tmp_path: Path, capsys: Any) -> None:
    text = (saved / "config.json").read_text()
    huge_image = {"backbone": {"changes": {"num_classes": 10, "img_size": [8192, 8192]}}}
    for number, wrong in enumerate(
        [
            "[" * 100_000,
            "{}",
            "[]",
            "null",
            "1" * 10_000,
            '{"policy": 1}',
            text[:-50],
            text + " " * 8 * 2**20,
            changed(json.loads(text), ("max_macs",), "1e400 GMACs"),
            changed(json.loads(text), ("max_macs",), "1" * 150 + "x"),
            changed(json.loads(text), ("calibration", "points"), []),
            changed(json.loads(text), ("policy",), "replay"),
            changed(json.loads(text), ("preprocessing", "crop_pct"), 1e-300),
            changed(json.loads(text), ("preprocessing", "mean"), [0.5]),
            changed(json.loads(text), ("backbone", "changes", "num_classes"), 10**7),
            changed(json.loads(text), ("backbone", "changes"), huge_image["backbone"]["changes"]),
            changed(json.loads(text), ("settings", "planner_width"), 1e9),
            changed(json.loads(text), ("settings", "planner_width"), 1e300),
        ]
    ):
        place = write(tmp_path / f"{number}", wrong, saved)
        assert held(place), wrong[:100]
        assert str(place) in refused(capsys, "visualize", place, "--images", place / "config.json")


def test_a_narrow_checkpoint_is_not_built_by_what_it_says(tmp_path: Path) -> None:
    """`create` takes the backbone's arguments from such a directory."""
    adaptivit.create(TINY, "static", width=0.5).save_pretrained(tmp_path / "narrow")
    config = json.loads((tmp_path / "narrow/config.json").read_text())
    for change in ({"depth": 24}, {"embed_dim": 2**16 - 1}, {"mlp_ratio": 1000.0}):
        text = changed(config, ("backbone", "kwargs"), config["backbone"]["kwargs"] | change)
        place, begun = write(tmp_path / "changed", text, tmp_path / "narrow"), time.process_time()
        with pytest.raises(WeightsError, match="changed"):
            adaptivit.create(TINY, "tome", weights=place)
        assert time.process_time() - begun < SECONDS


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_of_any_protocol_is_one_line_without_advice_to_trust_it(protocol: int, tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "ran")
    plain, saved, legacy = pickle.dumps({"a": bomb}, protocol=protocol), io.BytesIO(), io.BytesIO()
    torch.save({"a": bomb}, saved, pickle_protocol=protocol)
    torch.save({"a": bomb}, legacy, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    harmless = pickle.dumps({"a": 1.0}, protocol=protocol)
    for data in (plain, saved.getvalue(), legacy.getvalue(), harmless, pickle.dumps(np.ones(3), protocol=protocol)):
        (tmp_path / "weights.pth").write_bytes(data)
        with pytest.raises(WeightsError, match=r"weights\.pth") as caught:
            adaptivit.create(TINY, "static", weights=tmp_path / "weights.pth")
        assert not re.search(r"\n|trust|weights_only|\x1b", str(caught.value))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "odd",
    [
        {"head.bias": torch.zeros(1).expand(10**12)},
        {"head.bias": torch.empty(10, device="meta")},
        {"head.bias": torch.zeros(10).to_sparse()},
        {1: torch.zeros(10)},
    ],
    ids=["larger_than_stored", "meta", "sparse", "number"],
)
def test_tensors_that_are_no_weights(odd: dict[Any, Any], tmp_path: Path) -> None:
    torch.save(odd, tmp_path / "weights.pth")
    with pytest.raises(WeightsError, match=r"weights\.pth"):
        adaptivit.create(TINY, "static", weights=tmp_path / "weights.pth")
