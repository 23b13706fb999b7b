"""A backbone family of one's own: not timm's, with split q, k, v, rotary positions by slot, a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adaptivit
from adaptivit import backbones
from adaptivit.backbones.protocol import Backbone, Rates
from adaptivit.cost import Shape
from adaptivit.errors import UnsupportedBackbone, UserError
from adaptivit.testing import _check


class ToyBlock(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 2 * hidden), nn.Linear(hidden, dim)


class Toy(nn.Module):
    """A class token and patches; positions come in by rotating queries and keys."""

    def __init__(self, size: int = 40, patch: int = 8, dim: int = 24, depth: int = 4, classes: int = 7) -> None:
        super().__init__()
        self.size, self.patch, self.hidden = size, patch, 2 * dim
        self.cls = nn.Parameter(torch.randn(dim))
        self.embed = nn.Linear(3 * patch**2, dim)
        self.blocks = nn.ModuleList(ToyBlock(dim, self.hidden) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)


class ToyBackbone(Backbone):
    family = "toy"
    heads = 3

    @classmethod
    def drives(cls, module: nn.Module) -> bool:
        return isinstance(module, Toy)

    def inspect(self) -> Shape:
        toy, dim = self.module, self.module.cls.numel()
        return Shape(
            layers=len(toy.blocks),
            tokens=(toy.size // toy.patch) ** 2 + 1,
            num_prefix_tokens=1,
            dim=dim,
            heads=self.heads,
            attention_dim=dim,
            mlp_dim=3 * toy.hidden // 2,  # two products in, one out
            patch_macs=toy.embed.weight.numel(),
            classes=toy.head.out_features,
            num_classifiers=1,
            class_token=True,
            head_tokens=1,
        )

    @property
    def blocks(self) -> Sequence[Any]:
        return self.module.blocks  # type: ignore[no-any-return]

    in_chans = 3  # type: ignore[assignment]

    @property
    def image_size(self) -> tuple[int, int]:
        return (self.module.size, self.module.size)

    @property
    def patch_size(self) -> tuple[int, int]:
        return (self.module.patch, self.module.patch)

    @classmethod
    def build(cls, arguments: Mapping[str, Any]) -> Toy:
        given = dict(arguments)
        given["classes"] = given.pop("num_classes", given.get("classes", 7))
        size = given.pop("img_size", given.get("size", 40))
        given["size"] = size if isinstance(size, int) else size[0]
        return Toy(**given)

    def arguments(self) -> dict[str, Any]:
        toy = self.module
        return {"size": toy.size, "patch": toy.patch, "dim": toy.cls.numel(), "depth": len(toy.blocks)}

    def adapt(self, num_classes: int | None, img_size: tuple[int, int] | None) -> None:
        if img_size is not None:
            raise UserError("Toy: expected no img_size.")
        if num_classes is not None:
            self.module.head = nn.Linear(self.module.cls.numel(), num_classes)

    def embed(self, images: Tensor) -> Tensor:
        patch = self.module.patch
        rows = self.module.embed(F.unfold(images, patch, stride=patch).transpose(1, 2))
        return torch.cat([self.module.cls.expand(len(rows), 1, -1), rows], 1)

    def positions(self, images: Tensor) -> Tensor:
        slots = (images.shape[2] // self.module.patch) * (images.shape[3] // self.module.patch) + 1
        return torch.arange(slots, device=images.device)[:, None] * torch.tensor([0.9, 0.5, 0.2, 0.1])

    def norm(self, rows: Tensor) -> Tensor:
        return self.module.norm(rows)  # type: ignore[no-any-return]

    def head(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        features = self.module.norm(rows[:, 0])
        return features, self.module.head(features)

    @staticmethod
    def norm1(block: Any, rows: Tensor) -> Tensor:
        return block.norm1(rows)  # type: ignore[no-any-return]

    @staticmethod
    def qkv(block: Any, y: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (product(y).unflatten(-1, (3, -1)) for product in (block.q, block.k, block.v))
        assert positions is not None
        angle = positions[..., None, :]
        q, k = (
            torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
            for a, b in (q.chunk(2, -1), k.chunk(2, -1))
        )
        return q, k, v

    @staticmethod
    def project(block: Any, out: Tensor, y: Tensor) -> Tensor:
        return block.out(out.flatten(-2))  # type: ignore[no-any-return]

    @staticmethod
    def norm2(block: Any, rows: Tensor) -> Tensor:
        return block.norm2(rows)  # type: ignore[no-any-return]

    @staticmethod
    def mlp_hidden(block: Any, y: Tensor) -> Tensor:
        return block.up(y)  # type: ignore[no-any-return]

    @staticmethod
    def mlp_out(block: Any, hidden: Tensor) -> Tensor:
        gate, value = hidden.chunk(2, -1)
        return block.down(F.silu(gate) * value)  # type: ignore[no-any-return]

    @staticmethod
    def rates(block: Any) -> Rates:
        return Rates(0.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbones, "FAMILIES", [*backbones.FAMILIES, ToyBackbone])


def toy() -> Toy:
    torch.manual_seed(0)
    made = Toy()
    for parameter in made.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.35)
    return made


def whole(module: Toy, images: Tensor) -> Tensor:
    """[B, classes] the model written out, without adaptivit."""
    family = ToyBackbone(module)
    x, positions = family.embed(images), family.positions(images)
    for block in module.blocks:
        q, k, v = (t.transpose(1, 2) for t in family.qkv(block, block.norm1(x), positions))
        x = x + block.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        x = x + family.mlp_out(block, block.up(block.norm2(x)))
    return family.head(x)[1]


def test_static_is_the_model() -> None:
    module, images = toy(), torch.randn(3, 3, 40, 40)
    with torch.no_grad():
        expected = whole(module, images)
        for layout in ("masked", "packed", "gathered"):
            assert torch.allclose(adaptivit.create(module, "static")(images, layout=layout).logits, expected, atol=1e-5)


@pytest.mark.parametrize(("policy", "settings"), [("aht", {"gamma": 2.0, "beta": -1.5}), ("amod", {}), ("fold", {})])
def test_policies_conform(policy: str, settings: dict[str, Any]) -> None:
    _check(adaptivit.create(toy(), policy, **settings), f"{policy} on a toy family")


def test_save_load_calibrate(tmp_path: Path) -> None:
    model, images = adaptivit.create(toy(), "aht", gamma=2.0, beta=-1.5), torch.randn(8, 3, 40, 40)
    with torch.no_grad():
        model.calibrate(images, "-20%")
        model.save_pretrained(tmp_path / "toy")
        again = adaptivit.load(tmp_path / "toy")
        assert isinstance(again.vit, Toy)
        assert torch.equal(again(images).logits, model(images).logits)
        assert again.budget == "-20%"


def test_refusals_name_the_part() -> None:
    assert "PyTorch modules" in adaptivit.create(toy(), "static").explain_layout()
    with pytest.raises(UserError, match="36 x 36"):
        adaptivit.create(toy(), "static")(torch.randn(1, 3, 36, 36))
    with pytest.raises(UnsupportedBackbone, match="Expected a timm VisionTransformer"):
        adaptivit.create(nn.Linear(2, 2), "static")
