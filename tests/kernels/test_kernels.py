"""The kernels of inference against their references in float64. Whatever is not live, or not written yet, is NaN."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from adaptivit.backbones.timm_vit import TimmViT
from adaptivit.execution.triton import TritonExecutor
from adaptivit.kernels import (
    attention,
    attention_scores,
    launch,
    linear,
    norm,
    norm_linear,
    pack_index,
    patch_embed,
    ragged_attention,
)
from tests.support.interpreter import DEVICE, DTYPES, ON_GPU, here, on_gpu
from tests.support.kernels import NAN_WARNINGS, TOLERANCE, _poison, assert_near, count, double, dtypes, noise, staying  # noqa: F401  (applies to this file)
from tests.support.models import randomise

pytestmark = NAN_WARNINGS

# -- linear ---------------------------------------------------------------------------------------------------------
CLASSES = [(rows, width, adds) for rows in (512, 4096, 32768) for width in (128, 192) for adds in (False, True)]
TILES = sorted({*(linear.tile_for(*c) for c in CLASSES), linear.tile_for(512, 128, True, depth=1536)}, key=str)


def fitting(tile: linear.Tile) -> linear.Tile:
    """A tile for the interpreter: the same kind, but smaller."""
    if ON_GPU:
        return tile
    return linear.Tile(tile.m // 4, tile.n // 2, tile.k // 4, tile.warps, tile.stages, tile.residents, tile.parts)


def check_linear(
    dtype: torch.dtype, live: int | None, tile: linear.Tile, parts: tuple[str, ...], room: int = 70, n: int = 72
) -> None:
    x, w = noise(room, 40, dtype=dtype, live=live), noise(n, 40, seed=1, dtype=dtype) / 6
    given = {
        "bias": noise(n, seed=2, dtype=dtype),
        "residual": noise(room, n, seed=3, dtype=dtype, live=live),
        "scale": noise(n, seed=4, dtype=dtype),
    }
    chosen = [given[name] if name in parts else None for name in given]
    rows = count(live)
    found = linear.run(x, w, *chosen, rows, "gelu" in parts, tile)
    expected = linear.reference(*double(x, w, *chosen), rows, "gelu" in parts)
    assert found.dtype == dtype
    stop = room if live is None else live
    assert_near(found[:stop], expected[:stop], TOLERANCE[dtype])


def test_all_kinds_of_tiles_are_known() -> None:
    assert {t.parts for t in TILES} == {1, 2}
    assert {t.residents for t in TILES} == {0, 1, 2, 3}


@here
@dtypes
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_linear_with_every_tile(tile: linear.Tile, dtype: torch.dtype) -> None:
    for live in (None, 0, 1, 37, 70):
        check_linear(dtype, live, fitting(tile), ("bias", "residual", "scale", "gelu"))


@here
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("residents", [0, 1, 2])
def test_linear_of_any_width(residents: int, parts: int) -> None:
    for n in (8, 40, 64, 96):
        tile = linear.Tile(16, 32, 16, 4, 2, residents, parts)
        check_linear(torch.float32, 19, tile, ("bias", "residual"), room=33, n=n)


@here
@pytest.mark.parametrize("chosen", range(16))
def test_linear_with_and_without(chosen: int) -> None:
    parts = tuple(name for bit, name in enumerate(("bias", "residual", "scale", "gelu")) if chosen >> bit & 1)
    for live, pieces in ((None, 1), (37, 2)):
        check_linear(torch.float32, live, linear.Tile(32, 32, 32, 4, 2, 1, pieces), parts)


@here
@dtypes
def test_linear_chooses_a_tile(dtype: torch.dtype) -> None:
    for room, adds in ((1, True), (65, False), (65, True)):
        x, w = noise(room, 32, dtype=dtype), noise(48, 32, seed=1, dtype=dtype) / 6
        residual = noise(room, 48, seed=2, dtype=dtype) if adds else None
        for expected in (room, *([5000, 50000] if room > 1 else [])):
            found = linear.linear(x, w, None, residual, None, None, False, expected)
            assert_near(found, linear.reference(*double(x, w, None, residual)), TOLERANCE[dtype])


@here
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32])
def test_the_fast_gelu_is_the_exact_one_to_rounding(dtype: torch.dtype) -> None:
    """Every float16 in [-30, 30], and those of bfloat16 that are one."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.float16).to(dtype)
    every = every[every.abs() <= 30]
    every = torch.cat([every, every.new_zeros(-len(every) % 16)]).view(-1, 16).to(DEVICE)
    unit = torch.eye(16, dtype=dtype, device=DEVICE)
    found = linear.run(every, unit, None, None, None, None, True, linear.Tile(128, 16, 16, 4, 2, 0))
    exact = F.gelu(every.double())
    assert ((found.double() - exact).abs() <= 3e-5 + exact.abs() * torch.finfo(dtype).eps / 2 * 1.001).all()


