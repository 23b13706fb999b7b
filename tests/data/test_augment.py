"""Augmentation on the device: PIL's resize, torchvision's operations, draws that depend on the image alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.mixup import Mixup
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from adaptivit.backbones.preprocessing import Preprocessing
from adaptivit.data import arrays, dataset, gpu_augment, pixel_ops
from adaptivit.data.augment import training_transform
from adaptivit.data.augment_config import AugmentConfig
from adaptivit.data.dataset import Images, Labelled
from adaptivit.data.gpu_pipeline import OnDevice, evaluation_images, training_images
from adaptivit.errors import UserError
from adaptivit.training.run import Trainer
from tests.support.commands import assert_same_weights, refused, train, weights
from tests.support.data_sets import npz, pixels, split_folder
from tests.support.models import shared

CPU = torch.device("cpu")
PLAIN = Preprocessing((32, 32), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.25))


def labelled(count: int = 12, size: tuple[int, int] = (32, 32), seed: int = 0, grey: bool = False) -> Labelled:
    """Smooth pictures: noise would hide a wrong place behind a wrong value."""
    g = torch.Generator().manual_seed(seed)
    x = torch.nn.functional.interpolate(torch.rand(count, 3, 5, 5, generator=g), size=size, mode="bicubic")
    items: Any = (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    return Labelled("x", items[..., 0] if grey else items, [i % 3 for i in range(count)], ("a", "b", "c"))


def config(kind: str = "none", **given: Any) -> AugmentConfig:
    return AugmentConfig(kind=kind, **given)  # type: ignore[arg-type]


def batch(source: Any, indices: Any = range(12)) -> Tensor:
    return next(dataset.batches(source, [list(indices)])).images


def bytes_of(images: Tensor, preprocessing: Preprocessing = PLAIN) -> Tensor:
    """The 8-bit picture that was normalised."""
    mean, std = (torch.tensor(v)[:, None, None] for v in (preprocessing.mean, preprocessing.std))
    return ((images * std + mean) * 255).round().to(torch.uint8)


# -- PIL's resize ---------------------------------------------------------------------------------------------------
SHAPES = [
    ((32, 32), (224, 224), "bicubic", 0.9),
    ((40, 30), (24, 24), "bicubic", 0.9),
    ((64, 48), (96, 96), "bilinear", 0.875),
    ((50, 50), (32, 48), "bicubic", 1.0),  # too narrow for the centre: black on both sides
    ((300, 200), (64, 64), "bicubic", 0.9),
    ((32, 32), (32, 32), "bicubic", 0.9),  # taken as already cropped
    ((9, 31), (33, 33), "bilinear", 0.95),
]


@pytest.mark.parametrize(("source", "size", "kind", "share"), SHAPES)
@pytest.mark.parametrize("grey", [False, True])
def test_evaluation_is_what_pil_gives_bit_for_bit(source: Any, size: Any, kind: str, share: float, grey: bool) -> None:
    noise: Any = pixels(5, 300)[:, : source[0], : source[1]]
    some = Labelled("x", np.ascontiguousarray(noise[..., 0] if grey else noise), [0] * 5, ("a",))
    preprocessing = Preprocessing(size, crop_pct=share, interpolation=kind)
    there = batch(OnDevice(some, preprocessing, CPU), range(5))
    assert torch.equal(there, batch(Images(some, preprocessing.evaluation()), range(5)))
    assert torch.equal(batch(OnDevice(some, preprocessing, CPU), [3]), there[3:4]), "one image alone"


def test_evaluation_of_real_images_is_pils() -> None:
    file = shared("data/cifar100/test_00.webp")
    test = Labelled("x", arrays._tiles(arrays._sheet(file), 32, file)[::79], [0] * 64, ("a",))
    preprocessing = Preprocessing((224, 224))
    assert torch.equal(
        batch(OnDevice(test, preprocessing, CPU), range(64)),
        batch(Images(test, preprocessing.evaluation()), range(64)),
    )


@pytest.mark.parametrize(("source", "size"), [((32, 32), (48, 48)), ((60, 41), (32, 32)), ((20, 50), (32, 24))])
@pytest.mark.parametrize("kind", ["bicubic", "bilinear"])
@pytest.mark.parametrize("how", ["none", "flip", "pad", "crop"])
def test_training_is_a_crop_a_resize_and_a_mirror_of_pil(source: Any, size: Any, kind: str, how: str) -> None:
    some, preprocessing = labelled(size=source), Preprocessing(size, interpolation=kind)
    given = config(kind=how)
    there = batch(training_images(some, preprocessing, config(kind=how, on="device"), 3, CPU))
    draws = gpu_augment.draw(given, 3, 0, np.arange(12), source, size)
    mode = v2.InterpolationMode(kind)
    finish = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    edge = (source[0] // 8, source[1] // 8) if how == "pad" else (0, 0)
    for i in range(12):
        top, left, height, width = draws.box[i].tolist()
        top, left = top - edge[0], left - edge[1]
        image = some.image(i).crop((left, top, left + width, top + height))
        for shape in ((height, size[1]), size):  # across, then down, as older Pillows do it and 13 does it mostly
            image = F.resize(image, list(shape), interpolation=mode)
        image = F.horizontal_flip(image) if draws.mirror[i] else image
        assert torch.equal(there[i], F.normalize(finish(image), preprocessing.mean, preprocessing.std))
    assert draws.mirror.any() == (how != "none")
    assert (draws.box != draws.box[0]).any() == (how in ("pad", "crop"))


# -- torchvision's operations ---------------------------------------------------------------------------------------
FACTORS = (0.1, 0.73, 1.0, 1.27, 1.9)
COLOURS = {
    "brightness": F.adjust_brightness,
    "contrast": F.adjust_contrast,
    "colour": F.adjust_saturation,
    "sharpness": F.adjust_sharpness,
}


def some_bytes(count: int) -> Tensor:
    whole = torch.from_numpy(labelled(count, (24, 20)).items).permute(0, 3, 1, 2).contiguous()
    whole[0] = 77  # nothing to stretch or equalise
    whole[1:3, 1:] = whole[1:3, :1]  # grey
    return whole


def amounts(*values: float) -> Tensor:
    return torch.tensor([[v] + [0.0] * 5 for v in values])


@pytest.mark.parametrize("name", COLOURS)
def test_colours_are_torchvisions_each_image_with_its_own_factor(name: str) -> None:
    images = some_bytes(len(FACTORS))
    before = images.clone()
    there = getattr(pixel_ops, name)(images, amounts(*FACTORS))
    assert torch.equal(images, before), "the input stays"
    for i, factor in enumerate(FACTORS):
        gap = (there[i].int() - COLOURS[name](images[i], factor).int()).abs()
        assert gap.max() <= 1
        assert (gap > 0).double().mean() < 0.01, "other than by the rounding of a factor in float32"


@pytest.mark.parametrize("bits", range(4, 9))
def test_posterize_and_solarize_are_torchvisions(bits: int) -> None:
    images, mask = some_bytes(5), 256 - 2 ** (8 - bits)
    assert torch.equal(pixel_ops.posterize(images, amounts(*[mask] * 5)), F.posterize(images, bits))
    level = 255 * bits / 10
    assert torch.equal(pixel_ops.solarize(images, amounts(*[level] * 5)), F.solarize(images, level))


def test_autocontrast_and_equalize_are_torchvisions() -> None:
    images = some_bytes(6)
    for name in ("autocontrast", "equalize"):
        there = getattr(pixel_ops, name)(images, amounts(*[0] * 6))
        assert torch.equal(there, torch.stack([getattr(F, name)(x) for x in images]))
        assert torch.equal(there[0], images[0]), "a flat picture stays"


def reference(name: str, image: Tensor, magnitude: int, sign: int, fill: list[int]) -> Tensor:
    """torchvision's RandAugment, one operation on one picture [3, H, W]."""
    height, width = image.shape[1:]
    space = v2.RandAugment._AUGMENTATION_SPACE
    key = {"colour": "Color", "autocontrast": "AutoContrast"}.get(name) or name.title().replace("_", "")
    levels = space[key][0](31, height, width)
    level = 0.0 if levels is None else float(levels[magnitude]) * (sign if space[key][1] else 1)
    apply = v2.RandAugment()._apply_image_or_video_transform
    filled = {type(image): fill, torch.Tensor: fill}
    return apply(image, key, level, interpolation=v2.InterpolationMode.NEAREST, fill=filled)


