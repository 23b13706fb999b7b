"""Norms without a pass of their own: moments and products by them, against float64. What is not live is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import test_kernels as others
import torch
import torch.nn.functional as F
from interpreted import here
from test_kernels import TILES, TOLERANCE, assert_near, count, double, dtypes, fitting, noise
from torch import Tensor

from adaptivit.kernels import launch, linear, norm_folded
from adaptivit.kernels.linear import Tile

pytestmark = others.pytestmark
_poison = others._poison

ADDING = [t for t in TILES if t in {linear.tile_for(r, w, True) for r in (512, 4096, 32768) for w in (128, 192)}]
SMALL = [Tile(16, 32, 16, 4, 2, 1), Tile(16, 32, 16, 4, 2, 0, 2)]
tiles = pytest.mark.parametrize("tile", SMALL, ids=["whole", "halves"])


def assert_each_near(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Relative to each value, all of which are positive."""
    assert found.shape == expected.shape
    assert found.isfinite().all()
    if found.numel():
        error = float(((found.double() - expected).abs() / expected).max())
        assert error <= tolerance, f"off by {error:.2e}"


def check_moments(
    dtype: torch.dtype, live: int | None, tile: Tile, n: int = 72, room: int = 70, mean: float = 0.0, parts: str = "bs"
) -> None:
    """They are of the rows as they are rounded and stored, which are those of `linear`."""
    seed = n + (live or 0)
    x, w = noise(room, 40, seed=seed, dtype=dtype, live=live), noise(n, 40, seed=seed + 1, dtype=dtype) / 6
    residual = noise(room, n, seed=seed + 2, dtype=dtype, live=live) + mean
    bias = noise(n, seed=seed + 3, dtype=dtype) if "b" in parts else None
    scale = noise(n, seed=seed + 4, dtype=dtype) if "s" in parts else None
    rows, stop = count(live), room if live is None else live
    out, moments = norm_folded.run_measured(x, w, bias, residual, scale, rows, tile)
    assert_near(
        out[:stop], linear.reference(*double(x, w, bias, residual, scale), rows)[:stop], TOLERANCE[dtype] * (1 + mean)
    )
    assert torch.equal(out[:stop], linear.run(x, w, bias, residual, scale, rows, False, tile)[:stop])
    assert moments.dtype == torch.float32
    assert moments.shape == (-(-n // tile.n), 2, room)
    expected = norm_folded.reference_moments(out.double(), tile.n, rows)[:, :, :stop]
    assert_near(moments[:, 0, :stop], expected[:, 0], 1e-6)
    assert_each_near(moments[:, 1, :stop], expected[:, 1])


@here
@dtypes
@pytest.mark.parametrize("tile", ADDING, ids=str)
def test_moments_with_every_tile(tile: Tile, dtype: torch.dtype) -> None:
    for live in (None, 0, 1, 37, 70):
        check_moments(dtype, live, fitting(tile))


@here
@tiles
@pytest.mark.parametrize("n", [8, 16, 24, 64, 72, 80, 96])
def test_moments_of_any_width(n: int, tile: Tile) -> None:
    """The last tile is whole, partly outside, or its second half is all outside."""
    for live, parts in ((None, ""), (19, "bs")):
        check_moments(torch.float32, live, tile, n, room=33, parts=parts)


@here
@dtypes
@tiles
@pytest.mark.parametrize("mean", [30.0, 300.0])
def test_moments_of_rows_with_a_large_mean(mean: float, tile: Tile, dtype: torch.dtype) -> None:
    """Their spread is not the difference of two large numbers."""
    check_moments(dtype, 19, tile, 80, room=33, mean=mean)


def test_reference_moments_are_those_of_the_row() -> None:
    x = torch.randn(5, 40, dtype=torch.float64) + 7
    whole = norm_folded.reference_moments(x, 40)
    assert torch.allclose(whole[0, 0], x.mean(1))
    assert torch.allclose(whole[0, 1], x.var(1, correction=0) * 40)
    pieces = norm_folded.reference_moments(x, 16, torch.tensor([3]))
    assert pieces.shape == (3, 2, 5)
    assert torch.allclose(pieces[2, 0, :3], x[:3, 32:].mean(1))
    assert torch.allclose(pieces[2, 1, :3], x[:3, 32:].var(1, correction=0) * 8)
    assert not pieces[:, :, 3:].any()


# -- the product behind the norm --------------------------------------------------------------------------------------
def layer(width: int, n: int, dtype: torch.dtype, bias: bool = True) -> list[Any]:
    """Gain, offset, weight and bias."""
    affine = [1 + noise(width, seed=1, dtype=dtype), noise(width, seed=2, dtype=dtype)]
    return [*affine, noise(n, width, seed=3, dtype=dtype) / width**0.5, noise(n, seed=4, dtype=dtype) if bias else None]


def normed(x: Tensor, given: list[Any], eps: float) -> Tensor:
    """LayerNorm and product as they are written."""
    return F.linear(F.layer_norm(x, x.shape[1:], *given[:2], eps), *given[2:])


def check_normed(
    dtype: torch.dtype,
    live: int | None,
    tile: Tile,
    width: int = 48,
    piece: int = 16,
    probe: int = -1,
    gelu: bool = True,
    mean: float = 1.0,
    tolerance: float = 1.0,
    bias: bool = True,
    eps: float = 1e-6,
) -> None:
    room, n, rows = 40, 72, count(live)
    stop = room if live is None else live
    x = 3 * noise(room, width, seed=width + stop, dtype=dtype, live=live) + mean
    given = layer(width, n, dtype, bias)
    moments = norm_folded.reference_moments(x.double(), piece, rows).float()
    moments[:, :, stop:] = float("nan")
    folded = norm_folded.fold(*given)
    assert [t.dtype for t in folded] == [dtype, torch.float32, torch.float32]
    out, seen = norm_folded.run_normed(x, moments, piece, eps, *folded, rows, probe, gelu, tile)
    expected = normed(x[:stop].double(), double(*given), eps)
    assert out.dtype == dtype
    assert_near(out[:stop], F.gelu(expected) if gelu else expected, tolerance * TOLERANCE[dtype])
    assert len(seen) == (room if probe >= 0 else 0)
    if probe >= 0:
        assert seen.dtype == torch.float32
        assert_near(seen[:stop], expected[:, probe], tolerance * TOLERANCE[dtype])
    told, shown = norm_folded.reference(
        x.double(), moments.double(), piece, eps, *double(*norm_folded.fold(*double(*given))), rows, probe, gelu
    )
    assert_near(told[:stop], F.gelu(expected) if gelu else expected, 1e-5)
    assert not told[stop:].any()
    assert (shown is None) == (probe < 0)
    if shown is not None:
        assert_near(shown[:stop], expected[:, probe], 1e-5)


@here
@dtypes
@tiles
@pytest.mark.parametrize("width", [16, 48, 80])
def test_normed(width: int, tile: Tile, dtype: torch.dtype) -> None:
    for live, probe, gelu, bias in (
        (None, -1, False, True),
        (29, 70, True, True),
        (29, 0, True, False),
        (1, 33, False, False),
        (0, 0, True, True),
        (40, 17, True, True),
    ):
        check_normed(dtype, live, tile, width, probe=probe, gelu=gelu, bias=bias)


@here
@dtypes
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_normed_with_every_tile(tile: Tile, dtype: torch.dtype) -> None:
    check_normed(dtype, 29, fitting(tile), probe=5)


@here
@pytest.mark.parametrize("piece", [16, 32, 64, 128])
def test_normed_by_moments_of_any_width(piece: int) -> None:
    """The last piece is as wide as the others, narrower, or the only one."""
    for width in (16, 80, 96):
        check_normed(torch.float32, 29, SMALL[1], width, piece)


@here
@pytest.mark.parametrize("probe", [0, 15, 16, 31, 32, 63, 64, 71])
def test_normed_sees_one_element(probe: int) -> None:
    for tile in SMALL:
        check_normed(torch.float32, 29, tile, probe=probe)


@here
@dtypes
@tiles
def test_normed_rows_with_a_large_mean(tile: Tile, dtype: torch.dtype) -> None:
    """Ten and a hundred times their spread: as exact as the product itself is then."""
    check_normed(dtype, 29, tile, 80, probe=3, mean=30.0, tolerance=10)
    if dtype == torch.float32:
        check_normed(dtype, 29, tile, 80, probe=3, mean=300.0, tolerance=100)


@here
def test_normed_adds_eps() -> None:
    check_normed(torch.float32, 29, SMALL[0], eps=0.5)


@here
@dtypes
def test_both_choose_their_tiles(dtype: torch.dtype) -> None:
    """As in a block: the rows of one product and their moments into the next."""
    for live, width, expected in ((1, 80, 100), (None, 128, 5000), (33, 208, 5000), (33, 128, 50000)):
        room, rows = 65, count(live)
        stop = room if live is None else live
        x, w = noise(room, 32, dtype=dtype, live=live), noise(width, 32, seed=1, dtype=dtype) / 6
        y, moments = norm_folded.measured(x, w, None, noise(room, width, seed=2, dtype=dtype), None, rows, expected)
        piece = norm_folded.piece(expected, width, dtype)
        assert len(moments) == -(-width // piece)
        given = layer(width, 48, dtype)
        rest: Any = (*norm_folded.fold(*given), rows, 7, True, expected)
        out, seen = norm_folded.normed(y, moments, piece, 1e-6, *rest)
        wanted = normed(y[:stop].double(), double(*given), 1e-6)
        assert_near(out[:stop], F.gelu(wanted), TOLERANCE[dtype])
        assert_near(seen[:stop], wanted[:, 7], TOLERANCE[dtype])  # type: ignore[index]
        assert norm_folded.normed(y, moments, piece, 1e-6, *rest[:-3], -1, True, expected)[1] is None


@here
@dtypes
def test_no_rows_at_all(dtype: torch.dtype) -> None:
    x, w = noise(0, 32, dtype=dtype), noise(64, 32, dtype=dtype)
    y, moments = norm_folded.measured(x, w, None, noise(0, 64, dtype=dtype), None, None, 5000)
    rest: Any = (*norm_folded.fold(*layer(64, 48, dtype)), None, 3, True, 5000)
    out, seen = norm_folded.normed(y, moments, norm_folded.piece(5000, 64, dtype), 1e-6, *rest)
    assert out.shape == (0, 48)
    assert seen is not None
    assert seen.shape == (0,)


@here
def test_shapes_are_known_beforehand() -> None:
    """To torch.compile, from what it knows of the inputs."""
    for room, width, dtype, expected in ((9, 80, torch.float32, 5000), (9, 384, torch.float16, 50000)):
        x, w = noise(room, 32, dtype=dtype), noise(width, 32, dtype=dtype)
        given = (x, w, None, noise(room, width, dtype=dtype), None, count(5), expected)
        torch.library.opcheck(norm_folded.measured, given, test_utils=("test_schema", "test_faketensor"))
        y, moments = norm_folded.measured(*given)
        piece = norm_folded.piece(expected, width, dtype)
        for probe in (-1, 3):
            known = (y, moments, piece, 1e-6, *norm_folded.fold(*layer(width, 48, dtype)), count(5), probe, True, 5000)
            for given_space in (known, (*known, 64)):
                torch.library.opcheck(norm_folded._normed, given_space, test_utils=("test_schema", "test_faketensor"))


def test_fold() -> None:
    """u is of the weights as they were rounded; c is not rounded at all."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        gain, offset, weight, bias = (t.cpu() for t in layer(40, 24, dtype))
        folded, sums, shift = norm_folded.fold(gain, offset, weight, bias)
        exact = weight.double() * gain.double()
        assert folded.dtype == dtype
        assert ((folded.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps).all()
        assert torch.allclose(sums.double(), folded.double().sum(1), rtol=1e-6, atol=1e-6)
        wanted = weight.double() @ offset.double()
        assert torch.allclose(shift.double(), wanted + bias.double(), rtol=1e-6, atol=1e-6)
        assert torch.allclose(norm_folded.fold(gain, offset, weight, None)[2].double(), wanted, rtol=1e-6, atol=1e-6)


def test_who_rounds_two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 on NVIDIA's GPUs, and nobody in the interpreter."""

    class Given:
        def __init__(self, dtype: torch.dtype, is_cuda: bool) -> None:
            self.dtype, self.is_cuda = dtype, is_cuda

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", None)
    kinds = [Given(d, cuda) for d in (torch.bfloat16, torch.float16, torch.float32) for cuda in (True, False)]
    assert [launch.packs(given) for given in kinds] == [True, *[False] * 5]  # type: ignore[arg-type]
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not launch.packs(kinds[0])  # type: ignore[arg-type]
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert not launch.packs(kinds[0])  # type: ignore[arg-type]