def scattered(x: Tensor, order: Tensor, live: int, moves: bool) -> tuple[Tensor, Tensor | None]:
    """x with NaN in every row that is not live, and where the live ones are to be taken from."""
    index = order.clone()
    x[order[live:] if moves else slice(live, None)] = float("nan")
    index[live:] = torch.iinfo(torch.int32).max
    return x, index if moves else None


# -- norm -----------------------------------------------------------------------------------------------------------
@here
@dtypes
@pytest.mark.parametrize("width", [24, 32, 48, 192])
def test_norm(width: int, dtype: torch.dtype) -> None:
    room, affine = 150, (1 + noise(width, seed=1, dtype=dtype), noise(width, seed=2, dtype=dtype))
    probe, shift = noise(width, seed=3, dtype=dtype), noise(1, seed=4, dtype=dtype)
    order = torch.randperm(room, generator=torch.Generator().manual_seed(5)).int().to(DEVICE)
    for live, moves, looks in (
        (None, False, ()),
        (None, True, ()),
        (97, False, (probe,)),
        (97, True, (probe, shift)),
        (1, True, (probe, shift)),
        (0, True, (probe, shift)),
        (150, False, (probe, shift)),
    ):
        stop = room if live is None else live
        x, index = scattered(3 * noise(room, width, dtype=dtype) + 1, order, stop, moves)
        y, kept, seen = norm.norm(x, *affine, 1e-6, index, count(live), *looks)
        y64, kept64, seen64 = norm.reference(*double(x, *affine), 1e-6, index, count(live), *double(*looks))
        assert_near(y[:stop], y64[:stop], TOLERANCE[dtype])
        assert torch.equal(kept[:stop], kept64[:stop].to(dtype))
        assert (seen is None) == (not looks)
        if seen is not None:
            assert seen.dtype == torch.float32
            assert_near(seen[:stop], seen64[:stop], 1e-5)  # not rounded on the way
        assert moves or kept is x


# -- norm and product in one ------------------------------------------------------------------------------------------
@here
@dtypes
@pytest.mark.parametrize("width", [32, 48, 192])
@pytest.mark.parametrize("tile", [norm_linear.Tile(16, 16, 4), norm_linear.Tile(32, 32, 4)], ids=str)
def test_norm_linear(tile: norm_linear.Tile, width: int, dtype: torch.dtype) -> None:
    room, n = 40, 72
    affine = (1 + noise(width, seed=1, dtype=dtype), noise(width, seed=2, dtype=dtype))
    w, b = noise(n, width, seed=3, dtype=dtype) / width**0.5, noise(n, seed=4, dtype=dtype)
    order = torch.randperm(room, generator=torch.Generator().manual_seed(5)).int().to(DEVICE)
    for live, moves, bias, probe, gelu in (
        (None, False, None, -1, False),
        (29, True, b, 70, True),
        (29, False, None, 0, True),
        (1, True, None, 33, False),
        (0, True, b, 0, True),
    ):
        stop = room if live is None else live
        x, index = scattered(3 * noise(room, width, dtype=dtype) + 1, order, stop, moves)
        given = launch.KernelRows(x, index, count(live), room)
        out, kept, seen, _ = norm_linear.norm_linear(given, *affine, 1e-6, w, bias, probe, gelu, tile=tile)
        out64, kept64, seen64 = norm_linear.reference(
            *double(x, *affine), 1e-6, *double(w, bias), index, count(live), probe, gelu
        )
        assert_near(out[:stop], out64[:stop], TOLERANCE[dtype])
        assert torch.equal(kept[:stop], kept64[:stop].to(dtype))
        assert (seen64 is None) == (seen is None)
        if seen is not None and seen64 is not None:
            assert_near(seen[:stop], seen64[:stop], TOLERANCE[dtype])


