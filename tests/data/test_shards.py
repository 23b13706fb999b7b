"""Tar shards, mosaics and Hugging Face data sets: the same pictures as from a folder, wherever a run is cut."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from adaptivit.backbones.preprocessing import Preprocessing
from adaptivit.data import dataset, webdataset
from adaptivit.data.dataset import Images
from adaptivit.errors import DataError, UserError
from adaptivit.training.run import Trainer
from tests.support.commands import SMALL, assert_same_weights, log, refused, train, weights
from tests.support.data_sets import CLASSES, folder, pixels, split_folder
from tests.support.models import shared


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def tars(source: Path, place: Path, split: str = "train", each: int = 5, label: str = "number") -> list[Path]:
    """The pictures of a folder, in its order, in shards of `each` samples."""
    place.mkdir(parents=True, exist_ok=True)
    files = [f for name in CLASSES for f in sorted((source / name).iterdir())]
    found = []
    for number, start in enumerate(range(0, len(files), each)):
        found.append(place / f"{split}-{number:06}.tar")
        with tarfile.open(found[-1], "w") as tar:
            for i, file in enumerate(files[start : start + each], start=start):
                name = file.parent.name
                add(tar, f"{i:05}.png", file.read_bytes())
                if label == "json":
                    add(tar, f"{i:05}.json", json.dumps({"label": CLASSES.index(name), "size": 3}).encode())
                else:
                    add(tar, f"{i:05}.cls", (str(CLASSES.index(name)) if label == "number" else name).encode())
    return found


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with splits, and the same as shards."""
    where, place = split_folder(tmp_path / "in"), tmp_path / "shards"
    tars(where / "train", place)
    tars(where / "val", place, "val", each=7)
    (place / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return where, place


def assert_same_pictures(a: dataset.Labelled, b: dataset.Labelled) -> None:
    assert len(a) == len(b)
    assert list(a.labels) == list(b.labels)
    assert a.classes == b.classes
    assert all(np.array_equal(np.asarray(a.image(i)), np.asarray(b.image(i))) for i in range(len(a)))


# -- shards ---------------------------------------------------------------------------------------------------------
def test_shards_hold_what_the_folder_holds(both: tuple[Path, Path]) -> None:
    for mine, theirs in zip(dataset.for_training(both[0], 0.1, 0), dataset.for_training(both[1], 0.1, 0), strict=True):
        assert_same_pictures(mine, theirs)
        some = [5, 0, 9]
        assert_same_pictures(mine.part(some), theirs.part(some))
        assert_same_pictures(mine.spread(4), theirs.spread(4))
    assert "train-000002.tar:00011" in theirs_name(both[1], 11)


def theirs_name(place: Path, index: int) -> str:
    return dataset.splits(place)["train"].name(index)


def test_a_range_of_shards_is_one_set(both: tuple[Path, Path]) -> None:
    found = dataset.splits(f"{both[1]}/train-{{000000..000002}}.tar")
    assert list(found) == ["all"]
    assert len(found["all"]) == 15
    assert webdataset.expand("a-{08..11}-{0..1}.tar")[:3] == [
        Path("a-08-0.tar"),
        Path("a-08-1.tar"),
        Path("a-09-0.tar"),
    ]
    assert len(dataset.splits(both[1] / "train-000001.tar")["all"]) == 5
    train_set, val = dataset.for_training(f"{both[1]}/train-{{000000..000004}}.tar", 0.25, 3)
    keys = [{item.name for item in part.items} for part in (train_set, val)]
    assert (len(keys[0]), len(keys[1]), len(keys[0] & keys[1])) == (18, 6, 0)


@pytest.mark.parametrize("label", ["number", "name", "json"])
def test_labels_as_numbers_names_and_json(tmp_path: Path, label: str) -> None:
    tars(folder(tmp_path / "in"), tmp_path / "out", label=label)
    found = dataset.splits(tmp_path / "out")["train"]
    assert found.classes == (CLASSES if label == "name" else ("0", "1", "2"))
    assert list(found.labels) == [0] * 8 + [1] * 8 + [2] * 8


def test_splits_in_folders_of_their_own(tmp_path: Path) -> None:
    source = folder(tmp_path / "in")
    tars(source, tmp_path / "out" / "train", "x")
    tars(source, tmp_path / "out" / "validation", "y", each=24)
    assert {k: len(v) for k, v in dataset.splits(tmp_path / "out").items()} == {"train": 24, "val": 24}


def test_a_split_that_lacks_the_last_class_has_the_same_classes(tmp_path: Path) -> None:
    source = folder(tmp_path / "in")
    tars(source, tmp_path / "out")
    tars(source, tmp_path / "out", "val", each=8)
    for file in sorted((tmp_path / "out").glob("val-*"))[1:]:
        file.unlink()
    found = dataset.splits(tmp_path / "out")
    assert found["val"].classes == found["train"].classes == ("0", "1", "2")


HARD = ("--policy", "static", "--augment.kind", "rand", "--augment.erasing", 0.5, "--epochs", 3, "--optim.lr", 1e-3)


def test_training_from_shards_is_training_from_the_folder_also_when_cut(
    both: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the middle of an epoch, each remaining sample is seen once, in the order of the whole run."""
    seen: list[tuple[int, list[int]]] = []
    step, stop_at = Trainer.step, [99]

    def watched(self: Trainer, batch: Any, number: int, *more: Any) -> Any:
        if number == stop_at[0]:
            raise KeyboardInterrupt
        seen.append((number, batch.indices.tolist()))
        return step(self, batch, number, *more)

    monkeypatch.setattr(Trainer, "step", watched)
    assert train(both[0], tmp_path / "folder", *HARD) == 0
    whole = list(seen)
    assert [sorted(i for n, b in whole if n // 3 == e for i in b) for e in range(3)] == [list(range(24))] * 3
    seen.clear()
    stop_at[0] = 4
    assert train(both[1], tmp_path / "cut", *HARD, "--run.checkpoint-steps", 1) == 130
    stop_at[0] = 99
    assert train(both[1], tmp_path / "cut", *HARD, "--run.checkpoint-steps", 1, "--resume", "--workers", 1) == 0
    assert seen == whole
    assert_same_weights(weights(tmp_path / "folder"), weights(tmp_path / "cut"))
    mine, theirs = ([r for r in log(tmp_path / n) if r["kind"] == "validation"] for n in ("folder", "cut"))
    assert [r["top1"] for r in mine] == [r["top1"] for r in theirs]
    assert all(r["images"] == 12 for r in theirs)


def test_processes_share_shards_without_overlap(both: tuple[Path, Path]) -> None:
    """As train._epoch deals them out: rank::world of every global batch."""
    labelled = dataset.splits(both[1])["train"]
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    plan = [order[i : i + 8] for i in range(0, 24, 8)]
    source = Images(labelled, Preprocessing((32, 32)).evaluation())
    seen = [
        [int(i) for b in dataset.batches(source, [p[rank::2] for p in plan], workers) for i in b.indices]
        for rank, workers in ((0, 0), (1, 2))
    ]
    assert sorted(seen[0] + seen[1]) == list(range(24))


# -- what is wrong with shards --------------------------------------------------------------------------------------
def damaged(kind: str, place: Path) -> str:
    """Damage the second of five shards of five samples; returns what must be named."""
    file = place / "train-000001.tar"
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:9000])
        return str(file)
    if kind == "no tar":
        file.write_bytes(b"this is no archive" * 100)
        return str(file)
    if kind == "empty":
        file.write_bytes(b"")
        return str(file)
    samples = {"no image": ("00005.txt", b"hello"), "no label": ("00005.png", Path(file).read_bytes()[:0] + png())}
    name, content = samples[kind]
    with tarfile.open(file, "w") as tar:
        add(tar, name, content)
        if kind == "no image":
            add(tar, "00005.cls", b"1")
        add(tar, "00006.png", png())
        add(tar, "00006.cls", b"1")
    return f"{file}:00005"


def png() -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels(1)[0]).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("kind", ["cut", "no tar", "empty", "no image", "no label"])
def test_a_damaged_shard_is_named_or_left_out(both: tuple[Path, Path], tmp_path: Path, capsys: Any, kind: str) -> None:
    named = damaged(kind, both[1])
    words = ("--data", both[1], "--out", tmp_path / "out", *SMALL, "--policy", "static")
    message = refused(capsys, "train", *words)
    assert named in message
    assert "--allow-corrupt" in message
    assert not (tmp_path / "out").exists()
    assert train(both[1], tmp_path / "out", "--policy", "static", "--allow-corrupt") == 0
    assert named in capsys.readouterr().err.replace("\n", "")
    left = len(dataset.splits(both[1], allow_corrupt=True)["train"])
    assert left in {"cut": (20, 21, 22, 23), "no tar": (19,), "empty": (19,)}.get(kind, (20,))


def test_a_damaged_image_in_a_shard_is_named_or_left_out(both: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    file = both[1] / "train-000001.tar"
    image = dataset.splits(both[1])["train"].items[6].open().read()
    file.write_bytes(file.read_bytes().replace(image, b"\0" * len(image)))
    message = refused(capsys, "train", "--data", both[1], "--out", tmp_path / "out", *SMALL)
    assert f"{file}:00006" in message
    assert train(both[1], tmp_path / "out", "--policy", "static", "--allow-corrupt") == 0


def wrong(kind: str, place: Path) -> tuple[Any, str]:
    """Data that cannot be, and what the error must say."""
    if kind == "missing":
        return f"{place}/train-{{000000..000009}}.tar", "train-000005.tar"
    if kind == "falling":
        return f"{place}/train-{{3..1}}.tar", "rising"
    if kind == "compressed":
        (place / "x.tar.gz").write_bytes(b"")
        return place / "x.tar.gz", "unpack it"
    if kind == "names":
        (place / "classes.txt").write_text("a\nb\n")
        return place, "below 2"
    if kind == "other":
        (place / "more.tar").write_bytes((place / "val-000000.tar").read_bytes())
        return place, "more.tar"
    assert kind == "mixed"
    with tarfile.open(place / "train-000000.tar", "w") as tar:
        add(tar, "x.png", png())
        add(tar, "x.cls", b"dog")
    return place, "'dog'"


@pytest.mark.parametrize("kind", ["missing", "falling", "compressed", "names", "other", "mixed"])
def test_wrong_shards_are_refused(both: tuple[Path, Path], tmp_path: Path, capsys: Any, kind: str) -> None:
    where, named = wrong(kind, both[1])
    assert named in refused(capsys, "train", "--data", where, "--out", tmp_path / "out", *SMALL)
    assert not (tmp_path / "out").exists()


# -- mosaics --------------------------------------------------------------------------------------------------------
def mosaic(place: Path, split: str, x: Any, columns: int = 4) -> None:
    place.mkdir(exist_ok=True)
    for number, start in enumerate(range(0, len(x), 2 * columns)):
        part = x[start : start + 2 * columns]
        side = part.shape[1]
        sheet = part.reshape(-1, columns, side, side, 3).swapaxes(1, 2).reshape(-1, columns * side, 3)
        Image.fromarray(sheet).save(place / f"{split}_{number:02}.png")


def cifar(place: Path, **changes: Any) -> Path:
    mosaic(place, "train", pixels(24, 16))
    mosaic(place, "test", pixels(8, 16, seed=1))
    arrays = {"train_y": np.arange(24) % 3, "test_y": np.arange(8) % 3, "classes": np.array(CLASSES)} | changes
    np.savez(place / "labels.npz", **{k: v for k, v in arrays.items() if v is not None})
    return place


def test_mosaics_are_cut_into_their_tiles(tmp_path: Path) -> None:
    found = dataset.splits(cifar(tmp_path / "in"))
    assert {k: v.items.shape for k, v in found.items()} == {"train": (24, 16, 16, 3), "test": (8, 16, 16, 3)}  # type: ignore[attr-defined]
    assert np.array_equal(found["train"].items, pixels(24, 16))
    assert np.array_equal(found["test"].items, pixels(8, 16, seed=1))
    assert found["train"].classes == CLASSES
    assert train(tmp_path / "in", tmp_path / "out", "--policy", "static", "--augment.on", "device") == 0


def test_bad_mosaics_are_refused(tmp_path: Path) -> None:
    for name, changes, message in (
        ("count", {"train_y": np.zeros(23, int)}, "23 labels"),
        ("none", {"val_y": np.zeros(3, int)}, "no mosaic val_"),
        ("empty", {"train_y": np.zeros(0, int)}, "no 0 equal squares"),
    ):
        with pytest.raises(DataError, match=message):
            dataset.splits(cifar(tmp_path / name, **changes))
    place = cifar(tmp_path / "damaged")
    (place / "train_01.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"mosaic .*train_01.png"):
        dataset.splits(place)


def test_cifar100_as_it_is_shipped() -> None:
    found = dataset.splits(shared("data/cifar100"))
    assert {k: v.items.shape for k, v in found.items()} == {"train": (50000, 32, 32, 3), "test": (10000, 32, 32, 3)}  # type: ignore[attr-defined]
    assert (len(found["test"].classes), found["test"].classes[0]) == (100, "apple")
    assert np.bincount(found["test"].labels).tolist() == [100] * 100


# -- Hugging Face ---------------------------------------------------------------------------------------------------
def tables(source: Path, **columns: str) -> Any:
    datasets = pytest.importorskip("datasets")
    names = {"image": "image", "label": "label"} | columns
    features = datasets.Features({names["image"]: datasets.Image(), names["label"]: datasets.ClassLabel(names=CLASSES)})
    files = [(f, i) for i, name in enumerate(CLASSES) for f in sorted((source / name).iterdir())]
    cells = [{"bytes": f.read_bytes(), "path": None} for f, _ in files]
    return datasets.Dataset.from_dict({names["image"]: cells, names["label"]: [i for _, i in files]}, features=features)


@pytest.mark.parametrize("form", ["disk", "parquet"])
def test_a_hugging_face_set_holds_what_the_folder_holds(tmp_path: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    where, place = split_folder(tmp_path / "in"), tmp_path / "hf"
    parts = {"train": tables(where / "train"), "validation": tables(where / "val")}
    if form == "disk":
        datasets.DatasetDict(parts).save_to_disk(str(place))
    else:
        place.mkdir()
        for split, table in parts.items():
            table.to_parquet(str(place / f"{split}-00000-of-00001.parquet"))
    for mine, theirs in zip(
        dataset.for_training(where, 0.1, 0), dataset.for_training(f"hf:{place}", 0.1, 0), strict=True
    ):
        assert_same_pictures(mine, theirs)
        assert_same_pictures(mine.part([7, 2]), theirs.part([7, 2]))
    assert theirs.name(3) == f"hf:{place}:val[3]"
    words = ("--policy", "static", "--augment.kind", "crop")
    assert train(where, tmp_path / "folder", *words) == 0
    assert train(Path(f"hf:{place}"), tmp_path / "out", *words) == 0
    assert_same_weights(weights(tmp_path / "folder"), weights(tmp_path / "out"))


def test_columns_are_found_or_named(tmp_path: Path) -> None:
    source = folder(tmp_path / "in")
    tables(source, image="img", label="fine").save_to_disk(str(tmp_path / "one"))
    assert dataset.splits(f"hf:{tmp_path}/one")["all"].classes == CLASSES
    table = tables(source).add_column("name", [CLASSES[i // 8] for i in range(24)])
    table.save_to_disk(str(tmp_path / "two"))
    assert dataset.splits(f"hf:{tmp_path}/two?label=name")["all"].classes == CLASSES
    table.remove_columns("label").save_to_disk(str(tmp_path / "three"))
    for query, message in (("", "name it"), ("?label=nothing", "no column 'nothing'"), ("?class=x", "got class")):
        with pytest.raises(DataError, match=message):
            dataset.splits(f"hf:{tmp_path}/three{query}")


def test_bad_hugging_face_sets_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"no table")
    for name, message in (("nowhere", "downloads nothing"), ("empty", "save_to_disk"), ("bad.parquet", "Cannot read")):
        with pytest.raises(DataError, match=message):
            dataset.splits(f"hf:{tmp_path}/{name}")
    table = tables(folder(tmp_path / "in"))
    cells = table.cast_column("image", type(table.features["image"])(decode=False))
    holed = cells.map(lambda row, i: {"image": None if i == 3 else row["image"]}, with_indices=True)
    holed.save_to_disk(str(tmp_path / "holed"))
    found = dataset.splits(f"hf:{tmp_path}/holed")["all"]
    assert [found.name(i) for i in dataset.verify(found)] == [f"hf:{tmp_path}/holed[3]"]


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"adaptivit\[datasets\]"):
        dataset.splits(f"hf:{tmp_path}")
