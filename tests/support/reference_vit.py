"""A ViT on the rows of one image, in pieces and without the package's code: what policies are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.models import randomise, tiny


def randomised(policy: str, kind: str = "class", seed: int = 0, **given: Any) -> Any:
    """A tiny model whose policy has random parameters, too."""
    model = tiny(policy, kind, seed=seed, **given)
    randomise(model.policy, seed + 1)
    return model


def embedded(vit: Any, image: Tensor) -> Tensor:
    """[3, H, W] -> [N, D]"""
    return vit.norm_pre(vit._pos_embed(vit.patch_embed(image[None])))[0]


def attention(block: Any, rows: Tensor, size: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """[n, D] -> the rows after attention, the probabilities [H, n, n], and the keys [n, d], mean over heads."""
    attn = block.attn
    q, k, v = attn.qkv(block.norm1(rows)).reshape(len(rows), 3, attn.num_heads, -1).permute(1, 2, 0, 3)
    q, k = attn.q_norm(q), attn.k_norm(k)
    s = q @ k.mT / math.sqrt(q.shape[-1])
    a = (s if size is None else s + size.log()).softmax(-1)
    return rows + block.ls1(attn.proj((a @ v).transpose(0, 1).flatten(1))), a, k.mean(0)


def mlp(block: Any, rows: Tensor) -> Tensor:
    return rows + block.ls2(block.mlp(block.norm2(rows)))


def whole(block: Any, rows: Tensor) -> Tensor:
    return mlp(block, attention(block, rows)[0])


def logits_of(vit: Any, rows: Tensor) -> Tensor:
    """[n, D], class token first -> logits."""
    if vit.global_pool == "avg":
        return vit.head(vit.fc_norm(vit.norm(rows).mean(0)))
    if hasattr(vit, "head_dist"):
        return (vit.head(vit.norm(rows)[0]) + vit.head_dist(vit.norm(rows)[1])) / 2
    return vit.head(vit.norm(rows)[0])


def best(scores: dict[int, float], count: int) -> list[int]:
    """The `count` keys with the highest values."""
    return sorted(scores, key=lambda i: -scores[i])[:count]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def most_similar(keys: Tensor, one: int, others: Sequence[int]) -> int:
    """The row among `others` whose key is most similar to that of `one`."""
    return max((j for j in others if j != one), key=lambda j: cosine(keys[one], keys[j]))


def mean(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([w * x for x, w in zip(rows, weights, strict=True)]).sum(0) / sum(weights)


def normal(norm: Any, x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (
        x.var(-1, correction=0, keepdim=True) + 1e-5
    ).sqrt() * norm.weight + norm.bias


def predicted(predictor: Any, patches: Tensor, decision: Tensor) -> Tensor:
    """[n, D], [n] -> [n, 2] log-probabilities of keeping and dropping."""
    z = torch.nn.functional.gelu(predictor.in_conv[1](normal(predictor.in_conv[0], patches)))
    total = (z[:, 12:] * decision[:, None]).sum(0) / decision.sum()
    h = torch.cat([z[:, :12], total.expand(len(z), 12)], -1)
    a, _, b, _, c = predictor.out_conv
    h = c(torch.nn.functional.gelu(b(torch.nn.functional.gelu(a(h)))))
    return h - h.exp().sum(-1, keepdim=True).log()
