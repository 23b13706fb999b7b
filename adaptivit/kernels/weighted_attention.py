# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Weighted attention without the attention matrix: what `attention.weighted` computes, and its gradients, in Triton.

Shapes: B images, H heads, M queries, N keys, d head width; q, out [B, H, M, d], k, v [B, H, N, d], w [B, N] float32
>= 0; s = scale q k^T; g is the gradient of out.

    Z_i   = sum_j w_j exp(s_ij)                  out_i = sum_j w_j exp(s_ij) v_j / Z_i
    p_ij  = exp(s_ij) / Z_i, at most 1 for keys with w_j = 0 (attention._bounded); 1 where an image has no key
    t_ij  = p_ij (g_i . v_j - g_i . out_i)
    dq_i  = scale sum_j w_j t_ij k_j             dk_j = scale sum_i w_j t_ij q_i             dv_j = sum_i w_j p_ij g_i
    dw_j  = sum over heads and i of t_ij, without i = j where own=False

Forward keeps log2 Z [B, H, M]; backward makes p again from it, tile by tile (flash attention): one kernel goes along
the keys for dq, one along the queries for dk, dv, dw. Products are of the inputs' dtype, sums float32. Rows of a tile
beyond M or N read as zeros, and zeros add nothing. Logits are kept in units of log 2, as the hardware has exp2 alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import launch
from .launch import jit, power_of_two, tl, triton

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def usable(t: Tensor) -> bool:
    """Whether the kernels can run on such q, k or v."""
    return launch.usable(t.device) and t.dtype in _DTYPES and t.shape[-1] <= 128


def attention(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, own: bool = True) -> Tensor:
    """[B, H, M, d] in v's dtype, in the memory order of [B, M, H, d]; differentiable in all four."""
    return torch.ops.adaptivit.weighted_attention(q.to(v.dtype), k.to(v.dtype), v, weight.float(), own)[0]