@here
@dtypes
@pytest.mark.parametrize("expected", [9, 40, 70])
def test_norm_linear_chooses_a_tile(expected: int, dtype: torch.dtype) -> None:
    """By the rows that are expected; any number of them is right."""
    x, affine = noise(19, 96, dtype=dtype), (noise(96, seed=1, dtype=dtype), noise(96, seed=2, dtype=dtype))
    w = noise(40, 96, seed=3, dtype=dtype) / 10
    given = launch.KernelRows(x, expected=expected)
    out, kept, seen, _ = norm_linear.norm_linear(given, *affine, 1e-6, w, None, gelu=True)
    assert kept is x
    assert seen is None
    assert_near(out, norm_linear.reference(*double(x, *affine), 1e-6, w.double(), gelu=True)[0], TOLERANCE[dtype])


def test_few_rows_take_small_tiles() -> None:
    tiles = {rows: norm_linear.tile_for(rows, 1536, torch.bfloat16) for rows in (1, 50, 100, 161, 197)}
    assert [(t.m, t.n) for t in tiles.values()] == [(16, 32), (16, 64), (32, 64), (16, 64), (32, 64)]
    assert norm_linear.tile_for(161, 1152, torch.bfloat16).m == 32


def test_rows_are_held_in_two_parts() -> None:
    found = {width: norm_linear.split(width) for width in (24, 32, 40, 48, 192, 384, 768, 1024, 1280)}
    pairs = {32: (16, 16), 48: (32, 16), 192: (128, 64), 384: (256, 128), 768: (512, 256), 1024: (512, 512)}
    assert found == dict.fromkeys(found) | pairs


# -- attention in images of any length -------------------------------------------------------------------------------
LENGTHS = {
    "edges": [5, 0, 33, 1, 64, 65],
    "one image": [31],
    "one token": [1],
    "one token each": [1, 1, 1],
    "nobody": [0, 0],
    "last is empty": [32, 0],
}
WEIGHTS = ("none", "bool", "zeros and ones", "sizes", "fractions")


