"""Data: folders and .npz files; a fault in them is one line, and nothing is written."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, features

from adaptivit.backbones.preprocessing import Preprocessing
from adaptivit.data import dataset, image_files
from adaptivit.data.augment import training_transform
from adaptivit.data.augment_config import AugmentConfig
from adaptivit.data.dataset import Images
from adaptivit.errors import DataError
from adaptivit.utils.console import left_out
from tests.support.commands import SMALL, refused, train
from tests.support.data_sets import CLASSES, folder, npz, pixels, split_folder

# -- what the proofs of training and of the commands share ----------------------------------------------------------


def test_greys_of_16_bits_are_not_white(tmp_path: Path) -> None:
    grey = pixels(1)[0, ..., 0]
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    with Image.open(tmp_path / "deep.png") as deep:
        assert deep.mode == "I;16"
        assert (np.asarray(image_files.rgb(deep)) == grey[..., None]).all()
    read = dataset.Labelled("", [tmp_path / "deep.png"], [0], ("a",)).image(0)
    assert (np.asarray(read) == grey[..., None]).all()


# -- reading --------------------------------------------------------------------------------------------------------
def test_photos_are_turned_upright(tmp_path: Path) -> None:
    """As the service does: a picture of a telephone has one answer. A faulty note changes nothing."""
    upright = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 4, 3), dtype=np.uint8))
    for number, transpose in (
        (3, Image.Transpose.ROTATE_180),
        (6, Image.Transpose.ROTATE_90),
        (8, Image.Transpose.ROTATE_270),
        (99, None),
    ):
        exif = Image.Exif()
        exif[0x0112] = number
        stored = upright if transpose is None else upright.transpose(transpose)
        stored.save(tmp_path / "photo.png", exif=exif)
        with Image.open(tmp_path / "photo.png") as photo:
            assert np.array_equal(np.asarray(image_files.rgb(photo)), np.asarray(upright)), number


def test_a_folder_with_splits_is_read_as_it_is(tmp_path: Path) -> None:
    split_folder(tmp_path)
    folder(tmp_path / "test", each=2, seed=2)
    train_set, val = dataset.for_training(tmp_path, 0.1, 0)
    assert (len(train_set), len(val), train_set.classes) == (24, 12, CLASSES)
    assert {Path(p).relative_to(tmp_path).parts[0] for p in train_set.items} == {"train"}
    assert {Path(p).relative_to(tmp_path).parts[0] for p in val.items} == {"val"}
    assert all(CLASSES[y] == Path(p).parent.name for p, y in zip(train_set.items, train_set.labels, strict=True))
    assert [len(dataset.for_evaluation(tmp_path, s)) for s in ("auto", "test", "val", "train")] == [6, 6, 12, 24]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_plain_folder_is_split_without_overlap(tmp_path: Path, seed: int) -> None:
    folder(tmp_path)
    train_set, val = dataset.for_training(tmp_path, 0.25, seed)
    assert (len(train_set), len(val)) == (18, 6)
    assert not set(train_set.items) & set(val.items)
    again = dataset.for_training(tmp_path, 0.25, seed)[1]
    assert again.items == val.items
    other = dataset.for_training(tmp_path, 0.25, seed + 1)[1]
    assert other.items != val.items


def test_an_npz_as_unpack_cifar100_makes_it(tmp_path: Path) -> None:
    path = npz(tmp_path / "x.npz")
    train_set, val = dataset.for_training(path, 0.25, 0)
    assert (len(train_set), len(val), train_set.classes) == (18, 6, CLASSES)
    whole = pixels(24)
    seen = [np.asarray(part.image(i)) for part in (train_set, val) for i in range(len(part))]
    order = [int(np.abs(whole.astype(int) - x).sum((1, 2, 3)).argmin()) for x in seen]
    assert sorted(order) == list(range(24)), "train and val are the training images, each once; no test image"
    assert all(np.array_equal(whole[i], x) for i, x in zip(order, seen, strict=True))
    test = dataset.for_evaluation(path, "auto")
    assert np.array_equal(np.asarray(test.image(2)), pixels(6, seed=1)[2])


def test_an_npz_with_grey_images_and_without_names(tmp_path: Path) -> None:
    path = npz(tmp_path / "x.npz", train_x=pixels(24)[..., 0], classes=None, test_x=None, test_y=None)
    found = dataset.splits(path)
    assert list(found) == ["train"]
    assert found["train"].classes == ("0", "1", "2")
    assert found["train"].image(0).mode == "RGB"


def test_spread_takes_images_evenly(tmp_path: Path) -> None:
    labelled = dataset.for_evaluation(folder(tmp_path), "auto")
    assert [labelled.items.index(p) for p in labelled.spread(6).items] == [0, 4, 8, 12, 16, 20]
    assert labelled.spread(99) is labelled


# -- what is wrong, by name -----------------------------------------------------------------------------------------
def broken(kind: str, root: Path) -> tuple[Path, str]:
    """A place with something wrong, and what the error must name."""
    root.mkdir()
    if kind == "missing":
        return root / "nowhere", "nowhere"
    if kind == "empty":
        return root, str(root)
    if kind == "flat":
        Image.fromarray(pixels(1)[0]).save(root / "x.png")
        return root, "class folders"
    if kind == "class without images":
        (folder(root) / "d").mkdir()
        (root / "d" / "notes.txt").write_text("no picture")
        return root, str(root / "d")
    if kind == "not an image":
        (folder(root) / "b" / "03.png").write_bytes(b"this is no picture")
        return root, str(root / "b" / "03.png")
    if kind == "truncated":
        file = folder(root) / "b" / "03.png"
        file.write_bytes(file.read_bytes()[:200])
        return root, str(file)
    if kind == "extension":
        (root / "data.csv").write_text("1,2")
        return root / "data.csv", "data.csv"
    if kind == "splits differ":
        folder(root / "train")
        folder(root / "val", ("a", "b", "x"))
        return root, "c, x"
    if kind == "only a test split":
        folder(root / "test")
        return root, "no training images"
    assert kind == "small"
    return folder(root, each=2), "fewer than one batch of 8; lower --batch-size"


FOLDERS = ("missing", "empty", "flat", "class without images", "not an image", "truncated", "extension")


@pytest.mark.parametrize("kind", [*FOLDERS, "splits differ", "only a test split", "small"])
def test_a_bad_folder_is_refused_before_anything_is_written(tmp_path: Path, capsys: Any, kind: str) -> None:
    where, named = broken(kind, tmp_path / "in")
    message = refused(capsys, "train", "--data", where, "--out", tmp_path / "out", *SMALL)
    assert named in message
    assert not (tmp_path / "out").exists()


class Boom:
    def __reduce__(self) -> Any:
        return (print, ("this ran",))


ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"train_x": pixels(24).astype(np.float32)}, "float32"),
    "channels": ({"train_x": pixels(24).transpose(0, 3, 1, 2)}, "(24, 3, 32, 32)"),
    "dimensions": ({"train_x": pixels(24)[:, 0, :, 0]}, "(24, 32)"),
    "a number": ({"train_x": np.uint8(5)}, "train_x"),
    "too few labels": ({"train_y": np.arange(3)}, "3 labels"),
    "no labels": ({"train_y": None}, "0 labels"),
    "negative label": ({"train_y": np.arange(24) - 1}, "got -1"),
    "float labels": ({"train_y": np.arange(24) / 2}, "float64"),
    "labels as columns": ({"train_y": np.zeros((24, 1), int)}, "(24, 1)"),
    "no images": ({"train_x": pixels(0), "train_y": np.zeros(0, int)}, "0 images"),
    "names too few": ({"classes": np.array(["a"])}, "below 1"),
    "names no list": ({"classes": np.array("a")}, "below 1"),
    "pickle": ({"classes": np.array([Boom(), None], dtype=object)}, "plain arrays"),
    "other keys": ({"train_x": None, "train_y": None, "test_x": None, "test_y": None, "z": np.ones(3)}, "train_x"),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_bad_npz_is_refused_before_anything_is_written(tmp_path: Path, capsys: Any, kind: str) -> None:
    changes, named = ARRAYS[kind]
    path = npz(tmp_path / "x.npz", **changes)
    message = refused(capsys, "train", "--data", path, "--out", tmp_path / "out", *SMALL)
    assert str(path) in message
    assert named in message
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numpy leaves a bad zip file open
@pytest.mark.parametrize("kind", ["empty", "text", "npy", "cut", "bytes flipped"])
def test_a_file_that_is_no_npz_is_refused(tmp_path: Path, capsys: Any, kind: str) -> None:
    path = tmp_path / "x.npz"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("no arrays here")
    elif kind == "npy":
        buffer = io.BytesIO()
        np.save(buffer, pixels(2))
        path.write_bytes(buffer.getvalue())
    elif kind == "cut":
        whole = npz(path).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    else:
        np.savez_compressed(path, train_x=np.zeros((24, 32, 32, 3), np.uint8), train_y=np.arange(24) % 3)
        with zipfile.ZipFile(path) as archive:
            start = archive.infolist()[0].header_offset + 60
        whole = bytearray(path.read_bytes())
        whole[start : start + 20] = b"\xff" * 20
        path.write_bytes(whole)
    assert str(path) in refused(capsys, "train", "--data", path, "--out", tmp_path / "out", *SMALL)
    assert not (tmp_path / "out").exists()


def test_corrupt_images_are_left_out_when_allowed(tmp_path: Path) -> None:
    where, _ = broken("not an image", tmp_path / "in")
    assert train(where, tmp_path / "out", "--allow-corrupt", "--policy", "static", "--val-split", 0.3) == 0
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


def test_an_unreadable_image_becomes_no_sample(tmp_path: Path) -> None:
    where, named = broken("truncated", tmp_path / "in")
    labelled = dataset.for_evaluation(where, "auto")
    assert [labelled.name(i) for i in dataset.verify(labelled)] == [named]
    batches = list(dataset.batches(Images(labelled, Preprocessing((32, 32)).evaluation()), dataset.in_order(24, 8)))
    assert [len(b.labels) for b in batches] == [8, 7, 8]
    assert [b.unreadable for b in batches] == [[], [11], []]


def test_no_split_of_that_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no split 'val'"):
        dataset.for_evaluation(folder(tmp_path), "val")


# -- no file vanishes -----------------------------------------------------------------------------------------------
def test_every_kind_of_image_counts_in_folders(tmp_path: Path) -> None:
    where = folder(tmp_path / "in", each=1)
    picture = Image.fromarray(pixels(1)[0])
    kinds = ["jp2", "tga", "pcx", "ico", "qoi"] + ["avif"] * features.check("avif")
    for kind in kinds:
        picture.save(where / "a" / f"z.{kind}")
    found = dataset.for_evaluation(where, "auto")
    assert {Path(p).suffix[1:] for p in found.items} == {"png", *kinds}
    assert (dataset.verify(found), found.left_out) == ([], ())
    assert all(found.image(i).size == image_files.open_image(p).size for i, p in enumerate(found.items))
    assert not image_files.SUFFIXES & {".eps", ".ps", ".h5", ".mpg"}, "what Pillow does not decode by itself"


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    split_folder(tmp_path)
    names = ("notes.txt", "train/list.csv", "train/a/clip.mp4", "val/b/01", "extra/c/x.png", "train/a/.hidden")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"?")
    train_set, val = dataset.for_training(tmp_path, 0.1, 0)
    beside = [f"{tmp_path / name}: beside the splits train, val" for name in ("extra", "notes.txt")]
    assert train_set.left_out == (
        *beside,
        f"{tmp_path / 'train/list.csv'}: beside the class folders",
        f"{tmp_path / 'train/a/clip.mp4'}: no image by its suffix",
    )
    assert val.left_out == (*beside, f"{tmp_path / 'val/b/01'}: no image by its suffix")


def test_training_names_what_it_leaves_out(tmp_path: Path, capsys: Any) -> None:
    """Files that are no images, one that is none by its header, one cut short: in training, and in validation."""
    where = split_folder(tmp_path / "in")
    (where / "train" / "a" / "notes.txt").write_text("no picture")
    (where / "train" / "b" / "00.png").write_bytes(b"no picture")
    for part in ("train", "val"):
        cut = where / part / "c" / "01.jpg"
        Image.fromarray(pixels(1)[0]).save(cut)
        cut.write_bytes(cut.read_bytes()[:-300])
    assert train(where, tmp_path / "out", "--allow-corrupt", "--policy", "static") == 0
    first, _, last = capsys.readouterr().err.partition("left out: 2 files")
    assert "png" not in first
    for name in ("train/a/notes.txt: no image by", "train/b/00.png: cannot be read", "left out: 4 files"):
        assert name in last
    for name in ("train/c/01.jpg: cannot be read", "val/c/01.jpg: cannot be read"):
        assert name in last.partition("left out: 4 files")[2]


def test_many_files_are_named_in_a_file(tmp_path: Path, capsys: Any) -> None:
    lines = [f"file {i}: no image" for i in range(12)]
    left_out(lines, tmp_path / "left_out.txt")
    shown = capsys.readouterr().err.splitlines()
    assert shown == [
        "left out: 12 files",
        *(f"  {x}" for x in lines[:10]),
        f"  and 2 more: {tmp_path / 'left_out.txt'}",
    ]
    assert (tmp_path / "left_out.txt").read_text().splitlines() == lines
    left_out(lines)
    place = Path(capsys.readouterr().err.rpartition(": ")[2].strip())
    assert place.read_text().splitlines() == lines
    left_out([])
    assert capsys.readouterr().err == ""


# -- randomness -----------------------------------------------------------------------------------------------------
def augmented(where: Path, seed: int, epoch: int, workers: int = 0, order: Any = None) -> dict[int, torch.Tensor]:
    config = AugmentConfig(kind="rand", erasing=0.5)
    images = Images(dataset.for_evaluation(where, "auto"), training_transform(Preprocessing((32, 32)), config), seed)
    images.epoch = epoch
    found = dataset.batches(images, order or dataset.in_order(24, 8), workers)
    return {int(i): x for b in found for i, x in zip(b.indices, b.images, strict=True)}


def test_a_sample_depends_on_seed_epoch_and_index_alone(tmp_path: Path) -> None:
    folder(tmp_path)
    torch.manual_seed(5)
    first = augmented(tmp_path, 0, 3)
    torch.manual_seed(6)
    shuffled = augmented(tmp_path, 0, 3, order=[[23, 1], [0, 2, 5]])
    assert all(torch.equal(x, first[i]) for i, x in shuffled.items())
    for workers in (1, 2):
        there = augmented(tmp_path, 0, 3, workers)
        assert all(torch.equal(there[i], first[i]) for i in first)
    for seed, epoch in ((1, 3), (0, 4)):
        other = augmented(tmp_path, seed, epoch)
        assert sum(not torch.equal(other[i], first[i]) for i in first) > 20


def test_drawing_a_sample_leaves_the_generator_alone(tmp_path: Path) -> None:
    config = AugmentConfig(kind="rand", erasing=0.5)
    images = Images(
        dataset.for_evaluation(folder(tmp_path), "auto"), training_transform(Preprocessing((32, 32)), config), 0
    )
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert images[0].image is not None
    assert torch.equal(torch.rand(3), expected)


def test_mix_spreads() -> None:
    seeds = {dataset.mix(s, e, i) for s in range(5) for e in range(5) for i in range(40)}
    assert len(seeds) == 1000
    assert all(0 <= s < 2**63 for s in seeds)
