"""Products, norms and the patch embedding against float64. What is not live, or not written yet, is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from adaptivit.backbones.timm_vit import TimmViT
from adaptivit.execution.triton import TritonExecutor
from adaptivit.kernels import linear, norm, norm_linear, patch_embed
from adaptivit.kernels.launch import KernelRows
from tests.support.interpreter import DEVICE, DTYPES, ON_GPU, here
from tests.support.kernels import (
    NAN_WARNINGS,
    TOLERANCE,
    assert_near,
    check_operation,
    count,
    double,
    dtypes,
    noise,
    poison,  # noqa: F401  (applies to this file)
)
from tests.support.models import randomise

pytestmark = [*NAN_WARNINGS, here]

# -- linear ---------------------------------------------------------------------------------------------------------
CLASSES = [(rows, width, adds) for rows in (512, 4096, 32768) for width in (128, 192) for adds in (False, True)]
TILES = sorted({*(linear.tile_for(*c) for c in CLASSES), linear.tile_for(512, 128, True, depth=1536)}, key=str)
PARTS = ("bias", "residual", "scale", "gelu")


def fitting(tile: linear.Tile) -> linear.Tile:
    """A tile for the interpreter: the same kind, but smaller."""
    return tile if ON_GPU else tile._replace(m=tile.m // 4, n=tile.n // 2, k=tile.k // 4)


def check_linear(
    dtype: torch.dtype, live: int | None, tile: linear.Tile, parts: tuple[str, ...] = PARTS, room: int = 70, n: int = 72
) -> None:
    x, w = noise(room, 40, dtype=dtype, live=live), noise(n, 40, seed=1, dtype=dtype) / 6
    given = {
        "bias": noise(n, seed=2, dtype=dtype),
        "residual": noise(room, n, seed=3, dtype=dtype, live=live),
        "scale": noise(n, seed=4, dtype=dtype),
    }
    chosen = [given[name] if name in parts else None for name in given]
    found = linear.linear(x, w, *chosen, count(live), "gelu" in parts, tile=tile)
    expected = linear.reference(*double(x, w, *chosen), count(live), "gelu" in parts)
    assert found.dtype == dtype
    stop = room if live is None else live
    assert_near(found[:stop], expected[:stop], TOLERANCE[dtype])


def test_all_kinds_of_tiles_are_known() -> None:
    assert {t.parts for t in TILES} == {1, 2}
    assert {t.residents for t in TILES} == {0, 1, 2, 3}


@dtypes
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_linear_with_every_tile(tile: linear.Tile, dtype: torch.dtype) -> None:
    for live in (None, 37) if dtype == torch.float32 else (0, 1):
        check_linear(dtype, live, fitting(tile))


@pytest.mark.parametrize("residents", [0, 1, 2])
def test_linear_of_any_width(residents: int) -> None:
    for n, parts in ((8, 1), (40, 2), (64, 1), (96, 2)):
        tile = linear.Tile(16, 32, 16, 4, 2, residents, parts)
        check_linear(torch.float32, 19, tile, ("bias", "residual"), room=33, n=n)


def test_linear_with_and_without() -> None:
    for chosen in range(16):
        parts = tuple(name for bit, name in enumerate(PARTS) if chosen >> bit & 1)
        check_linear(
            torch.float32, 37 if chosen % 2 else None, linear.Tile(64, 64, 64, 4, 2, 1, 1 + chosen % 3 % 2), parts
        )


@dtypes
def test_linear_chooses_a_tile(dtype: torch.dtype) -> None:
    """By the rows that are expected; any number of them is right."""
    for room, adds, expected in ((1, True, 1), (65, False, 65), (65, True, 5000), (65, False, 50000)):
        x, w = noise(room, 32, dtype=dtype), noise(48, 32, seed=1, dtype=dtype) / 6
        residual = noise(room, 48, seed=2, dtype=dtype) if adds else None
        found = linear.linear(x, w, residual=residual, expected=expected)
        assert_near(found, linear.reference(*double(x, w, None, residual)), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32])
def test_the_fast_gelu_is_the_exact_one_to_rounding(dtype: torch.dtype) -> None:
    """Every float16 in [-30, 30], and those of bfloat16 that are one."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.float16).to(dtype)
    every = every[every.abs() <= 30]
    every = torch.cat([every, every.new_zeros(-len(every) % 16)]).view(-1, 16).to(DEVICE)
    unit = torch.eye(16, dtype=dtype, device=DEVICE)
    found = linear.linear(every, unit, gelu=True, tile=linear.Tile(128, 16, 16, 4, 2, 0))
    exact = F.gelu(every.double())
    assert ((found.double() - exact).abs() <= 3e-5 + exact.abs() * torch.finfo(dtype).eps / 2 * 1.001).all()


