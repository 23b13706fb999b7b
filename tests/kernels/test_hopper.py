"""The kernels compile for a GPU that is not here (sm_90), and as many programs fit on a multiprocessor as are meant to.

The interpreter runs what Triton's compiler might refuse; this does not run anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from adaptivit.kernels import (
    launch,
    linear,
    merge,
    merge_assign,
    nearest_token,
    norm_linear,
    ragged_attention,
    scores_and_keys,
    topk,
    unskip,
)

pytestmark = pytest.mark.skipif(launch.triton is None, reason="needs Triton")
compiles = pytest.mark.skipif(launch.INTERPRETED, reason="runs in a process of its own")
SHARED, RESERVED = 228 * 1024, 1024  # bytes of a multiprocessor, and of each program for itself
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """Arguments without a type are constants."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert set(kernel.arg_names) == set(types) | set(constants)
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", 90, 32)
    aligned = [name for name in types if name.endswith(("_pointer", "_stride"))]  # as they are in a pass
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, places, attributes)
    return launch.triton.compile(source, target=target, options=options or None)


def shared_memory(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> int:
    """Compile; bytes of shared memory of a program."""
    return int(compiled(kernel, types, constants, **options).metadata.shared)


# product: width out, depth, and what it does beside multiplying
PRODUCTS = {
    "qkv": (1152, 384, {}),
    "fc1": (1536, 384, {"GELU": True}),
    "fc2": (384, 1536, {"RESIDUAL": True}),
}


@compiles
@pytest.mark.parametrize(
    ("name", "rows"), [*((name, 6304) for name in PRODUCTS), *(("fc2", rows) for rows in (1, 197, 50432))]
)
def test_products(name: str, rows: int) -> None:
    """DeiT-S at batch 32, 256 and 1, bfloat16. (With few rows nothing is measured, but it could be.)"""
    width, depth, does = PRODUCTS[name]
    tile = linear.tile_for(rows, width, "RESIDUAL" in does, depth=depth)
    part = f"tensordesc<bf16[{tile.m}, {tile.n // tile.parts}]>"
    types = {"x_tile": f"tensordesc<bf16[{tile.m}, {tile.k}]>", "w_tile": f"tensordesc<bf16[{tile.n}, {tile.k}]>"}
    types |= {"out_tile": part, "residual_tile": part, "bias_pointer": "*bf16", "scale_pointer": "*bf16"}
    types |= {"rows_pointer": "*i32", "room": "i32"}
    off = ("GELU", "SCALE", "RESIDUAL", "EXACT")
    constants: dict[str, Any] = dict.fromkeys(off, False) | {"BIAS": True, "COUNTED": True, "PRECISION": "tf32"}
    constants |= {"N": width, "K": depth, "TM": tile.m, "TN": tile.n, "TK": tile.k, "PARTS": tile.parts}
    made = compiled(linear._linear_kernel, types, constants | does, num_warps=tile.warps, num_stages=tile.stages)
    assert max(tile.residents, 1) * (made.metadata.shared + RESERVED) <= SHARED
    assert "cvt.rn.bf16x2.f32" in made.asm["ptx"]
    assert "cvt.rn.bf16.f32" not in made.asm["ptx"], "rounds one number at a time, which is slow"


@compiles
@pytest.mark.parametrize(
    ("dtype", "rows"), [*((dtype, 197) for dtype in NAMES), *((torch.bfloat16, n) for n in (1, 50))]
)
def test_a_product_with_a_gate(dtype: torch.dtype, rows: int) -> None:
    """DeiT-S's fc1 with few rows, moved."""
    tile, (left, right) = norm_linear.tile_for(rows, 1536, dtype), norm_linear.split(384) or (0, 0)
    given = ("x", "norm_weight", "norm_bias", "weight", "bias", "out", "kept", "scale", "offset")
    types = {f"{name}_pointer": f"*{NAMES[dtype]}" for name in given} | dict.fromkeys(
        ("active_pointer", "active_out", "active_rows_out"), "*u8"
    )
    types |= {f"{name}_pointer": "*i32" for name in ("index", "rows", "cells", "place")}
    types |= dict.fromkeys(("element_pointer", "total_pointer", "shift_pointer", "score_out", "total_out"), "*fp32")
    types |= dict.fromkeys(("room", "probe", "slots", "first_slot"), "i32") | {"eps": "fp32", "threshold": "fp32"}
    flags = ("MOVES", "COUNTED", "PROBED", "BIAS", "GELU", "GATED", "MOVED", "SHIFTED")
    constants: dict[str, Any] = {"C": 1536, "LEFT": left, "RIGHT": right, **dict.fromkeys(flags, True)}
    constants |= {"TM": tile.m, "TN": tile.n, "EXACT": dtype == torch.float32}
    constants["PRECISION"] = "ieee" if dtype == torch.float32 else "tf32"
    assert shared_memory(norm_linear._norm_linear_kernel, types, constants, num_warps=tile.warps) + RESERVED <= SHARED


@compiles
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(("dtype", "images"), [*((dtype, 1) for dtype in NAMES), (torch.bfloat16, 32)])
def test_rows_that_meet_and_come_back(dtype: torch.dtype, equal: bool, images: int) -> None:
    rows = f"*{NAMES[dtype]}"
    exact = dtype == torch.float32
    integers = ("before", "counts", "place", "cells", "offsets", "index", "source", "target", "number")
    types = {f"{name}_pointer": "*i32" for name in integers} | {"rows_pointer": rows, "out_pointer": rows}
    types |= {f"{name}_pointer": "*fp32" for name in ("own", "part", "scale", "size", "weight")}
    types |= {"stay_pointer": "*u8", "stays_pointer": "*u8", "into_pointer": "*i64"}
    types |= dict.fromkeys(("slots", "batch", "count"), "i32")
    constants: dict[str, Any] = {"D": 384, "TC": merge.PIECE, "EXACT": exact}
    tile = merge.tile_for(images)
    constants |= {"TM": tile.m, "TL": tile.joining}
    constants |= {"WIDE": 256, "IMAGES": 1, "COUNTED": False, "EQUAL": equal, "MEETS": True, "SIZED": True}
    constants |= {"ORDERS": tile.orders, "IMAGES": 1 if equal else images, "COUNTED": not equal}
    constants["PRECISION"] = "ieee" if exact else "tf32"
    options = {"num_warps": tile.warps} | ({} if exact else {"maxnreg": merge.REGISTERS})
    assert shared_memory(merge._merge_kernel, types, constants, **options) + RESERVED <= SHARED
    types = {f"{name}_pointer": "*i32" for name in ("cells", "place", "count")} | {"room": "i32"}
    types |= {f"{name}_pointer": rows for name in ("rows", "moved", "out")}
    types |= {"gate_pointer": "*fp32"}
    constants = {"D": 384, "WIDE": 512, "TM": 4, "GATED": True, "COUNTED": True}
    shared_memory(unskip._back_kernel, types, constants)


@compiles
@pytest.mark.parametrize(("images", "width"), [(32, 64), (256, 64), (32, 80), (32, 256)])
@pytest.mark.parametrize("ranked", [True, False])
def test_patches_that_fold(ranked: bool, images: int, width: int) -> None:
    """197 tokens."""
    types = {f"{name}_pointer": "*u8" for name in ("patches", "here", "leaving")}
    types |= {f"{name}_pointer": "*fp32" for name in ("score", "alike", "size", "merge_weight", "scale", "after")}
    types |= {"left_pointer": "*i32"}
    types |= {"units_pointer": "*fp16", "into_pointer": "*i64", "list_pointer": "*i32", "slots": "i32", "count": "i32"}
    types |= {"power": "fp32", "value": "fp32"}
    wide = launch.power_of_two(width)
    tile = merge_assign.tile_for(256, images, wide)
    constants = {"d": width, "WIDE": wide, "ALL": 256, "RANKED": ranked, "SUMS": True, "SAYS": True}
    constants |= {"TM": tile.m, "TN": tile.n, "PART": tile.part}
    constants |= dict.fromkeys(("WORTH", "LIKENESS", "POWER_HALF", "VALUE_HALF"), ranked)
    assert shared_memory(merge_assign._meet_kernel, types, constants, num_warps=tile.warps) + RESERVED <= SHARED


@compiles
@pytest.mark.parametrize("weighted", [0, 1, 2])
def test_what_folding_looks_at(weighted: int) -> None:
    types = {"q_pointer": "*bf16", "k_pointer": "*bf16", "weight_pointer": ("*bf16", "*u8", "*fp32")[weighted]}
    types |= {"cells_pointer": "*i32", "offsets_pointer": "*i32", "row_pointer": "*fp32", "units_pointer": "*fp16"}
    types |= dict.fromkeys(("batch", "slots", "row_stride", "head_stride"), "i32") | {"scale": "fp32"}
    constants = {"HEADS": 6, "d": 64, "WIDE": 64, "LONGEST": 256, "CHUNK": 32, "TM": 32, "WEIGHTED": weighted}
    shared_memory(scores_and_keys._looks_kernel, types, constants, num_warps=8)


@compiles
@pytest.mark.parametrize("what", [nearest_token.NEAREST, nearest_token.MATCH])
def test_who_is_most_alike(what: int) -> None:
    names = ("slots", "tiles", "least", "n", "m", "one_image", "one_stride", "two_image", "two_stride")
    types = dict.fromkeys(names, "i32") | {"units_pointer": "*fp16", "value_pointer": "*fp32", "slot_pointer": "*i64"}
    types |= {"offsets_pointer": "*i32", "one_pointer": "*i32", "two_pointer": "*i32"}
    types |= {"among_pointer": "*u8", "here_pointer": "*u8"}
    for broad, stages in (nearest_token.MANY, nearest_token.FEW):
        constants = {
            "d": 64,
            "WIDE": 64,
            "TM": nearest_token.TALL,
            "TN": broad,
            "WHAT": what,
            "RAGGED": what == nearest_token.NEAREST,
        }
        shared_memory(nearest_token._closest_kernel, types, constants, num_warps=nearest_token.WARPS, num_stages=stages)


@compiles
@pytest.mark.parametrize("weighted", [0, 1, 2])
@pytest.mark.parametrize(
    ("longest", "images", "typical"), [(197, 256, 197), (197, 32, 197), (197, 32, 118), (577, 64, 577)]
)
def test_attention(longest: int, images: int, typical: int, weighted: int) -> None:
    tm, tn, warps, stages = ragged_attention.tile_for(longest, 64, torch.bfloat16, images, typical, weighted > 0)
    rows = dict.fromkeys(("q_pointer", "k_pointer", "v_pointer", "out_pointer"), "*bf16")
    types = rows | {"weight_pointer": ("*bf16", "*u8", "*fp32")[weighted], "offsets_pointer": "*i32"}
    types |= {"row_stride": "i32", "head_stride": "i32", "scale": "fp32"}
    constants = {"HEADS": 6, "d": 64, "WIDE": 64, "TM": tm, "TN": tn, "WEIGHTED": weighted, "PRECISION": "tf32"}
    made = compiled(ragged_attention._attend_kernel, types, constants, num_warps=warps, num_stages=stages)
    assert 2 * (made.metadata.shared + RESERVED) <= SHARED
    assert "cp.async.cg.shared.global" in made.asm["ptx"], "loads are not under way while others are used"


@compiles
def test_the_best() -> None:
    types = {"score_pointer": "*fp32", "among_pointer": "*u8", "out_pointer": "*u8"}
    types |= dict.fromkeys(("score_stride", "among_stride", "slots", "count"), "i32")
    shared_memory(topk._top_kernel, types, {"TM": 16, "TN": 256, "REST": True})


@pytest.mark.skipif(not launch.INTERPRETED, reason="the tests above run in this process")
def test_in_a_process_without_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-n", "0"]
    ran = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-1000:]
    assert " passed" in ran.stdout or "[100%]" in ran.stdout
