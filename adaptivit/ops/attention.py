"""Attention with token weights: a_ij = w_j exp(s_ij) / sum_j w_j exp(s_ij), s = scale q k^T.

Shapes: B images, H heads, N rows, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# A dead key whose logit exceeds every live one would send exp() and the gradient of its weight to infinity.
_MAX_EXCESS = 20.0


def fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, dropout: float = 0.0
) -> Tensor:  # [B, H, N, d]
    """torch's own attention; `bias` is a boolean mask or additive, e.g. log w. timm's scale is the default's."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)


def probabilities(q: Tensor, k: Tensor, weight: Tensor | None) -> Tensor:
    """[B, H, N, N] the attention matrix itself, in float32; `weight` [B, N] may carry gradients, zeros included.

    Rows of an image without any key are zero, not NaN.
    """
    with torch.autocast(q.device.type, enabled=False):  # which would take the product back to bf16
        s = (q.float() * q.shape[-1] ** -0.5) @ k.float().transpose(-2, -1)
    if weight is None:
        return s.softmax(-1)
    w = weight.float()[:, None, None, :]
    present = w > 0
    top = s.detach().masked_fill(~present, float("-inf")).amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    e = (s - top).clamp(max=_MAX_EXCESS).exp() * w
    return e / e.sum(-1, keepdim=True).clamp_min(torch.finfo(e.dtype).tiny)


def weighted(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, dropout: float = 0.0) -> Tensor:
    """Attention with weights [B, N] that may be zero and still get a gradient:

    d out_i / d w_j = exp(s_ij) / Z_i (v_j - out_i), which is what tells a halted token that it was needed.
    """
    if dropout > 0:
        return (F.dropout(probabilities(q, k, weight), dropout) @ v.float()).to(v.dtype)
    with torch.autocast(q.device.type, enabled=False):
        return _Weighted.apply(q, k, v, weight)  # type: ignore[no-untyped-call]


class _Weighted(torch.autograd.Function):
    """probabilities(q, k, w) @ v with its gradient written out: half the passes over the attention matrix."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        qf, kf, vf, w = (t.float() for t in (q, k, v, weight))
        s = (qf * scale) @ kf.transpose(-2, -1)
        w = w[:, None, None, :]
        z = torch.logsumexp(s + w.log(), -1, keepdim=True)
        p = (s - z).clamp_(max=_MAX_EXCESS).exp_()  # exp(s) / Z, of absent keys too
        out = (p * w) @ vf
        ctx.save_for_backward(qf, kf, vf, w, p)
        ctx.scale, ctx.dtypes = scale, (q.dtype, k.dtype, v.dtype, weight.dtype)
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, w, p = ctx.saved_tensors
        grad = grad.float()
        a = p * w
        t = grad @ v.transpose(-2, -1)  # g_i . v_j
        t = p * (t - (a * t).sum(-1, keepdim=True))  # exp(s_ij) / Z_i  g_i . (v_j - out_i)
        s = t * w
        grads = ((s @ k) * ctx.scale, (s.transpose(-2, -1) @ q) * ctx.scale, a.transpose(-2, -1) @ grad)
        wanted = t.sum((1, 2)) if ctx.needs_input_grad[3] else None
        dq, dk, dv = (g.to(d) for g, d in zip(grads, ctx.dtypes, strict=False))
        return dq, dk, dv, None if wanted is None else wanted.to(ctx.dtypes[3])