# -- norm -----------------------------------------------------------------------------------------------------------
def scattered(x: Tensor, live: int, moves: bool) -> tuple[Tensor, Tensor | None]:
    """x with NaN in every row that is not live, and where the live ones are to be taken from."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5)).int().to(DEVICE)
    x[order[live:] if moves else slice(live, None)] = float("nan")
    order[live:] = torch.iinfo(torch.int32).max
    return x, order if moves else None


@dtypes
@pytest.mark.parametrize("width", [24, 32, 192])
def test_norm(width: int, dtype: torch.dtype) -> None:
    room, affine = 150, (1 + noise(width, seed=1, dtype=dtype), noise(width, seed=2, dtype=dtype))
    probe, shift = noise(width, seed=3, dtype=dtype), noise(1, seed=4, dtype=dtype)
    for live, moves, reads in (
        (None, True, ()),
        (97, False, (probe,)),
        (97, True, (probe, shift)),
        (0, True, (probe, shift)),
        (150, False, (probe, shift)),
    ):
        stop = room if live is None else live
        x, index = scattered(3 * noise(room, width, dtype=dtype) + 1, stop, moves)
        y, kept, element = norm.norm(KernelRows(x, index, count(live)), *affine, 1e-6, *reads)
        y64, kept64, element64 = norm.reference(*double(x, *affine), 1e-6, index, count(live), *double(*reads))
        assert_near(y[:stop], y64[:stop], TOLERANCE[dtype])
        assert torch.equal(kept[:stop], kept64[:stop].to(dtype))
        assert (element is None) == (not reads)
        if element is not None:
            assert element.dtype == torch.float32
            assert_near(element[:stop], element64[:stop], 1e-5)  # not rounded on the way
        assert moves or kept is x


# -- norm and product in one ------------------------------------------------------------------------------------------
@dtypes
@pytest.mark.parametrize("width", [32, 48, 192])
def test_norm_linear(width: int, dtype: torch.dtype) -> None:
    room, n = 40, 72
    affine = (1 + noise(width, seed=1, dtype=dtype), noise(width, seed=2, dtype=dtype))
    w, b = noise(n, width, seed=3, dtype=dtype) / width**0.5, noise(n, seed=4, dtype=dtype)
    for live, moves, bias, probe, gelu, tile in (
        (None, False, None, -1, False, 16),
        (29, True, b, 70, True, 16),
        (29, False, None, 0, True, 32),
        (1, True, None, 33, False, 32),
        (0, True, b, 0, True, 16),
    ):
        stop = room if live is None else live
        x, index = scattered(3 * noise(room, width, dtype=dtype) + 1, stop, moves)
        given = (KernelRows(x, index, count(live), room), *affine, 1e-6, w, bias, probe, gelu)
        out, kept, element, _ = norm_linear.norm_linear(*given, tile=norm_linear.Tile(tile, tile, 4))
        exact = (*double(x, *affine), 1e-6, *double(w, bias), index, count(live), probe, gelu)
        out64, kept64, element64 = norm_linear.reference(*exact)
        assert_near(out[:stop], out64[:stop], TOLERANCE[dtype])
        assert torch.equal(kept[:stop], kept64[:stop].to(dtype))
        assert (element64 is None) == (element is None)
        if element is not None and element64 is not None:
            assert_near(element[:stop], element64[:stop], TOLERANCE[dtype])


@dtypes
def test_norm_linear_chooses_a_tile(dtype: torch.dtype) -> None:
    x, affine = noise(19, 96, dtype=dtype), (noise(96, seed=1, dtype=dtype), noise(96, seed=2, dtype=dtype))
    w = noise(40, 96, seed=3, dtype=dtype) / 10
    for expected in (9, 40, 70):
        out, kept, *nothing = norm_linear.norm_linear(KernelRows(x, expected=expected), *affine, 1e-6, w, None)
        assert kept is x
        assert nothing == [None, None]
        assert_near(out, norm_linear.reference(*double(x, *affine), 1e-6, w.double())[0], TOLERANCE[dtype])


def test_few_rows_take_small_tiles() -> None:
    tiles = {rows: norm_linear.tile_for(rows, 1536, torch.bfloat16) for rows in (1, 50, 100, 161, 197)}
    assert [(t.m, t.n) for t in tiles.values()] == [(16, 32), (16, 64), (32, 64), (16, 64), (32, 64)]
    assert norm_linear.tile_for(161, 1152, torch.bfloat16).m == 32


def test_rows_are_held_in_two_parts() -> None:
    found = {width: norm_linear.split(width) for width in (24, 32, 40, 48, 192, 384, 768, 1024, 1280)}
    pairs = {32: (16, 16), 48: (32, 16), 192: (128, 64), 384: (256, 128), 768: (512, 256), 1024: (512, 512)}
    assert found == dict.fromkeys(found) | pairs


# -- patches --------------------------------------------------------------------------------------------------------
PREFIXES: dict[str, dict[str, Any]] = {
    "none": {"class_token": False, "global_pool": "avg"},
    "class": {},
    "class and registers": {"reg_tokens": 2},
    "registers without a position": {"reg_tokens": 2, "no_embed_class": True},
    "no bias": {"pre_norm": True},
}


@dtypes
@pytest.mark.parametrize(
    ("side", "size", "batch"), [(4, (12, 8), 3), (8, (16, 40), 3), (14, (42, 28), 2), (4, (132, 128), 2)]
)
def test_patch_embed(side: int, size: tuple[int, int], batch: int, dtype: torch.dtype) -> None:
    """timm's own embedding in float64 is the reference."""
    for kind in PREFIXES if size[0] < 100 else ("class",):
        vit = VisionTransformer(size, side, embed_dim=40, depth=1, num_heads=2, num_classes=3, **PREFIXES[kind]).eval()
        randomise(vit)
        vit, images = vit.to(DEVICE, dtype), noise(batch, 3, *size, seed=1, dtype=dtype)
        with torch.no_grad():
            found = TritonExecutor(TimmViT(vit)).embed(images)
            expected = TimmViT(vit.double()).embed(images.double())
        assert found.dtype == dtype
        assert_near(found, expected, TOLERANCE[dtype])


