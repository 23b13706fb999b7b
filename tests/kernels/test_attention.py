"""Attention and received attention in packed batches against float64. What is not live is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivit.kernels import attention, attention_scores, launch, ragged_attention, scores_and_keys
from tests.support.interpreter import DEVICE, here, on_gpu
from tests.support.kernels import (
    NAN_WARNINGS,
    TOLERANCE,
    assert_near,
    check_operation,
    double,
    dtypes,
    noise,
    poison,  # noqa: F401  (applies to this file)
)

pytestmark = [*NAN_WARNINGS, here]

LENGTHS = {
    "edges": [5, 0, 33, 1, 64, 65],
    "one image": [31],
    "one token": [1],
    "one token each": [1, 1, 1],
    "none": [0, 0],
    "last is empty": [32, 0],
}
WEIGHTS = ("none", "bool", "zeros and ones", "sizes", "fractions")
lengths_ = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


def packed(lengths: list[int], heads: int, width: int, weights: str, dtype: torch.dtype) -> list[Any]:
    """q, k, v as views of one qkv, offsets and weights; behind the last image is nothing but NaN."""
    live = sum(lengths)
    qkv = noise(live + 9, 3, heads, width, seed=width, dtype=dtype, live=live)
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().to(DEVICE)
    luck = torch.rand(live + 9, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    present, weight = luck < 0.6, None
    if lengths[0] > 1 and weights != "fractions":
        present[: lengths[0]] = False  # the first image has no key at all
    if weights == "bool":
        weight = present
        weight[live:] = True
    elif weights != "none":
        sizes = {"zeros and ones": torch.ones_like(luck), "sizes": 1 + (20 * luck).floor(), "fractions": luck}
        weight = sizes[weights] * present
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


@dtypes
@pytest.mark.parametrize("width", [16, 24, 64, 80])
def test_attend_with_any_head_width(width: int, dtype: torch.dtype) -> None:
    check_attend([5, 0, 33, 66], width, "none", dtype, heads=1)
    check_attend([5, 0, 33], width, "sizes", dtype)


@lengths_
def test_attend_in_images_of_any_length(lengths: list[int]) -> None:
    for weights in WEIGHTS:
        check_attend(lengths, 16, weights, torch.float32, heads=1)


@pytest.mark.parametrize("tile", [(32, 16, 4, 2), (32, 64, 4, 1), (16, 32, 4, 2)], ids=str)
def test_attend_with_any_tile(tile: tuple[int, int, int, int]) -> None:
    """None, one, and on either side of 16 and of a whole tile; far from zero, too."""
    lengths = [32, 0, 1, 15, 16, 17, 33, 48, 49]
    live, shape = sum(lengths), ragged_attention.Tile(*tile)
    for weights, scales in (("none", (1.0, 40.0)), ("bool", (-40.0,)), ("sizes", (1.0, -40.0)), ("fractions", (40.0,))):
        q, k, v, offsets, weight = packed(lengths, 1, 16, weights, torch.float32)
        for times in scales:
            found = ragged_attention.attend(times * q, k, v, offsets, 49, weight, tile=shape)
            expected = ragged_attention.reference(*double(times * q, k, v), offsets, weight)
            assert_near(found[:live], expected[:live], 1e-5 * max(1.0, abs(times) / 4))
        far = ragged_attention.attend(q, k + 1e4, v, offsets, 49, weight, tile=shape)
        assert far[:live].isfinite().all()


@on_gpu
@dtypes
@pytest.mark.parametrize("width", [32, 64, 80])
def test_attend_in_long_images(width: int, dtype: torch.dtype) -> None:
    for weights in WEIGHTS:
        check_attend([1025, 197, 0, 1025, 1, 640], width, weights, dtype, longest=1025, heads=3)


RECEIVED = {"class": scores_and_keys.class_row, "all": attention_scores.received}
REFERENCES = {"class": scores_and_keys.class_row_reference, "all": attention_scores.reference}


@pytest.mark.parametrize("what", ["attend", *RECEIVED])
@pytest.mark.parametrize("weights", ["bool", "sizes"])
def test_images_do_not_attend_to_each_other(weights: str, what: str) -> None:
    q, k, v, offsets, weight = packed([9, 35, 3], 2, 16, weights, torch.float32)

    def run(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        if what == "attend":
            return ragged_attention.attend(q, k, v, offsets, 35, weight)
        return RECEIVED[what](q, k, offsets, 35, weight)

    before = run(q, k, v, weight)
    for image, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        others = torch.ones(len(q), dtype=torch.bool, device=DEVICE)
        others[start:stop] = False
        changed = [t.clone() for t in (q, k, v)]
        for t in changed:
            t[others] = float("nan") if image % 2 else 1e4
        other_weight = torch.where(others, torch.ones_like(weight), weight)
        assert torch.equal(run(*changed, other_weight)[start:stop], before[start:stop])


def test_weights_as_the_kernels_read_them() -> None:
    present, sizes = torch.tensor([True, False]), torch.tensor([1.0, 0.0, 8.0])
    assert launch.log2_weight(None) is None
    assert launch.log2_weight(present) is present  # torch.compile knows no other view of it
    assert torch.equal(launch.log2_weight(sizes), torch.tensor([0.0, -float("inf"), 3.0]))  # type: ignore[arg-type]
    assert [launch.weight_kind(w) for w in (None, present, sizes)] == [0, 1, 2]
    none, plain, flags = launch.pointers(None, sizes, present)
    assert none is None
    assert plain is sizes
    assert flags is not None
    assert (flags.tolist(), flags.dtype) == ([1, 0], torch.uint8)


# -- received attention ---------------------------------------------------------------------------------------------
def literal(q: Tensor, k: Tensor, offsets: Tensor, weight: Tensor | None, queries: str) -> Tensor:
    """[R] by the attention matrix itself, image by image."""
    out = torch.zeros(len(q), device=q.device)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if start < stop:
            one, two = (t[None, start:stop].transpose(1, 2) for t in (q, k))
            w = torch.ones(stop - start, device=q.device) if weight is None else weight[start:stop].float()
            a = attention.probabilities(one, two, w[None])[0].mean(0)
            out[start:stop] = a[0] if queries == "class" else a[w > 0].sum(0) / max(int((w > 0).sum()), 1)
    return out


def check_received(lengths: list[int], width: int, weights: str, dtype: torch.dtype, heads: int = 2) -> None:
    q, k, _, offsets, weight = packed(lengths, heads, width, weights, dtype)
    live = sum(lengths)
    for queries, run in RECEIVED.items():
        found = run(q, k, offsets, max(1, *lengths), weight)
        assert found.dtype == torch.float32
        assert_near(found[:live], literal(q, k, offsets, weight, queries)[:live], 1e-5)
        assert_near(found[:live], REFERENCES[queries](*double(q, k), offsets, weight)[:live], 1e-5)


@dtypes
@pytest.mark.parametrize("width", [16, 24, 64, 80])
def test_received_with_any_head_width(width: int, dtype: torch.dtype) -> None:
    check_received([5, 0, 33], width, "sizes", dtype)


@lengths_
def test_received_in_images_of_any_length(lengths: list[int]) -> None:
    for weights in WEIGHTS:
        check_received(lengths, 16, weights, torch.float32, heads=1)


@on_gpu
@dtypes
def test_received_in_long_images(dtype: torch.dtype) -> None:
    for weights in WEIGHTS:
        check_received([1025, 197, 0, 1, 640], 64, weights, dtype, heads=3)


@pytest.mark.parametrize("double_q", [False, True])
def test_queries_and_keys_that_are_no_views_of_qkv(double_q: bool) -> None:
    """As in models that norm q and k: other strides than v's, and under autocast another dtype."""
    q, k, v = noise(9, 3, 2, 16).unbind(1)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    one, two = (q.double(), k) if double_q else (q.contiguous(), k.contiguous())
    found = ragged_attention.attend(one, two, v, offsets, 5)
    assert_near(found, ragged_attention.reference(*double(q, k, v), offsets), 3e-6)
    for queries, run in RECEIVED.items():
        assert_near(run(one, two, offsets, 5), REFERENCES[queries](*double(q, k), offsets, None), 3e-6)


def test_operations_declare_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for weights in ("none", "bool", "sizes"):
        q, k, v, offsets, given = packed([3, 2], 1, 16, weights, torch.float32)
        (q, k, v), weight = (t[:5] for t in (q, k, v)), launch.log2_weight(None if given is None else given[:5])
        check_operation(ragged_attention._attend, q, k, v, offsets, 3, weight, (16, 16, 4, 1))
        check_operation(attention_scores._received, q, k, offsets, 3, weight)
        cells = torch.arange(5, dtype=torch.int32, device=DEVICE)
        for one, whose in ((q, None), (None, cells), (q, cells)):
            check_operation(scores_and_keys._scores_and_keys, one, k, whose, offsets, 3, weight, 4)