def packed(lengths: list[int], heads: int, width: int, weights: str, dtype: torch.dtype) -> list[Any]:
    """q, k, v as views of one qkv, offsets and weights; behind the last image is nothing but NaN."""
    live = sum(lengths)
    qkv = noise(live + 9, 3, heads, width, seed=width, dtype=dtype, live=live)
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().to(DEVICE)
    luck = torch.rand(live + 9, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    there, weight = luck < 0.6, None
    if lengths[0] > 1 and weights != "fractions":
        there[: lengths[0]] = False  # the first image has no key at all
    if weights == "bool":
        weight = there
        weight[live:] = True
    elif weights != "none":
        sizes = {"zeros and ones": torch.ones_like(luck), "sizes": 1 + (20 * luck).floor(), "fractions": luck}
        weight = sizes[weights] * there
        weight[live:] = float("nan")
    return [*qkv.unbind(1), offsets, weight]


def check_attend(
    lengths: list[int], width: int, weights: str, dtype: torch.dtype, longest: int | None = None, heads: int = 2
) -> None:
    q, k, v, offsets, weight = packed(lengths, heads, width, weights, dtype)
    found = ragged_attention.attend(q, k, v, offsets, longest or max(1, *lengths), weight)
    expected = ragged_attention.reference(*double(q, k, v), offsets, weight)
    assert found.dtype == dtype
    live = sum(lengths)
    assert_near(found[:live], expected[:live], TOLERANCE[dtype])


@here
@dtypes
@pytest.mark.parametrize("width", [16, 24, 32, 64, 80])
def test_attend_with_any_head_width(width: int, dtype: torch.dtype) -> None:
    check_attend([5, 0, 33, 66], width, "none", dtype, heads=1)
    check_attend([5, 0, 33], width, "sizes", dtype)


@here
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_attend_in_images_of_any_length(lengths: list[int], weights: str) -> None:
    check_attend(lengths, 16, weights, torch.float32)


@here
@pytest.mark.parametrize("weights", WEIGHTS)
def test_attend_with_the_tile_of_long_images(weights: str) -> None:
    check_attend([130, 63, 0, 7], 16, weights, torch.float32, longest=257, heads=1)


@here
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("tile", [(32, 16, 4, 2), (32, 64, 4, 1), (16, 32, 4, 2), (32, 32, 4, 2)], ids=str)
def test_attend_with_any_tile(tile: tuple[int, ...], weights: str) -> None:
    """None, one, and on either side of 16 and of a whole tile; far from zero, too."""
    lengths = [32, 0, 1, 15, 16, 17, 31, 33, 48, 49]
    q, k, v, offsets, weight = packed(lengths, 2, 16, weights, torch.float32)
    live = sum(lengths)
    for times in (40.0, -40.0):  # 1 is what all other tests have
        given = launch.alike(times * q, k, v)
        found = ragged_attention.run(*given, offsets, 49, launch.log2_weight(weight), tile)
        expected = ragged_attention.reference(*double(times * q, k, v), offsets, weight)
        assert_near(found[:live], expected[:live], 1e-5 * max(1.0, abs(times) / 4))
    far = ragged_attention.run(*launch.alike(q, k + 1e4, v), offsets, 49, launch.log2_weight(weight), tile)
    assert far[:live].isfinite().all()


@on_gpu
@dtypes
@pytest.mark.parametrize("width", [32, 64, 80])
def test_attend_in_long_images(width: int, dtype: torch.dtype) -> None:
    for weights in WEIGHTS:
        check_attend([1025, 197, 0, 1025, 1, 640], width, weights, dtype, longest=1025, heads=3)


@here
@pytest.mark.parametrize("look", ["attend", "class_row", "received"])
@pytest.mark.parametrize("weights", ["bool", "sizes"])
def test_images_do_not_see_each_other(weights: str, look: str) -> None:
    q, k, v, offsets, weight = packed([9, 35, 3], 2, 16, weights, torch.float32)

    def answer(*qkvw: Any) -> Tensor:
        *rows, weight = qkvw
        if look == "attend":
            return ragged_attention.attend(*rows, offsets, 35, weight)
        return getattr(attention_scores, look)(*rows[:2], offsets, 35, weight)

    before = answer(q, k, v, weight)
    for image, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        others = torch.ones(len(q), dtype=torch.bool, device=DEVICE)
        others[start:stop] = False
        changed = [t.clone() for t in (q, k, v)]
        for t in changed:
            t[others] = float("nan") if image % 2 else 1e4
        other_weight = None if weight is None else torch.where(others, torch.ones_like(weight), weight)
        assert torch.equal(answer(*changed, other_weight)[start:stop], before[start:stop])


def test_weights_as_the_kernels_read_them() -> None:
    there, sizes, anything = torch.tensor([True, False]), torch.tensor([1.0, 0.0, 8.0]), noise(3)
    assert launch.log2_weight(None) is None
    assert launch.log2_weight(there) is there  # torch.compile knows no other ctx of it
    assert torch.equal(launch.log2_weight(sizes), torch.tensor([0.0, -float("inf"), 3.0]))  # type: ignore[arg-type]
    assert [launch.weight_kind(w) for w in (None, there, sizes)] == [0, 1, 2]
    assert launch.as_pointer(None, anything) is anything
    assert launch.as_pointer(sizes, anything) is sizes
    assert launch.as_pointer(there, anything).tolist() == [1, 0]
    assert launch.as_pointer(there, anything).dtype == torch.uint8


# -- evidence -------------------------------------------------------------------------------------------------------
def literal_evidence(q: Tensor, k: Tensor, offsets: Tensor, weight: Tensor | None, queries: str) -> Tensor:
    """[R] by the attention matrix itself, image by image."""
    out = torch.zeros(len(q), device=q.device)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if start < stop:
            one, two = (t[None, start:stop].transpose(1, 2) for t in (q, k))
            w = torch.ones(stop - start, device=q.device) if weight is None else weight[start:stop].float()
            a = attention.probabilities(one, two, w[None])[0].mean(0)
            out[start:stop] = a[0] if queries == "class" else a[w > 0].sum(0) / max(int((w > 0).sum()), 1)
    return out


def check_evidence(lengths: list[int], width: int, weights: str, dtype: torch.dtype, heads: int = 2) -> None:
    q, k, _, offsets, weight = packed(lengths, heads, width, weights, dtype)
    live = sum(lengths)
    for look, queries in ((attention_scores.class_row, "class"), (attention_scores.received, "all")):
        found = look(q, k, offsets, max(1, *lengths), weight)
        assert found.dtype == torch.float32
        assert_near(found[:live], literal_evidence(q, k, offsets, weight, queries)[:live], 1e-5)
        assert_near(found[:live], attention_scores.reference(*double(q, k), offsets, weight, queries)[:live], 1e-5)


@here
@dtypes
@pytest.mark.parametrize("width", [16, 24, 32, 64, 80])
def test_evidence_with_any_head_width(width: int, dtype: torch.dtype) -> None:
    check_evidence([5, 0, 33], width, "sizes", dtype)


@here
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_evidence_in_images_of_any_length(lengths: list[int], weights: str) -> None:
    check_evidence(lengths, 16, weights, torch.float32)


@on_gpu
@dtypes
@pytest.mark.parametrize("width", [32, 64, 80])
def test_evidence_in_long_images(width: int, dtype: torch.dtype) -> None:
    for weights in WEIGHTS:
        check_evidence([1025, 197, 0, 1, 640], width, weights, dtype, heads=3)


# -- order ----------------------------------------------------------------------------------------------------------
SIZES = {"few": (5, 7), "one": (1, 1), "many images": (33, 300), "many slots": (3, 4100)}


@here
@pytest.mark.parametrize("kind", ["nobody", "everybody", "some", "most"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_order(size: tuple[int, int], kind: str) -> None:
    stay = staying(kind, *size)
    first = torch.arange(stay.numel(), dtype=torch.int32, device=DEVICE)
    place, cells, offsets, index = pack_index.order(stay, first)
    live = int(stay.sum())
    assert torch.equal(cells[:live].long(), stay.flatten().nonzero()[:, 0])
    assert torch.equal(place[cells[:live].long()].long(), torch.arange(live, device=DEVICE))
    assert (place[~stay.flatten()] == -1).all()
    assert not cells[live:].any()
    assert torch.equal(offsets.diff().long(), stay.sum(1))
    assert int(offsets[0]) == 0
    assert torch.equal(index, cells)
    for found, expected in zip((place, cells, offsets, index), pack_index.reference(stay, first), strict=True):
        assert torch.equal(found, expected)
        assert found.dtype == torch.int32


@here
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_order_twice(size: tuple[int, int]) -> None:
    """Rows that are moved twice are where the second order says."""
    first = torch.arange(size[0] * size[1], dtype=torch.int32, device=DEVICE)
    stay, rows, place = torch.ones(size, dtype=torch.bool, device=DEVICE), first, first
    for seed in (1, 2):
        stay = stay & staying("most", *size, seed=seed)
        order = pack_index.order(stay, place)
        for found, expected in zip(order, pack_index.reference(stay, place), strict=True):
            assert torch.equal(found, expected)
        place, cells, offsets, index = order
        rows = rows[index.long()]
        assert torch.equal(rows[: offsets[-1]], cells[: offsets[-1]])


@here
@torch.inference_mode()
@pytest.mark.parametrize(("number", "size"), [(1, (1, 1)), (12, (3, 197)), (24, (7, 300)), (3, (0, 5))])
def test_masks_stacked(number: int, size: tuple[int, int]) -> None:
    masks = [
        staying("most", *size, seed=seed) if all(size) else torch.ones(size, device=DEVICE) > 0
        for seed in range(number)
    ]
    masks[-1] = masks[-1].T.contiguous().T  # not as it lies in memory
    given = [*masks, masks[0]]  # one of them twice
    assert torch.equal(pack_index.stacked(given), torch.stack(given))


@here
def test_constants_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once where kernels read them; not while something is traced, nor where a gradient may be wanted."""
    monkeypatch.setattr(pack_index, "_kept", {})
    x = noise(2, 3)
    with torch.inference_mode():
        one, zero = (
            pack_index.filled(x, (2, 3), value, dtype) for value, dtype in ((True, torch.bool), (0.0, x.dtype))
        )
        assert torch.equal(one, torch.ones(2, 3, dtype=torch.bool, device=DEVICE))
        assert torch.equal(zero, torch.zeros(2, 3, device=DEVICE))
        assert pack_index.filled(x, (2, 3), True, torch.bool) is one
        assert pack_index.filled(x, (3, 2), True, torch.bool).shape == (3, 2)
        assert pack_index.steps(x, 6, 1) is pack_index.steps(x, 6, 1)
        assert not one.is_inference()
        fake = torch.compile(lambda t: pack_index.filled(t, (4, 5), 2.0, torch.float32) + t, backend="eager")
        assert torch.equal(fake(torch.zeros(4, 5, device=DEVICE)), torch.full((4, 5), 2.0, device=DEVICE))
        assert (x.device, 4, 5, 2.0, torch.float32) not in pack_index._kept
    assert pack_index.filled(x, (2, 3), True, torch.bool) is not one


def test_the_sizes_take_both_branches() -> None:
    def counted(batch: int, slots: int) -> bool:
        return launch.power_of_two(slots) * launch.power_of_two(batch, 1) > 16384

    assert [counted(*size) for size in SIZES.values()] == [False, False, True, True]


# -- patches --------------------------------------------------------------------------------------------------------
PREFIXES: dict[str, dict[str, Any]] = {
    "none": {"class_token": False, "global_pool": "avg"},
    "class": {},
    "class and registers": {"reg_tokens": 2},
    "registers without a position": {"reg_tokens": 2, "no_embed_class": True},
    "no bias": {"pre_norm": True},
}


def check_patches(side: int, size: tuple[int, int], kind: str, dtype: torch.dtype, batch: int, width: int = 40) -> None:
    """timm's own embedding in float64 is the reference."""
    vit = VisionTransformer(size, side, embed_dim=width, depth=1, num_heads=2, num_classes=3, **PREFIXES[kind]).eval()
    randomise(vit)
    vit = vit.to(DEVICE, dtype)
    images = noise(batch, 3, *size, seed=1, dtype=dtype)
    with torch.no_grad():
        found = TritonExecutor(TimmViT(vit)).embed(images)
        expected = TimmViT(vit.double()).embed(images.double())
    assert found.dtype == dtype
    assert_near(found, expected, TOLERANCE[dtype])


@here
@dtypes
@pytest.mark.parametrize(("side", "size"), [(4, (12, 8)), (8, (16, 40)), (14, (42, 28))])
def test_patches(side: int, size: tuple[int, int], dtype: torch.dtype) -> None:
    for kind in PREFIXES:
        check_patches(side, size, kind, dtype, 3)


@here
def test_patches_of_a_large_batch() -> None:
    check_patches(4, (132, 128), "class", torch.float32, 8, 24)


@here
def test_patches_of_oblong_form() -> None:
    images, weight = noise(2, 3, 16, 24), noise(24, 3 * 4 * 8, seed=1)
    position, lead = noise(12, 24, seed=2), noise(0, 24)
    found = patch_embed.patches(images, weight, None, position, lead, 4, 8)
    assert_near(found, patch_embed.reference(*double(images, weight, None, position, lead), (4, 8)), 3e-6)


@here
def test_images_that_are_not_contiguous_go_timms_way() -> None:
    vit = VisionTransformer(16, 8, embed_dim=16, depth=1, num_heads=1).eval().to(DEVICE)
    images = noise(2, 16, 16, 3).permute(0, 3, 1, 2)
    with torch.no_grad():
        assert torch.equal(TritonExecutor(TimmViT(vit)).embed(images), TimmViT(vit).embed(images))


# -- what torch wants of an operation -------------------------------------------------------------------------------
@here
def test_operations_say_what_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the check compares whole answers; what is not written is not NaN then
    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    check(linear.linear, (noise(5, 16), noise(8, 16), noise(8), noise(5, 8), noise(8), None, True, 5))
    check(linear.linear, (noise(5, 16), noise(8, 16), None, None, None, None, False, 5, 24))
    weight, probe = noise(16), noise(16, seed=1)
    index = torch.arange(5, dtype=torch.int32, device=DEVICE)
    check(norm._norm, (noise(5, 16), weight, weight, 1e-6, None, None, None, None))
    check(norm._norm, (noise(5, 16), weight, weight, 1e-6, index, count(5), probe, noise(1)))
    wide, affine = noise(5, 32), (noise(32), noise(32), 1e-6, noise(8, 32), noise(8))
    ungated: tuple[Any, ...] = ([], None, 0.0, 0, None, None)
    check(norm_linear._norm_linear, (wide, *affine, None, None, -1, True, 24, (16, 32, 4), *ungated))
    check(norm_linear._norm_linear, (wide, *affine, index, count(5), 3, False, 0, (16, 32, 4), *ungated))
    for weights in ("none", "bool", "sizes"):
        q, k, v, offsets, given = packed([3, 2], 1, 16, weights, torch.float32)
        rows, seen = [t[:5] for t in (q, k, v)], launch.log2_weight(None if given is None else given[:5])
        check(ragged_attention._attend, (*rows, offsets, 3, seen, 3))
        for op in (attention_scores._class_row, attention_scores._received):
            check(op, (*rows[:2], offsets, 3, seen))
    check(pack_index._order, (staying("some", 2, 3), torch.arange(6, dtype=torch.int32, device=DEVICE), None))
    images, kernel = noise(1, 3, 8, 8), noise(16, 48)
    check(patch_embed.patches, (images, kernel, None, noise(4, 16), noise(1, 16), 4, 4))


@here
def test_queries_and_keys_that_are_no_views_of_qkv() -> None:
    """As in models that norm q and k: other strides than v's, and under autocast another dtype."""
    q, k, v = noise(9, 3, 2, 16).unbind(1)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    for one, two in ((q.contiguous(), k.contiguous()), (q.contiguous(), k), (q.double(), k)):
        assert_near(
            ragged_attention.attend(one, two, v, offsets, 5),
            ragged_attention.reference(*double(q, k, v), offsets),
            3e-6,
        )
        for queries, look in (("class", attention_scores.class_row), ("all", attention_scores.received)):
            want = attention_scores.reference(*double(q, k), offsets, None, queries)
            assert_near(look(one, two, offsets, 5), want, 3e-6)