@pytest.mark.parametrize("name", gpu_augment.rand_table(0, (1, 1)))
@pytest.mark.parametrize("magnitude", [3, 9, 30])
@pytest.mark.parametrize("sign", [1, -1])
def test_randaugment_is_torchvisions(name: str, magnitude: int, sign: int) -> None:
    images = some_bytes(4)
    code, both = gpu_augment.rand_table(magnitude, (24, 20))[name]
    given = torch.tensor(both[0 if sign > 0 else 1], dtype=torch.float32).expand(4, 6)
    if code == pixel_ops.AFFINE:
        there = pixel_ops.affine(images, given, torch.tensor(PLAIN.fill, dtype=torch.float32))
    else:
        there = images if code == pixel_ops.IDENTITY else pixel_ops.OPERATIONS[code](images, given)
    expected = torch.stack([reference(name, x, magnitude, sign, list(PLAIN.fill)) for x in images])
    gap = (there.int() - expected.int()).abs()
    if code == pixel_ops.AFFINE:  # a pixel at just half the way to the next may go to either
        assert (gap > 0).double().mean() < 0.01
    else:
        assert gap.max() <= 1
        assert (gap > 0).double().mean() < 0.01
    if magnitude > 3 and name not in ("identity", "solarize", "posterize", "autocontrast"):
        assert (there[1:] != images[1:]).any(), "something happens"


