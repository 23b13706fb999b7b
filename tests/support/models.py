"""Tiny models with weights that make tokens differ, and how two runs are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adaptivit
from adaptivit.output import Output


def model_of(policy: str = "static", classes: int = 9, **given: Any) -> adaptivit.AdaptiveViT:
    """A model whose weights are wild enough for tokens to differ; its gate is calibrated on random images."""
    torch.manual_seed(0)
    model = adaptivit.create("test_vit", policy, img_size=32, num_classes=classes, **given)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn_like(p) * p[0].numel() ** -0.5)
    model.policy.init_gate(model, torch.randn(16, 3, 32, 32))
    return model


LAYOUTS = ("masked", "packed")


ALL_LAYOUTS = (*LAYOUTS, "gathered")  # where every image keeps as many tokens


TINY: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 6,
    "num_heads": 3,
    "num_classes": 10,
}


# Every way a supported backbone can differ from a plain DeiT, as arguments of timm's VisionTransformer.
BACKBONES: dict[str, dict[str, Any]] = {
    "class": {},
    "deit3": {"no_embed_class": True, "init_values": 1e-1},
    "registers": {"reg_tokens": 4, "no_embed_class": True, "init_values": 1e-1},
    "average": {"class_token": False, "global_pool": "avg", "fc_norm": True},
    "average_with_class": {"global_pool": "avg", "fc_norm": False},
    "average_prefix": {"global_pool": "avg", "reg_tokens": 2, "pool_include_prefix": True},
    "max": {"class_token": False, "global_pool": "max"},
    "distilled": {"distilled": True},
    "qk_norm": {"qk_norm": True},
    "scale_norms": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "pre_norm": {"pre_norm": True},
    "no_bias": {"qkv_bias": False, "proj_bias": False},
    "map": {"class_token": False, "global_pool": "map"},
    "map_with_class": {"global_pool": "map"},
    "map_prefix": {"global_pool": "map", "reg_tokens": 2, "pool_include_prefix": True},
    "no_position": {"pos_embed": "none"},
    "no_classifier": {"num_classes": 0},
}


SIDES = ("class", "distilled", "registers", "average")  # where the head reads: one slot, two, one of five, all


SHARED = Path(__file__).parents[3] / "shared"


def shared(name: str) -> Path:
    """A file of ../shared, or a skip that says so: the proofs must run in a bare checkout."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {path}, which is not here")
    return path


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 0) -> None:
    """Weights of ordinary size: timm's own start is so small that all tokens would behave alike."""
    g = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        if name.endswith("gamma") or (p.ndim == 1 and "norm" in name and name.endswith("weight")):
            p.copy_(1 + 0.2 * noise)
        elif p.ndim >= 2 and name.endswith("weight"):
            p.copy_(noise / p[0].numel() ** 0.5)
        else:
            p.copy_(0.3 * noise)


def tiny(policy: str = "static", kind: str = "class", *, seed: int = 0, more: Any = None, **given: Any) -> Any:
    """A tiny model of a kind of backbone; a policy's gate keeps its settings, its planners get random weights."""
    model = adaptivit.create(TINY | BACKBONES[kind] | (more or {}), policy, **given)
    randomise(model.vit, seed)
    if hasattr(model.policy, "planners"):
        randomise(model.policy.planners, seed + 1)
    return model


def pictures(batch: int = 3, size: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_same_run(a: Output, b: Output, tolerance: float = 1e-5) -> None:
    """Two runs of the same model computed the same tokens at the same cost and say the same."""
    assert torch.equal(a.trace.attended, b.trace.attended), "other tokens in attention"
    assert torch.equal(a.trace.updated, b.trace.updated), "other tokens in an MLP"
    for part in a.parts:
        assert torch.equal(a.parts[part], b.parts[part]), f"other cost: {part}"
    assert a.logits.isfinite().all()
    assert_close(a.logits, b.logits, tolerance)
    assert_close(a.features, b.features, tolerance)