def test_oblong_patches() -> None:
    images, weight = noise(2, 3, 16, 24), noise(24, 3 * 4 * 8, seed=1)
    position, lead = noise(12, 24, seed=2), noise(0, 24)
    found = patch_embed.patch_embed(images, weight, None, position, lead, 4, 8)
    assert_near(found, patch_embed.reference(*double(images, weight, None, position, lead), (4, 8)), 3e-6)


def test_images_that_are_not_contiguous_go_timms_way() -> None:
    vit = VisionTransformer(16, 8, embed_dim=16, depth=1, num_heads=1).eval().to(DEVICE)
    images = noise(2, 16, 16, 3).permute(0, 3, 1, 2)
    with torch.no_grad():
        assert torch.equal(TritonExecutor(TimmViT(vit)).embed(images), TimmViT(vit).embed(images))


# -- what torch wants of an operation -------------------------------------------------------------------------------
def test_operations_declare_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    tile = (16, 16, 16, 4, 2, 1, 1)
    check_operation(
        linear._linear, noise(5, 16), noise(8, 16), noise(8), noise(5, 8), noise(8), count(4), True, 0, tile
    )
    check_operation(linear._linear, noise(5, 16), noise(8, 16), None, None, None, None, False, 24, tile)
    weight, probe = noise(16), noise(16, seed=1)
    index = torch.arange(5, dtype=torch.int32, device=DEVICE)
    check_operation(norm._norm, noise(5, 16), weight, weight, 1e-6, None, None, None, None)
    check_operation(norm._norm, noise(5, 16), weight, weight, 1e-6, index, count(5), probe, noise(1))
    given = (noise(5, 32), noise(32), noise(32), 1e-6, noise(8, 32), noise(8))
    ungated: tuple[Any, ...] = ([], None, 0.0, 0, None, None)
    check_operation(norm_linear._norm_linear, *given, None, None, -1, True, 24, (16, 32, 4), *ungated)
    check_operation(norm_linear._norm_linear, *given, index, count(5), 3, False, 0, (16, 32, 4), *ungated)
    gate = [weight[0], weight[1], noise(1, 5), noise(1, 5) > 0]
    gated = (gate, noise(1, 1), 0.9, 1, index, index)
    check_operation(norm_linear._norm_linear, *given, index, None, 3, False, 0, (16, 32, 4), *gated)
    check_operation(patch_embed.patch_embed, noise(1, 3, 8, 8), noise(16, 48), None, noise(4, 16), noise(1, 16), 4, 4)