def test_a_batch_takes_every_image_through_its_own_operations() -> None:
    """Grouped by operation, slot after slot, it comes to the same as image by image."""
    some, given = labelled(40), config(kind="rand", rand_magnitude=9, color_jitter=0.4, on="device")
    draws = gpu_augment.draw(given, 5, 2, np.arange(40), (32, 32), (32, 32))
    assert set(draws.codes[:, 3:].flatten()) == set(range(10)), "every operation is drawn"
    source = training_images(some, PLAIN, given, 5, CPU)
    source.epoch = 2
    there = bytes_of(batch(source, range(40)))
    start = config(kind="crop", on="device")
    crop = training_images(some, PLAIN, start, 5, CPU)
    crop.epoch = 2
    images = bytes_of(batch(crop, range(40)))
    fill = torch.tensor(PLAIN.fill, dtype=torch.float32)
    for i in range(40):
        one = images[i : i + 1]
        for code, values in zip(draws.codes[i], torch.from_numpy(draws.amounts[i]), strict=True):
            if code == pixel_ops.AFFINE:
                one = pixel_ops.affine(one, values[None], fill)
            elif code != pixel_ops.IDENTITY:
                one = pixel_ops.OPERATIONS[int(code)](one, values[None])
        assert torch.equal(there[i], one[0]), i


# -- the draws ------------------------------------------------------------------------------------------------------
MANY = np.arange(20_000)


def test_the_random_numbers_are_spread_evenly_and_do_not_follow_each_other() -> None:
    u = gpu_augment.uniform(0, 0, MANY)
    assert (u >= 0).all()
    assert (u < 1).all()
    assert np.abs(u.mean(0) - 0.5).max() < 0.01
    assert np.abs(u.var(0) - 1 / 12).max() < 0.005
    together = np.corrcoef(np.concatenate([u[:-1], u[1:]], 1).T) - np.eye(2 * u.shape[1])
    assert np.abs(together).max() < 0.04, "columns and neighbours"
    for other in (gpu_augment.uniform(1, 0, MANY), gpu_augment.uniform(0, 1, MANY)):
        assert (other == u).mean() < 1e-3
        assert abs(np.corrcoef(other[:, 0], u[:, 0])[0, 1]) < 0.03
    assert np.array_equal(gpu_augment.uniform(0, 0, MANY[::-7]), u[::-7])