# -- kernels --------------------------------------------------------------------------------------------------------
@jit
def _load(base, rows, stride, count, D: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH] of a matrix with `count` rows and D columns, zeros beyond."""
    columns = tl.arange(0, WIDTH)[None, :]
    inside = (rows[:, None] < count) & (columns < D)
    return tl.load(base + rows[:, None].to(tl.int64) * stride + columns, mask=inside, other=0.0)


@jit
def _store(base, rows, stride, count, values, D: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)[None, :]
    inside = (rows[:, None] < count) & (columns < D)
    tl.store(base + rows[:, None].to(tl.int64) * stride + columns, values.to(base.dtype.element_ty), mask=inside)


@jit
def _place(H, count, BLOCK: tl.constexpr):
    """Of this program: image, head, and its rows of `count`."""
    blocks = tl.cdiv(count, BLOCK)
    program = tl.program_id(0)
    grid = program // blocks
    rows = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    return (grid // H).to(tl.int64), (grid % H).to(tl.int64), rows


@jit
def _share(logit, log_z, w):
    """p = exp(s) / Z, bounded where the key is absent."""
    excess = logit - log_z
    return tl.exp2(tl.where(w > 0, excess, tl.minimum(excess, 0.0)))


@jit
def _forward_kernel(
    q, k, v, w, out, log_z,
    q_image, q_head, q_row, k_image, k_head, k_row, v_image, v_head, v_row,
    H, M, N, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out and log2 Z of one tile of queries, along the keys, with a running maximum."""
    image, head, rows = _place(H, M, BLOCK_M)
    queries = _load(q + image * q_image + head * q_head, rows, q_row, M, D, WIDTH)
    k += image * k_image + head * k_head
    v += image * v_image + head * v_head
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for start in range(0, N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        keys, values = _load(k, columns, k_row, N, D, WIDTH), _load(v, columns, v_row, N, D, WIDTH)
        weight = tl.load(w + image * N + columns, mask=columns < N, other=0.0)
        log_weight = tl.where(weight > 0, tl.log2(tl.where(weight > 0, weight, 1.0)), float("-inf"))
        logit = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale + log_weight[None, :]
        higher = tl.maximum(top, tl.max(logit, 1))
        origin = tl.where(higher > float("-inf"), higher, 0.0)  # no key so far
        e = tl.exp2(logit - origin[:, None])
        shrink = tl.exp2(top - origin)
        total = total * shrink + tl.sum(e, 1)
        sums = sums * shrink[:, None] + tl.dot(e.to(values.dtype), values, input_precision=PRECISION)
        top = higher
    some = total > 0
    total = tl.where(some, total, 1.0)
    cell = (image * H + head) * M + rows
    tl.store(log_z + cell, tl.where(some, top + tl.log2(total), float("-inf")), mask=rows < M)
    _store(out + (image * M * H + head) * D, rows, H * D, M, sums / total[:, None], D, WIDTH)


@jit
def _query_kernel(
    q, k, v, w, out, log_z, g, dq, delta,
    q_image, q_head, q_row, k_image, k_head, k_row, v_image, v_head, v_row, g_image, g_head, g_row,
    H, M, N, scale, log_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq, and delta_i = g_i . out_i for the other kernel, of one tile of queries, along the keys."""
    image, head, rows = _place(H, M, BLOCK_M)
    queries = _load(q + image * q_image + head * q_head, rows, q_row, M, D, WIDTH)
    grad = _load(g + image * g_image + head * g_head, rows, g_row, M, D, WIDTH)
    result = _load(out + (image * M * H + head) * D, rows, H * D, M, D, WIDTH)
    k += image * k_image + head * k_head
    v += image * v_image + head * v_head
    cell = (image * H + head) * M + rows
    z = tl.load(log_z + cell, mask=rows < M, other=0.0)
    dot = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(delta + cell, dot, mask=rows < M)
    sums = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for start in range(0, N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        keys, values = _load(k, columns, k_row, N, D, WIDTH), _load(v, columns, v_row, N, D, WIDTH)
        weight = tl.load(w + image * N + columns, mask=columns < N, other=0.0)[None, :]
        logit = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * log_scale
        t = tl.dot(grad, tl.trans(values), input_precision=PRECISION) - dot[:, None]
        t = t * _share(logit, z[:, None], weight) * weight
        sums += tl.dot(t.to(keys.dtype), keys, input_precision=PRECISION)
    _store(dq + (image * M * H + head) * D, rows, H * D, M, sums * scale, D, WIDTH)


@jit
def _key_kernel(
    q, k, v, w, log_z, g, delta, dk, dv, dw,
    q_image, q_head, q_row, k_image, k_head, k_row, v_image, v_head, v_row, g_image, g_head, g_row,
    H, M, N, scale, log_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OWN: tl.constexpr,
):  # fmt: skip
    """dk, dv and this head's dw of one tile of keys, along the queries; matrices are [keys, queries] here."""
    image, head, columns = _place(H, N, BLOCK_N)
    keys = _load(k + image * k_image + head * k_head, columns, k_row, N, D, WIDTH)
    values = _load(v + image * v_image + head * v_head, columns, v_row, N, D, WIDTH)
    weight = tl.load(w + image * N + columns, mask=columns < N, other=0.0)[:, None]
    q += image * q_image + head * q_head
    g += image * g_image + head * g_head
    cell = (image * H + head) * M
    key_sums = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    value_sums = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    weight_sums = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        queries, grad = _load(q, rows, q_row, M, D, WIDTH), _load(g, rows, g_row, M, D, WIDTH)
        z = tl.load(log_z + cell + rows, mask=rows < M, other=0.0)
        dot = tl.load(delta + cell + rows, mask=rows < M, other=0.0)
        logit = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * log_scale
        p = _share(logit, z[None, :], weight)
        value_sums += tl.dot((p * weight).to(grad.dtype), grad, input_precision=PRECISION)
        t = p * (tl.dot(values, tl.trans(grad), input_precision=PRECISION) - dot[None, :])
        key_sums += tl.dot((t * weight).to(queries.dtype), queries, input_precision=PRECISION)
        weight_sums += tl.sum(t if OWN else tl.where(columns[:, None] == rows[None, :], 0.0, t), 1)
    base = (image * N * H + head) * D
    _store(dk + base, columns, H * D, N, key_sums * scale, D, WIDTH)
    _store(dv + base, columns, H * D, N, value_sums, D, WIDTH)
    tl.store(dw + (image * H + head) * N + columns, weight_sums, mask=columns < N)


# -- launches -------------------------------------------------------------------------------------------------------
def _plan(t: Tensor, backward: bool) -> dict[str, Any]:
    """Constants of a launch: head width, arithmetic, tile sizes for bf16 tensor cores (fp32 runs on smaller tiles)."""
    d = t.shape[-1]
    width = power_of_two(d)
    exact = t.dtype == torch.float32
    rows = 32 if exact else 64 if backward or width > 64 else 128
    return {
        "D": d,
        "WIDTH": width,
        "PRECISION": "ieee" if exact else "tf32",  # which says nothing about bf16 and fp16
        "BLOCK_M": rows,
        "BLOCK_N": 32 if exact else 64,
        "num_warps": 4 if width <= 64 else 8,
        "num_stages": 2 if backward or exact else 3,
    }


def _rows(t: Tensor) -> Tensor:
    """Elements of a row lie side by side; nothing else is asked of a view."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [t.stride(i) for t in tensors for i in range(3)]


def _empty(t: Tensor) -> Tensor:
    """[B, H, N, d] in the memory order of [B, N, H, d]: what comes next flattens the heads."""
    return torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _forward(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, own: bool) -> tuple[Tensor, Tensor]:
    q, k, v, weight = _rows(q), _rows(k), _rows(v), weight.contiguous()
    (images, heads, queries, d), keys = q.shape, k.shape[2]
    out, log_z = _forward_fake(q, k, v, weight, own)
    plan = _plan(q, backward=False)
    grid = (images * heads * triton.cdiv(queries, plan["BLOCK_M"]),)
    with torch.cuda.device_of(q):
        _forward_kernel[grid](
            *(q, k, v, weight, out, log_z, *_strides(q, k, v)),
            *(heads, queries, keys, d**-0.5 / math.log(2)),
            **plan,
        )
    return out, log_z


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, own: bool) -> tuple[Tensor, Tensor]:
    return _empty(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, log_z: Tensor, own: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g, q, k, v, weight = _rows(g), _rows(q), _rows(k), _rows(v), weight.contiguous()
    (images, heads, queries, d), keys = q.shape, k.shape[2]
    dq, dk, dv = _empty(q), _empty(k), _empty(v)
    delta = torch.empty_like(log_z)
    dw = torch.empty(images, heads, keys, dtype=torch.float32, device=q.device)
    plan = _plan(q, backward=True)
    along = (*_strides(q, k, v, g), heads, queries, keys, d**-0.5, d**-0.5 / math.log(2))
    with torch.cuda.device_of(q):
        grid = (images * heads * triton.cdiv(queries, plan["BLOCK_M"]),)
        _query_kernel[grid](q, k, v, weight, out, log_z, g, dq, delta, *along, **plan)
        grid = (images * heads * triton.cdiv(keys, plan["BLOCK_N"]),)
        _key_kernel[grid](q, k, v, weight, log_z, g, delta, dk, dv, dw, *along, **plan, OWN=own)
    return dq, dk, dv, dw.sum(1)


def _backward_fake(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, log_z: Tensor, own: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(q), _empty(k), _empty(v), torch.empty_like(weight, memory_format=torch.contiguous_format)


# -- operators ------------------------------------------------------------------------------------------------------
def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.own = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of out alone: log2 Z is there for this function."""
    if g is None:
        return None, None, None, None, None
    *grads, dw = torch.ops.adaptivit.weighted_attention_backward(g, *ctx.saved_tensors, ctx.own)
    return *grads, dw if ctx.needs_input_grad[3] else None, None


_op = torch.library.custom_op(
    "adaptivit::weighted_attention",
    _forward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor weight, bool own) -> (Tensor, Tensor)",
)
_op.register_fake(_forward_fake)
_op.register_autograd(_gradients, setup_context=_save)
_backward_op = torch.library.custom_op(
    "adaptivit::weighted_attention_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor g, Tensor q, Tensor k, Tensor v, Tensor weight, Tensor out, Tensor log_z, bool own)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
_backward_op.register_fake(_backward_fake)
