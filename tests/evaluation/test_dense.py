"""Dense features: every patch has one, the same on every layout, and a Trainer of transformers learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adaptivit
from adaptivit.decision import Drop, Merge
from adaptivit.errors import UserError
from tests.support.models import ALL_LAYOUTS, BACKBONES, LAYOUTS, TINY, assert_close, pictures, shared, tiny
from tests.support.policies import PAPERS
from tests.support.traces import random_trace

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "static": ("static", {}),
    "depth": ("static", {"depth": 3}),
    "aht": ("aht", {"beta": -1.0}),
    "aht_merge": ("aht_merge", PAPERS | {"beta": -1.0}),
    "avit": ("avit", {"gate_center": 1.0}),
    "avit_fold": ("avit", {"gate_center": 1.0, "removal": "merge"}),
    "mod": ("mod", {"capacity": 0.5}),
    "amod": ("amod", {"capacity": 0.5}),
    "dynamicvit": ("dynamicvit", {"keep": 0.6}),
    "dynamicvit_fold": ("dynamicvit", {"keep": 0.6, "removal": "merge"}),
    "evit": ("evit", {"keep": 0.6}),
    "tome": ("tome", {"r": 2}),
    "fold": ("fold", {"budget": 0.7}),
    "act": ("act", {"bias": 0.0}),
    "confidence": ("confidence", {"threshold": 0.2}),
    "pondernet": ("pondernet", {"gate_center": 1.0, "unit": "token"}),
}


def literal(model: Any, images: Tensor) -> Tensor:
    """[B, N, D] every token followed through the decisions of the masked pass, one at a time."""
    trace = model(images, layout="masked").trace
    values = states(model, images)
    rows = []
    for b in range(len(images)):
        row = []
        for token in range(trace.attended.shape[2]):
            place, left = token, None
            for step in trace.steps:
                decision = step.decision
                if left is None and isinstance(decision, Drop) and decision.leaving[b, place]:
                    left = (step.layer, step.when)
                elif left is None and isinstance(decision, Merge):
                    goes = int(decision.target[b, place])
                    left = (step.layer, step.when) if goes < 0 else None
                    place = place if goes < 0 else goes
            row.append(values[left or "end"][b, place])
        rows.append(torch.stack(row))
    return model.vit.norm(torch.stack(rows))  # type: ignore[no-any-return]


def states(model: Any, images: Tensor) -> dict[Any, Tensor]:
    """The rows [B, N, D] before each answer of the policy is carried out, and at the end."""
    from adaptivit.layouts import Masked

    seen: dict[Any, Tensor] = {}

    class Spy(Masked):
        def apply(self, decision: Any, when: str) -> None:
            seen[self.layer, when] = self.rows.clone()
            super().apply(decision, when)

    from adaptivit.budget.control import RunSetting
    from adaptivit.execution.torch import Executor
    from adaptivit.forward import forward

    made: list[Spy] = []

    def make(x: Tensor, read: int) -> Spy:
        made.append(Spy(x, read))
        return made[-1]

    forward(Executor(model.backbone), make, images, RunSetting(model.policy))
    return seen | {"end": made[0].rows}


@pytest.mark.parametrize("case", CASES)
def test_every_layout_gives_what_each_token_was_last(case: str) -> None:
    policy, given = CASES[case]
    model, images = tiny(policy, **given), pictures()
    with torch.no_grad():
        expected = literal(model, images)
        for layout in ALL_LAYOUTS if model.policy.traits.fixed_counts else LAYOUTS:
            found = adaptivit.features(model, images, prefix=True, layout=layout)
            assert_close(found, expected, 2e-5)
            assert torch.equal(adaptivit.features(model, images, layout=layout), found[:, 1:])
        with torch.inference_mode():  # products in place
            assert_close(adaptivit.features(model, images, prefix=True), expected, 2e-5)


@pytest.mark.parametrize("kind", BACKBONES)
def test_static_features_are_timms(kind: str) -> None:
    model, images = tiny("static", kind), pictures()
    with torch.no_grad():
        whole = model.vit.forward_features(images)
        assert_close(adaptivit.features(model, images, prefix=True), whole)
        patches = whole[:, model.shape.num_prefix_tokens :]
        assert_close(adaptivit.features(model, images), patches)
        as_map = adaptivit.features(model, images, as_map=True)
    assert as_map.shape == (3, 24, 4, 4)
    assert_close(as_map.flatten(2).transpose(1, 2), patches)


def test_merged_tokens_share_what_they_became() -> None:
    model, images = tiny("tome", r=3), pictures()
    with torch.no_grad():
        out, found = model(images), adaptivit.features(model, images, prefix=True)
    for b in range(3):
        left = int(out.trace.updated[-1, b].sum())
        assert len({tuple(row.tolist()) for row in found[b]}) == left < 17


@pytest.mark.parametrize("seed", range(6))
def test_random_decisions(seed: int) -> None:
    kinds = ["drop", "merge", "none", "gate", "none", "drop_zeroed", "none", "merge_nowhere", "share"] * 2
    trace = random_trace(kinds, seed)
    model, images = adaptivit.create(tiny(seed=seed).vit, "replay", trace=trace), pictures(seed=seed)
    with torch.no_grad():
        expected = literal(model, images)
        for layout in LAYOUTS:
            assert_close(adaptivit.features(model, images, prefix=True, layout=layout), expected, 2e-5)


def test_asking_changes_no_answer() -> None:
    """A-ViT's heads see zeros where tokens halted, features do not."""
    for kind in ("class", "average"):
        model, images = tiny("avit", kind, gate_center=1.0), pictures()
        with torch.no_grad():
            plain, asked = model(images), model(images, aux=("tokens",))
            assert_close(plain.logits, asked.logits)
            assert bool((adaptivit.features(model, images).abs().sum(-1) > 0).all())