def test_crops_have_the_areas_and_ratios_asked_for() -> None:
    box = gpu_augment.draw(config(kind="crop", crop_scale=0.2), 0, 0, MANY, (64, 64), (32, 32)).box
    top, left, height, width = box.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 64).all()
    assert (left + width <= 64).all()
    share = height * width / 64**2
    assert 0.19 < share.min() < 0.22
    assert share.max() == 1
    torch.manual_seed(0)
    theirs = [v2.RandomResizedCrop(32, scale=(0.2, 1)).make_params([torch.empty(3, 64, 64)]) for _ in range(3000)]
    expected = np.mean([p["height"] * p["width"] / 64**2 for p in theirs])
    assert share.mean() == pytest.approx(expected, abs=0.015), "it tries again where a box does not fit"
    ratio = width / height
    assert 0.7 < ratio.min() < 0.78
    assert 1.28 < ratio.max() < 1.43


def test_a_crop_that_never_fits_is_the_middle_as_in_torchvision() -> None:
    box = gpu_augment.draw(config(kind="crop", crop_scale=1.0), 0, 0, np.arange(50), (10, 40), (32, 32)).box
    assert (box == [0, (40 - 13) // 2, 10, 13]).all()


def test_shifts_go_as_far_as_an_eighth_everywhere() -> None:
    box = gpu_augment.draw(config(kind="pad"), 0, 0, MANY, (32, 24), (32, 32)).box
    assert set(box[:, 0]) == set(range(9))
    assert set(box[:, 1]) == set(range(7))
    assert (box[:, 2:] == [32, 24]).all()


def test_erasing_takes_rectangles_of_the_right_size_as_often_as_asked() -> None:
    erase = gpu_augment.draw(config(erasing=0.3), 0, 0, MANY, (32, 32), (64, 64)).erase
    some = erase[erase[:, 2] > 0]
    assert len(some) / len(MANY) == pytest.approx(0.3, abs=0.02)
    share = some[:, 2] * some[:, 3] / 64**2
    assert 0.018 < share.min() < share.max() < 0.34
    assert (some[:, :2] + some[:, 2:] <= 64).all()
    given = config(kind="none", erasing=0.9, on="device")
    images, plain = labelled(), config(on="device")
    there, before = (batch(training_images(images, PLAIN, c, 0, CPU)) for c in (given, plain))
    erase = gpu_augment.draw(given, 0, 0, np.arange(12), (32, 32), (32, 32)).erase
    for i, (top, left, height, width) in enumerate(erase):
        before[i, :, top : top + height, left : left + width] = 0
    assert torch.equal(there, before)


def test_jitter_stays_in_its_range_and_comes_in_every_order() -> None:
    draws = gpu_augment.draw(config(color_jitter=0.4), 0, 0, MANY, (32, 32), (32, 32))
    assert 0.6 <= draws.amounts[..., 0].min() < 0.61
    assert 1.39 < draws.amounts[..., 0].max() <= 1.4
    assert len({tuple(c) for c in draws.codes}) == 6
    assert gpu_augment.draw(config(color_jitter=3.0), 0, 0, MANY, (32, 32), (32, 32)).amounts.min() >= 0


def test_one_flag_does_not_change_the_draws_of_another() -> None:
    one = gpu_augment.draw(config(kind="crop"), 0, 0, MANY, (32, 32), (32, 32))
    two = gpu_augment.draw(config(kind="rand", erasing=0.5, color_jitter=0.1), 0, 0, MANY, (32, 32), (32, 32))
    assert np.array_equal(one.box, two.box)
    assert np.array_equal(one.mirror, two.mirror)


# -- batches --------------------------------------------------------------------------------------------------------
ALL = config(kind="rand", erasing=0.5, color_jitter=0.3, on="device")


def by_index(order: Any, epoch: int = 3, seed: int = 7) -> dict[int, Tensor]:
    source = training_images(labelled(40), PLAIN, ALL, seed, CPU)
    source.epoch = epoch
    return {int(i): x for b in dataset.batches(source, order) for i, x in zip(b.indices, b.images, strict=True)}


def test_a_picture_depends_on_seed_epoch_and_index_alone() -> None:
    whole = by_index([list(range(40))])
    assert all(x.isfinite().all() for x in whole.values())
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    plan = [order[i : i + 8] for i in range(0, 40, 8)]
    shares = [by_index([b[rank::2] for b in plan]) for rank in (0, 1)]
    assert not set(shares[0]) & set(shares[1])
    single = by_index([[i] for i in order])  # more batches than are drawn at once
    for part in (
        by_index(plan),
        by_index(plan[3:]),
        single,
        by_index([[5]]),
        shares[0] | shares[1],
        by_index([order, [3]]),
    ):
        assert all(torch.equal(x, whole[i]) for i, x in part.items())
    assert set(shares[0]) | set(shares[1]) == set(whole)
    for other in (
        by_index([list(range(40))], epoch=4),
        by_index([list(range(40))], seed=8),
    ):
        assert sum(not torch.equal(other[i], whole[i]) for i in whole) > 36


def test_labels_and_indices_come_along() -> None:
    found = list(dataset.batches(training_images(labelled(), PLAIN, ALL, 7, CPU), [[4, 0, 11], [7]]))
    assert [b.indices.tolist() for b in found] == [[4, 0, 11], [7]]
    assert [b.labels.tolist() for b in found] == [[1, 0, 2], [1]]
    assert [b.unreadable for b in found] == [[], []]
    assert found[0].images.is_contiguous()


def test_drawing_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    by_index([[0, 1, 2]])
    assert torch.equal(torch.rand(3), expected)


class NoWait(TorchDispatchMode):
    """Operations whose result the host must know before it goes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal"), name
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a mask as index waits"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("given", [ALL, config(kind="pad", on="device"), None])
def test_nothing_waits_for_the_device(given: AugmentConfig | None) -> None:
    source = OnDevice(labelled(40), Preprocessing((48, 48)), CPU, given)
    with NoWait():
        assert len(list(dataset.batches(source, [list(range(40)), list(range(7))]))) == 2


@pytest.mark.parametrize("flags", [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixup_and_cutmix_do_not_wait_either(flags: tuple[float, float]) -> None:
    mixup = Mixup(*flags, label_smoothing=0.0, num_classes=3)
    found = next(dataset.batches(OnDevice(labelled(), PLAIN, CPU, ALL), [list(range(12))]))
    with NoWait():
        images, targets = mixup(found.images, found.labels)
    assert images.shape == (12, 3, 32, 32)
    assert targets.shape == (12, 3)


@pytest.mark.parametrize("grey", [False, True])
def test_one_small_picture(grey: bool) -> None:
    some = labelled(1, (3, 2), grey=grey)
    source = training_images(some, PLAIN, ALL, 7, CPU)
    for epoch in range(20):
        source.epoch = epoch
        images = batch(source, [0])
        assert images.shape == (1, 3, 32, 32)
        assert images.isfinite().all()


def test_memory_that_is_read_only_is_copied() -> None:
    some = labelled()
    some.items.flags.writeable = False  # type: ignore[attr-defined]
    assert batch(OnDevice(some, PLAIN, CPU)).shape == (12, 3, 32, 32)


# -- the command ----------------------------------------------------------------------------------------------------
def test_where_images_are_augmented(tmp_path: Path) -> None:
    some = labelled()
    assert isinstance(training_images(some, PLAIN, config(), 0, CPU), Images), "auto on a CPU"
    assert isinstance(evaluation_images(some, PLAIN, CPU), Images)
    lanczos = Preprocessing((32, 32), interpolation="lanczos")
    with pytest.raises(UserError, match="resized by lanczos"):
        training_images(some, lanczos, config(on="device"), 0, CPU)


def test_device_for_a_folder_is_refused(tmp_path: Path, capsys: Any) -> None:
    words = ("--data", split_folder(tmp_path / "in"), "--out", tmp_path / "out", "--backbone", "test_vit")
    message = refused(capsys, "train", *words, "--img-size", 32, "--batch-size", 8, "--augment.on", "device")
    assert "is not an array" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flag", "value"), [("--augment.crop-scale", 0), ("--augment.crop-scale", 1.5), ("--augment.color-jitter", -1)]
)
def test_a_bad_value_is_refused(tmp_path: Path, capsys: Any, flag: str, value: float) -> None:
    message = refused(capsys, "train", "--data", tmp_path, flag, value)
    assert flag[2:].replace("-", "_") in message


WORDS = ("--augment.on", "device", "--policy", "static", "--augment.erasing", 0.5, "--augment.color-jitter", 0.2)
WORDS += ("--val-split", 0.25, "--epochs", 2, "--optim.lr", 1e-3)


def test_an_interrupted_run_ends_in_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = npz(tmp_path / "x.npz")
    assert train(where, tmp_path / "whole", *WORDS) == 0
    step = Trainer.step

    def stops(self: Trainer, batch: Any, number: int, *more: Any) -> Any:
        if number == 3:
            raise KeyboardInterrupt
        return step(self, batch, number, *more)

    monkeypatch.setattr(Trainer, "step", stops)
    assert train(where, tmp_path / "cut", *WORDS, "--run.checkpoint-steps", 1) == 130, "as interrupted commands end"
    monkeypatch.setattr(Trainer, "step", step)
    assert train(where, tmp_path / "cut", *WORDS, "--run.checkpoint-steps", 1, "--resume") == 0
    assert_same_weights(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert train(where, tmp_path / "cpu", *WORDS[2:]) == 0
    gap = weights(tmp_path / "cpu")["head.weight"] - weights(tmp_path / "whole")["head.weight"]
    assert gap.abs().max() > 0, "the CPU's way draws other numbers"


@pytest.mark.parametrize("how", ["pad", "crop"])
def test_the_cpus_way_knows_the_same_flags(tmp_path: Path, how: str) -> None:
    given = config(kind=how, color_jitter=0.4, crop_scale=0.1)
    some, preprocessing = labelled(), Preprocessing((48, 48))
    first, again = (batch(Images(some, training_transform(preprocessing, given), 1)) for _ in range(2))
    assert torch.equal(first, again)
    plain = batch(Images(some, training_transform(preprocessing, config(kind=how)), 1))
    assert not torch.equal(first, plain)
    assert first.shape == (12, 3, 48, 48)


def test_the_cpus_shift_is_a_window_of_the_padded_image() -> None:
    some = labelled(40)
    found = batch(Images(some, training_transform(PLAIN, config(kind="pad")), 2), range(40))
    places = set()
    for i in range(40):
        padded = np.pad(some.items[i], ((4, 4), (4, 4), (0, 0)))
        windows = {(t, x): padded[t : t + 32, x : x + 32] for t in range(9) for x in range(9)}
        one = bytes_of(found[i : i + 1])[0].permute(1, 2, 0).numpy()
        hits = [k for k, w in windows.items() if np.array_equal(w, one) or np.array_equal(w[:, ::-1], one)]
        assert hits
        places.add(hits[0])
    assert len(places) > 20


def test_evaluate_says_the_same_for_arrays_and_files(tmp_path: Path) -> None:
    """The same pictures as an .npz and as a folder."""
    x = pixels(12, 40)
    np.savez(tmp_path / "x.npz", test_x=x, test_y=np.arange(12) % 3, classes=np.array(["a", "b", "c"]))
    for i, picture in enumerate(x):
        (tmp_path / "in" / "test" / "abc"[i % 3]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(tmp_path / "in" / "test" / "abc"[i % 3] / f"{i:02}.png")
    files = dataset.for_evaluation(tmp_path / "in", "auto")
    arrays = dataset.for_evaluation(tmp_path / "x.npz", "auto")
    order = [int(Path(p).stem) for p in files.items]
    there = batch(OnDevice(arrays, PLAIN, CPU), order)
    assert torch.equal(there, batch(Images(files, PLAIN.evaluation())))
