"""Attention with token weights: a_ij = w_j exp(s_ij) / sum_j w_j exp(s_ij), s = scale q k^T.

Shapes: B images, H heads, N rows, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import weighted_attention


def _bounded(excess: Tensor, weight: Tensor) -> Tensor:
    """log(exp(s) / Z), held at 0 for keys that have left: one whose logit exceeds all live ones together would send the
    gradient of its weight towards infinity."""
    return torch.where(weight > 0, excess, excess.clamp(max=0.0))


def fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, dropout: float = 0.0
) -> Tensor:  # [B, H, N, d]
    """torch's own attention; `bias` is a boolean mask or additive, e.g. log w. timm's scale is the default's."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)


def probabilities(q: Tensor, k: Tensor, weight: Tensor | None, *, own: bool = True) -> Tensor:
    """[B, H, N, N] the attention matrix itself, in float32; `weight` [B, N] may carry gradients, zeros included.

    Rows of an image without any key are zero, not NaN.
    """
    with torch.autocast(q.device.type, enabled=False):  # which would take the product back to bf16
        s = (q.float() * q.shape[-1] ** -0.5) @ k.float().transpose(-2, -1)
    if weight is None:
        return s.softmax(-1)
    w = weight.float()[:, None, None, :]
    if not own:
        w = torch.where(torch.eye(s.shape[-1], dtype=torch.bool, device=s.device), w.detach(), w)
    z = torch.logsumexp(s.detach() + w.detach().log(), -1, keepdim=True)
    e = _bounded(s - z, w).exp() * w
    return e / e.sum(-1, keepdim=True).clamp_min(torch.finfo(e.dtype).tiny)


def weighted(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, dropout: float = 0.0, own: bool = True) -> Tensor:
    """Attention with weights [B, N] that may be zero and still get a gradient:

    d out_i / d w_j = exp(s_ij) / Z_i (v_j - out_i), which is what tells a halted token that it was needed.
    With own=False the weight of token j has no gradient through row i = j: to itself a token is always there, as in
    DynamicViT's training.
    """
    if dropout > 0:
        return (F.dropout(probabilities(q, k, weight, own=own), dropout) @ v.float()).to(v.dtype)
    if q.is_cuda and weighted_attention.usable(v):
        return weighted_attention.attention(q, k, v, weight, own=own)
    with torch.autocast(q.device.type, enabled=False):
        if torch.compiler.is_compiling():  # torch 2.11 loses gradients of autograd functions of one's own there
            return (probabilities(q, k, weight, own=own) @ v.float()).to(v.dtype)
        return _Weighted.apply(q, k, v, weight, own)  # type: ignore[no-untyped-call]


class _Weighted(torch.autograd.Function):
    """probabilities(q, k, w) @ v with its gradient written out: half the passes over the attention matrix.

    On a GPU the kernels of weighted_kernels.py do the same without that matrix.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, own: bool) -> Tensor:
        scale = q.shape[-1] ** -0.5
        qf, kf, vf, w = (t.float() for t in (q, k, v, weight))
        s = (qf * scale) @ kf.transpose(-2, -1)
        w = w[:, None, None, :]
        z = torch.logsumexp(s + w.log(), -1, keepdim=True)
        p = _bounded(s - z, w).exp_()  # exp(s) / Z, of absent keys too
        out = (p * w) @ vf
        ctx.save_for_backward(qf, kf, vf, w, p)
        ctx.scale, ctx.own, ctx.dtypes = scale, own, (q.dtype, k.dtype, v.dtype, weight.dtype)
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, w, p = ctx.saved_tensors
        grad = grad.float()
        a = p * w
        t = grad @ v.transpose(-2, -1)  # g_i . v_j
        t = p * (t - (a * t).sum(-1, keepdim=True))  # exp(s_ij) / Z_i  g_i . (v_j - out_i)
        s = t * w
        grads = ((s @ k) * ctx.scale, (s.transpose(-2, -1) @ q) * ctx.scale, a.transpose(-2, -1) @ grad)
        wanted = t.sum((1, 2))
        if not ctx.own:
            wanted = wanted - t.diagonal(dim1=-2, dim2=-1).sum(1)
        dq, dk, dv = (g.to(d) for g, d in zip(grads, ctx.dtypes, strict=False))
        return dq, dk, dv, wanted.to(ctx.dtypes[3]), None