def test_other_image_sizes_and_shapes() -> None:
    model = tiny("fold", more={"dynamic_img_size": True}, keep=0.8)
    images = torch.randn(2, 3, 48, 32)
    with torch.no_grad():
        found = adaptivit.features(model, images, as_map=True)
        assert found.shape == (2, 24, 6, 4)
        assert_close(found.flatten(2).mT, adaptivit.features(model, images))


def test_mistakes() -> None:
    with pytest.raises(UserError, match="prefix or as_map"):
        adaptivit.features(tiny(), pictures(), prefix=True, as_map=True)
    with pytest.raises(UserError, match="float tensor"):
        adaptivit.features(tiny(), torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


@pytest.mark.parametrize("case", ["aht", "avit", "tome", "evit", "mod", "dynamicvit_fold"])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_flow(case: str, training: bool) -> None:
    policy, given = CASES[case]
    model = tiny(policy, **given).train(training)
    found = adaptivit.features(model, pictures())
    (found * torch.randn(found.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    for name in ("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight", "blocks.1.mlp.fc2.weight"):
        grad = model.vit.get_parameter(name).grad
        assert grad is not None
        assert grad.isfinite().all()
        assert grad.abs().sum() > 0


# -- transformers ---------------------------------------------------------------------------------------------------
class Squares(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A bright square somewhere; the label of a patch says whether the square covers most of it."""

    def __init__(self, count: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.images = 0.5 * torch.randn(count, 3, 32, 32, generator=g)
        self.labels = torch.zeros(count, 4, 4, dtype=torch.long)
        for image, label, (y, x) in zip(
            self.images, self.labels, torch.randint(3, (count, 2), generator=g).tolist(), strict=True
        ):
            image[:, 8 * y : 8 * y + 16, 8 * x : 8 * x + 16] += 1.5
            label[y : y + 2, x : x + 2] = 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


class Segmenter(nn.Module):
    """An adaptive backbone under a head of one 1 x 1 convolution, as transformers' Trainer wants it."""

    def __init__(self, backbone: Any, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Conv2d(backbone.shape.dim, classes, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(adaptivit.features(self.backbone, pixel_values, as_map=True))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("case", ["aht", "tome"])
def test_a_trainer_of_transformers_learns_from_them(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: uv sync")
    transformers.utils.logging.set_verbosity_error()
    policy, given = CASES[case]
    torch.manual_seed(0)
    model = Segmenter(adaptivit.create(TINY, policy, **given), 2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=16, num_train_epochs=6, learning_rate=3e-3,
        use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(model, options, train_dataset=Squares(192), eval_dataset=Squares(64, seed=1))
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    last = trainer.evaluate()["eval_loss"]
    assert last < 0.35 * first, (first, last)
    for name in ("backbone.vit.patch_embed.proj.weight", "backbone.vit.blocks.0.attn.qkv.weight", "head.weight"):
        assert not torch.equal(before[name], model.state_dict()[name])
    images, labels = Squares(64, seed=1).images, Squares(64, seed=1).labels
    with torch.inference_mode():
        maps = [adaptivit.features(model.eval().backbone, images, as_map=True, layout=x) for x in LAYOUTS]
        assert_close(maps[0], maps[1], 1e-4)
        accuracy = (model.head(maps[0]).argmax(1) == labels).double().mean()
        saved = model.backbone(images)
    assert accuracy > 0.9
    assert float(saved.macs.mean()) < 0.95 * saved.costs.static, "it was adaptive while it learned"


def test_real_weights(tmp_path: Path) -> None:
    weights = shared("weights/deit_tiny_patch16_224.safetensors")
    model = adaptivit.create("deit_tiny_patch16_224", "fold", weights=weights, budget=0.67)
    static = adaptivit.create("deit_tiny_patch16_224", "static", weights=weights)
    from PIL import Image
    from sklearn.datasets import load_sample_images

    transform = model.preprocessing.evaluation()
    images = torch.stack([transform(Image.fromarray(x)) for x in load_sample_images().images])
    with torch.inference_mode():
        dense, whole = (adaptivit.features(m, images) for m in (model, static))
        masked = adaptivit.features(model, images, layout="masked")
    assert dense.shape == (2, 196, 192)
    assert_close(dense, masked, 1e-3)
    alike = nn.functional.cosine_similarity(dense, whole, dim=-1)
    assert float(alike.mean()) > 0.7, "merged patches still look like what static makes of them"
