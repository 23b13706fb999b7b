"""A backbone family of one's own: not timm's, with split q, k, v, rotary positions by slot, a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import adaptivit
from adaptivit import backbones
from adaptivit.backbones.protocol import Backbone, Rates
from adaptivit.cost import Shape
from adaptivit.errors import UnsupportedBackbone, UserError
from adaptivit.serve import Service
from adaptivit.testing import check_backbone
from tests.support.commands import run
from tests.support.serving import running


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

    def forward(self, images: Tensor) -> Tensor:
        return whole(self, images)


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
def _registered() -> Iterator[None]:
    backbones.FAMILIES.append(ToyBackbone)
    yield
    backbones.FAMILIES.remove(ToyBackbone)


def named(pretrained: bool = False, **given: Any) -> Toy:
    return ToyBackbone.build({k: v for k, v in given.items() if k in ("img_size", "num_classes")})


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


def test_it_conforms() -> None:
    module = toy()
    check_backbone(module)
    with pytest.raises(AssertionError, match="Toy: logits of static on masked against the module's own differs"):
        check_backbone(module, lambda images: 2 * whole(module, images))


@pytest.mark.parametrize("suffix", ["directory", "file"])
def test_weights_of_other_classes(tmp_path: Path, suffix: str) -> None:
    module = toy()
    place = tmp_path / "toy" if suffix == "directory" else tmp_path / "toy.pth"
    if suffix == "directory":
        adaptivit.create(module, "static").save_pretrained(place)
    else:
        torch.save(module.state_dict(), place)
    again = adaptivit.create(Toy(classes=5), "fold", weights=place, num_classes=5)
    assert torch.equal(again.vit.blocks[0].q.weight, module.blocks[0].q.weight)
    assert again.shape.outputs == 5


def test_train_evaluate_predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """By a name that timm knows, as a file given by --import registers it."""
    monkeypatch.setitem(timm.models._registry._model_entrypoints, "toy_vit", named)
    x = np.random.default_rng(0).integers(0, 256, (24, 40, 40, 3), dtype=np.uint8)
    y = np.arange(24) % 3
    np.savez(tmp_path / "x.npz", train_x=x[:16], train_y=y[:16], val_x=x[16:], val_y=y[16:])
    flags = ("--epochs", 1, "--batch-size", 8, "--workers", 0, "--device", "cpu")
    given = ("--data", tmp_path / "x.npz", "--backbone", "toy_vit")
    assert run("train", *given, "--policy", "static", *flags, "--out", tmp_path / "static") == 0, capsys.readouterr()
    start = ("--policy", "aht", "--weights", tmp_path / "static" / "model", "--loss.distill", 1.0)
    assert run("train", *given, *start, *flags, "--out", tmp_path / "aht") == 0, capsys.readouterr()
    model = tmp_path / "aht" / "model"
    assert run("evaluate", "--data", tmp_path / "x.npz", "--checkpoint", model) == 0, capsys.readouterr()
    Image.fromarray(x[0]).save(tmp_path / "x.png")
    assert run("predict", tmp_path / "x.png", "--checkpoint", model) == 0, capsys.readouterr()
    assert run("visualize", model, "--images", tmp_path / "x.png", "--out", tmp_path / "seen") == 0
    bench = ("--batch-sizes", 1, "--policies", "fold", "--skip-compiled", "--repeats", 1, "--device", "cpu")
    assert run("benchmark", "--backbones", "toy_vit", *bench, "--out", tmp_path / "bench") == 0, capsys.readouterr()
    with running(Service(adaptivit.load(model), wait=0.0)) as live, live.client() as client:
        answer = client.post("/v1/classify", files={"images": ("x.png", (tmp_path / "x.png").read_bytes())})
        assert len(answer.json()["images"][0]["classes"]) == 3
        assert client.get("/demo/info").json()["grid"] == [5, 5]
        assert client.get("/v2/models/adaptivit").json()["inputs"][0]["shape"] == [-1, 3, 40, 40]


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
