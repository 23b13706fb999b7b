"""The kernels compile for a GPU that is not here (sm_90), and as many programs fit on a multiprocessor as are meant to.

Operations launch their kernels as on a GPU, but a launch only compiles: the interpreter runs what Triton's compiler
might refuse. Tensors are as large as in a pass of DeiT-S, but no memory is written.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivit.kernels import (
    attention_scores,
    bipartite_match,
    constants,
    launch,
    linear,
    merge,
    merge_assign,
    nearest_token,
    norm,
    norm_linear,
    pack_index,
    patch_embed,
    ragged_attention,
    scores_and_keys,
    topk,
    unskip,
    weighted_attention,
)
from adaptivit.kernels.launch import KernelRows
from adaptivit.kernels.merge_score import MergeScore
from adaptivit.kernels.threshold_gate import ThresholdGate

pytestmark = pytest.mark.skipif(launch.triton is None, reason="needs Triton")
compiles = pytest.mark.skipif(launch.INTERPRETED, reason="runs in a process of its own")
SHARED, RESERVED = 228 * 1024, 1024  # bytes of a multiprocessor, and of each program for itself
BF16, F32 = torch.bfloat16, torch.float32
DTYPES = (BF16, F32)
SLOTS, WIDTH, HEADS = 197, 384, 6


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that were compiled, the newest last."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    found: list[Any] = []
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", target)
    monkeypatch.setattr(launch, "INTERPRETED", True)
    monkeypatch.setattr(launch, "on_cpu", True)
    compiles = lambda self, grid: lambda *a, **k: found.append(self.run(*a, grid=grid, warmup=True, **k))  # noqa: E731
    monkeypatch.setattr(jit.JITFunction, "__getitem__", compiles)
    return found


def room(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def ints(*shape: int) -> Tensor:
    return room(*shape, dtype=torch.int32)


def flags(*shape: int) -> Tensor:
    return room(*shape, dtype=torch.bool)


def floats(*shape: int) -> Tensor:
    return room(*shape, dtype=F32)


def fits(kernel: Any, programs: int = 1) -> bool:
    return bool(programs * (kernel.metadata.shared + RESERVED) <= SHARED)


# product: width out, depth
PRODUCTS = {"qkv": (1152, 384), "fc1": (1536, 384), "fc2": (384, 1536)}


@compiles
@pytest.mark.parametrize(("name", "rows"), [*((n, 6304) for n in PRODUCTS), *(("fc2", n) for n in (1, 197, 50432))])
@torch.inference_mode()
def test_products(name: str, rows: int, made: list[Any]) -> None:
    """DeiT-S at batch 32, 256 and 1, bfloat16."""
    width, depth = PRODUCTS[name]
    residual = room(rows, width) if name == "fc2" else None
    weights = (room(width, depth), room(width), residual)
    linear.linear(room(rows, depth), *weights, rows=ints(1), gelu=name == "fc1", expected=rows)
    tile = linear.tile_for(rows, width, residual is not None, depth=depth)
    assert fits(made[-1], max(tile.residents, 1))
    assert "cvt.rn.bf16x2.f32" in made[-1].asm["ptx"]
    assert "cvt.rn.bf16.f32" not in made[-1].asm["ptx"], "rounds one number at a time, which is slow"


@compiles
@pytest.mark.parametrize(("dtype", "rows"), [(BF16, 197), (F32, 197), (BF16, 1)])
@torch.inference_mode()
def test_norms_with_a_gate(dtype: torch.dtype, rows: int, made: list[Any]) -> None:
    """DeiT-S's fc1 with few rows, moved; and its norm alone."""
    given = KernelRows(room(SLOTS, WIDTH, dtype=dtype), ints(SLOTS), ints(1), rows)
    gain, offset, w, b = (room(*shape, dtype=dtype) for shape in ((WIDTH,), (WIDTH,), (1536, WIDTH), (1536,)))
    gate = ThresholdGate(gain[0], gain[1], floats(1, 1), 0.99, 1, floats(1, SLOTS), flags(1, SLOTS))
    norm_linear.norm_linear(given, gain, offset, 1e-6, w, b, 5, True, 1536, gate, (ints(SLOTS), ints(SLOTS)))
    norm.norm(given, gain, offset, 1e-6, w[5], b[5:6])
    assert len(made) == 2
    assert all(fits(kernel) for kernel in made)


