"""What captured passes ask of torch's allocator, so that they hold no more memory than they need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivit.execution import cuda_graph, triton
from adaptivit.layouts import RowSchedule
from tests.support.fused import (
    CONFIG,
    WARNINGS,
    _restored,  # noqa: F401  (applies to this file)
    images_of,
    make,
    run,
)
from tests.support.interpreter import here

pytestmark = WARNINGS


@here
@pytest.mark.parametrize("ratio", [2.0, 4.0])
@pytest.mark.parametrize("few", [-1, 25, 1000])
def test_qkv_and_hidden_layer_take_blocks_of_one_size(few: int, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the allocator gives the one what the other has left, by whichever kernel; 34 rows, 2 at the end."""
    sizes: dict[str, set[tuple[int, float]]] = {}

    def noting(name: str) -> Any:
        kernel = getattr(triton, name)

        def noted(*args: Any) -> Any:
            made = kernel(*args)
            out = made if isinstance(made, Tensor) else made[0]
            if out.shape[1] > CONFIG["embed_dim"]:
                sizes.setdefault(name, set()).add((out.shape[1], out.untyped_storage().nbytes() / len(out)))
            return made

        return noted

    for name in ("linear", "norm_linear"):
        monkeypatch.setattr(triton, name, noting(name))
    monkeypatch.setattr(triton, "FEW_ROWS", few)
    model, plan = make("aht", {"mlp_ratio": ratio}), RowSchedule(frozenset({1}), (34, 34, 20, 20))
    run(model, images_of(), "packed", True, plan=plan)
    widths = {96, int(32 * ratio)}
    many, one = {"linear"}, {"norm_linear"}
    kernels_run = many if few < 20 else many | one if few < 34 else one
    assert sizes.keys() == kernels_run
    assert {width for found in sizes.values() for width, _ in found} == widths
    assert {size for found in sizes.values() for _, size in found} == {max(widths) * 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mib", "held"), [(0.5, 0.5), (1, 1), (1.5, 10), (9.1875, 10), (10, 10), (11, 11)])
def test_room_for_images_is_no_more_than_the_allocator_needs(mib: float, held: float, dtype: torch.dtype) -> None:
    like, shape = (
        torch.zeros(1, dtype=dtype),
        (2, 3, int(mib * 2**20) // 6 // torch.zeros(1, dtype=dtype).element_size()),
    )
    found = cuda_graph._room(shape, like)
    assert (found.shape, found.dtype) == (shape, dtype)
    assert found.is_contiguous()
    assert not found.any()
    assert abs(found.untyped_storage().nbytes() / 2**20 - held) < 1e-4


@pytest.mark.parametrize(("size", "blocks"), [(5 * 2**20, 4), (5 * 2**20 - 1, 0)])
def test_blocks_are_set_apart_where_the_allocator_would_cut_larger_ones(size: int, blocks: int) -> None:
    found = cuda_graph._set_rows_apart(size, torch.zeros(1, dtype=torch.bfloat16))
    assert [t.numel() for t in found] == [size] * blocks + [2**20] * (blocks > 0)
    assert all(t.dtype == torch.bfloat16 for t in found)
