"""Attention with token weights: a_ij = w_j exp(s_ij) / sum_j w_j exp(s_ij), s = scale q k^T.

Shapes: B images, H heads, N rows, d head width.
"""

from __future__ import annotations

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
    """The definition written out, with the gradient of every key's weight, absent keys included:

    d out_i / d w_j = exp(s_ij) / Z_i (v_j - out_i), which is what tells a halted token that it was needed.
    """
    a = F.dropout(probabilities(q, k, weight), dropout, dropout > 0)
    return (a @ v.float()).to(v.dtype)
