"""A narrower static model: what it is measured against, what it keeps, and what cannot be made narrower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import QuickGELU
from timm.models.vision_transformer import VisionTransformer

import adaptivit
from adaptivit.backbones.slim import narrow
from adaptivit.data.dataset import Loaded
from adaptivit.errors import UserError
from adaptivit.evaluation.evaluate import evaluate
from tests.support.models import BACKBONES, TINY, pictures, tiny


def test_it_is_measured_against_the_whole_model(tmp_path: Path) -> None:
    whole, small = adaptivit.create(TINY, "static"), adaptivit.create(TINY, "static", width=0.5)
    small.save_pretrained(tmp_path / "small")
    batch = [Loaded(pictures(2), torch.tensor([0, 1]), torch.arange(2), [])]
    full = evaluate(whole, batch)
    for model in (small, adaptivit.load(tmp_path / "small")):
        result = evaluate(model, batch)
        assert result.gmacs_static == full.gmacs
        assert result.gmacs < 0.6 * full.gmacs
        assert result.saved == pytest.approx(1 - result.gmacs / full.gmacs)


def test_stochastic_depth_and_precision_stay() -> None:
    model = adaptivit.create(TINY, "static", width=0.5, drop_path_rate=0.3)
    assert model.vit.blocks[-1].drop_path1.drop_prob == pytest.approx(0.3)
    half = VisionTransformer(**TINY).to(torch.bfloat16)
    assert next(narrow(half, 0.5).parameters()).dtype == torch.bfloat16


def test_other_activations_are_refused() -> None:
    vit = VisionTransformer(**TINY, act_layer=QuickGELU)
    with pytest.raises(UserError, match=r"width: .*QuickGELU|width: .*GELU"):
        narrow(vit, 0.5)


@pytest.mark.parametrize("kind", ["map", "scale_norms"])
def test_heads_are_cut_head_by_head(kind: str) -> None:
    """Every row of a wide matrix says whose head and channel it is; the narrow one keeps the first channels of each."""
    wide = tiny(kind=kind).vit
    heads, dim = 3, TINY["embed_dim"]
    label = torch.arange(dim, dtype=torch.float32)
    names = {"map": ("attn_pool.kv.bias", 2), "scale_norms": ("blocks.0.attn.norm.weight", 1)}
    name, parts = names[kind]
    state: dict[str, Any] = wide.state_dict()
    state[name] = torch.cat([label + 100 * part for part in range(parts)])
    wide.load_state_dict(state)
    cut = narrow(wide, 0.5).state_dict()[name]
    kept = dim // heads // 2
    expected = [100 * p + h * (dim // heads) + i for p in range(parts) for h in range(heads) for i in range(kept)]
    assert cut.tolist() == expected


def test_a_trained_policy_in_a_weights_file_is_not_thrown_away(tmp_path: Path) -> None:
    model = adaptivit.create(TINY, "mod")
    with torch.no_grad():
        for p in model.policy.parameters():
            p.fill_(7.0)
    model.save_pretrained(tmp_path / "mod")
    again = adaptivit.create(TINY, "mod", weights=tmp_path / "mod" / "model.safetensors")
    assert all(bool((p == 7).all()) for p in again.policy.parameters())


def test_exits_need_a_classifier() -> None:
    with pytest.raises(UserError, match="classifier"):
        adaptivit.create(TINY | BACKBONES["no_classifier"], "confidence")


def test_a_budget_counts_the_pooling_head() -> None:
    """A head that pools with attention reads the patches that are left, and that is in the budget."""
    big = {"img_size": 64}
    model = tiny("fold", "map", more=big, budget=0.7)
    out = model(pictures(1, 64))
    assert 0.69 < float(out.macs[0]) / out.costs.static <= 0.7


@pytest.mark.parametrize(("policy", "setting"), [("avit", "gate_scale"), ("aht", "threshold"), ("act", "bias")])
def test_settings_are_finite(policy: str, setting: str) -> None:
    with pytest.raises(UserError, match=f"{setting}: expected a finite number"):
        adaptivit.create(TINY, policy, **{setting: float("inf")})