@compiles
@pytest.mark.parametrize(
    ("dtype", "images", "count"), [(BF16, 1, None), (BF16, 1, 150), (BF16, 32, None), (BF16, 32, 150), (F32, 1, None)]
)
@torch.inference_mode()
def test_rows_that_move(dtype: torch.dtype, images: int, count: int | None, made: list[Any]) -> None:
    """Packed, merged, put back."""
    rows, place, grid = room(images * SLOTS, WIDTH, dtype=dtype), ints(images * SLOTS), (images, SLOTS)
    pack_index.pack_index(flags(*grid), place, count)
    target, numbers = room(*grid, dtype=torch.long), floats(*grid)
    for left, size in itertools.product((None, ints(images)), (None, numbers)):
        merge.merge(rows, flags(*grid), target, numbers, place, count, size, left)
    merge.mean_weights(target, numbers, flags(*grid))
    unskip.unskip(rows, place, rows, place, numbers, ints(1))
    assert all(fits(kernel) for kernel in made)


@compiles
@pytest.mark.parametrize(("images", "width"), [(32, 64), (256, 64), (32, 256)])
@torch.inference_mode()
def test_patches_that_merge(images: int, width: int, made: list[Any]) -> None:
    grid, units = (images, SLOTS), room(images * SLOTS, 2, width, dtype=torch.float16)
    patches, size = flags(*grid), floats(*grid)
    for weight, leaving, score in ((size, patches, None), (None, None, MergeScore(size, size, 0.5, 0.5))):
        merge_assign.merge_assign(units, patches, patches, size, weight, leaving, score, 100)
        assert fits(made[-1])


@compiles
@pytest.mark.parametrize("few", [True, False])
@torch.inference_mode()
def test_most_similar_tokens(few: bool, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest_token, "multiprocessors", lambda device: 132 if few else 1)
    units, grid = room(32 * SLOTS, 2, 64, dtype=torch.float16), (32, SLOTS)
    nearest_token.nearest(units, ints(32 * SLOTS), ints(33), flags(*grid), flags(*grid))
    order = room(*grid, dtype=torch.long)
    best, partner = nearest_token.match(units, order[:, ::2], order[:, 1::2], SLOTS, 1)
    for prefix in (0, 1):
        bipartite_match.bipartite_match(best, partner, order, flags(*grid), 13, prefix)
    topk.topk(floats(*grid), flags(*grid), 100)
    topk.topk(floats(*grid), flags(*grid), 100, rest=True)
    assert all(fits(kernel) for kernel in made)


def weights(rows: int) -> dict[str, Any]:
    return {"none": None, "bool": flags(rows), "sizes": launch.Log2(floats(rows))}


@compiles
@pytest.mark.parametrize(
    ("kind", "longest", "images", "typical"),
    [
        *((kind, 197, 32, 197) for kind in ("none", "bool", "sizes")),
        *(("bool", 197, 256, 197), ("bool", 197, 32, 118), ("sizes", 577, 64, 577), ("none", 197, 256, 197)),
    ],
)
@torch.inference_mode()
def test_attention(kind: str, longest: int, images: int, typical: int, made: list[Any]) -> None:
    q, k, v = room(images * longest, 3, HEADS, 64).unbind(1)
    offsets, weight = ints(images + 1), weights(images * longest)[kind]
    ragged_attention.attend(q, k, v, offsets, longest, weight, typical)
    assert fits(made[-1], 2)
    assert "cp.async.cg.shared.global" in made[-1].asm["ptx"], "loads are not under way while others are used"
    if images == 32:
        scores_and_keys.class_row_and_unit_keys(q, k, ints(len(q)), offsets, longest, weight, longest)
        attention_scores.received(q, k, offsets, longest, weight)
        assert all(fits(kernel) for kernel in made)


@compiles
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_training(dtype: torch.dtype, made: list[Any]) -> None:
    q, k, v = (room(8, SLOTS, HEADS, 64, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    out = weighted_attention.attention(q, k, v, floats(8, SLOTS).requires_grad_())
    out.sum().backward()
    assert len(made) == 3
    assert all(fits(kernel) for kernel in made)


@compiles
@torch.inference_mode()
def test_what_begins_and_ends_a_pass(made: list[Any]) -> None:
    images, kernel = room(32, 3, 224, 224), room(WIDTH, 768)
    patch_embed.patch_embed(images, kernel, room(WIDTH), room(196, WIDTH), room(1, WIDTH), 16, 16)
    constants.stacked([flags(1, SLOTS) for _ in range(12)])
    assert len(made) == 2
    assert all(fits(kernel) for kernel in made)


@pytest.mark.skipif(not launch.INTERPRETED, reason="the tests above run in this process")
def test_in_a_process_without_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-n", "0"]
    ran = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-1000:]
    assert " passed" in ran.stdout or "[100%]" in ran.stdout
