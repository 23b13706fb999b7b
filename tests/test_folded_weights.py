"""Copies of weights in folded norms (folded.py): where they are, and that changed weights are seen."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import test_folded as others
import torch
from conftest import randomise
from interpreted import here
from test_folded import run, settled
from test_fused import assert_same, images_of, make
from test_fused import run as plain

from adaptivit.errors import UserError
from adaptivit.execution import norm_fused as folding
from adaptivit.execution.norm_fused import Folded, possible
from adaptivit.model import AdaptiveViT

pytestmark = others.pytestmark
_restored, many = others._restored, others.many


def changed_by_hand(model: AdaptiveViT) -> None:
    randomise(model.vit, 5)


def changed_from_a_file(model: AdaptiveViT) -> None:
    other = copy.deepcopy(model.vit)
    randomise(other, 5)
    model.vit.load_state_dict(other.state_dict())


def changed_by_training(model: AdaptiveViT) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        for p in model.vit.parameters():
            p.grad = torch.randn_like(p)
        torch.optim.SGD(model.vit.parameters(), lr=0.1).step()


def changed_by_a_fused_optimiser(model: AdaptiveViT) -> None:
    """Which does not count it as a change."""
    with torch.inference_mode(False), torch.enable_grad():
        for p in model.vit.parameters():
            p.grad = torch.randn_like(p)
        torch.optim.AdamW(model.vit.parameters(), lr=0.1, fused=True).step()


def changed_in_one_place(model: AdaptiveViT) -> None:
    with torch.inference_mode():
        model.vit.blocks[2].norm1.bias[3] += 2.0


CHANGES = [
    changed_by_hand,
    changed_from_a_file,
    changed_by_training,
    changed_by_a_fused_optimiser,
    changed_in_one_place,
]


@here
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("change", CHANGES)
def test_weights_may_change(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = make("static"), images_of()
    folded = settled(model)
    held = [t.data_ptr() for product, *_ in folded._pairs() for t in (product.weight, product.sums, product.shift)]
    before = plain(model, images, "masked", False).logits
    change(model)
    after = plain(model, images, "masked", False)
    assert float((after.logits - before).abs().max()) > 1e-3
    with torch.inference_mode():
        folded.update()
    assert_same(run(model, images, "packed", folded), after)
    assert held == [
        t.data_ptr() for product, *_ in folded._pairs() for t in (product.weight, product.sums, product.shift)
    ]
    monkeypatch.setattr(Folded, "refresh", lambda self: pytest.fail("nothing has changed"))
    folded.update()


@here
@pytest.mark.usefixtures("many")
def test_all_copies_are_in_one_buffer() -> None:
    """Each with room of its own there, where a descriptor can begin."""
    products = [product for product, *_ in settled(make("static"))._pairs()]
    assert len({product.weight.untyped_storage().data_ptr() for product in products}) == 1
    vectors = [t for product in products for t in (product.sums, product.shift)]
    assert len({t.untyped_storage().data_ptr() for t in vectors}) == 1
    for some in ([product.weight for product in products], vectors):
        ends = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in some)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
        assert all(t.is_contiguous() for t in some)
        assert all(first % 16 == 0 for first, _ in ends)


@here
@pytest.mark.usefixtures("many")
@torch.no_grad()
def test_every_weight_that_was_folded_is_watched() -> None:
    model = make("static")
    folded = settled(model)
    for _, norm, product in folded._pairs():
        for weight in (norm.weight, norm.bias, product.weight, product.bias):
            before = folded._count()
            weight.add_(1.0)
            assert folded._count() == before + 1
    before = folded._count()
    model.vit.blocks[0].norm1.weight.add_(1.0)  # nobody measures the first rows
    assert folded._count() == before


@here
@pytest.mark.usefixtures("many")
def test_steps_with_other_weights_are_no_change() -> None:
    """Of a student beside a captured teacher, say."""
    model, other = make("static"), make("static")
    folded = settled(model)
    before = folded._count()
    changed_by_a_fused_optimiser(other)
    assert folded._count() == before
    changed_by_a_fused_optimiser(model)
    assert folded._count() > before


@here
@pytest.mark.usefixtures("many")
def test_weights_that_were_replaced_are_refused() -> None:
    """A graph would go on reading the old ones."""
    model = make("static")
    folded = settled(model)
    model.vit.load_state_dict(copy.deepcopy(model.vit).state_dict(), assign=True)
    with pytest.raises(UserError, match="replaced after capture"):
        folded.refresh()


@here
@pytest.mark.usefixtures("many")
def test_changes_that_torch_does_not_count() -> None:
    model, images = make("static"), images_of()
    folded = settled(model)
    for p in model.vit.parameters():
        p.data.mul_(1.3)
    expected = plain(model, images, "masked", False)
    folded.update()
    found = run(model, images, "packed", folded)
    assert float((found.logits - expected.logits).abs().max()) > 1e-2 * float(expected.logits.abs().max())
    folded.refresh()
    assert_same(run(model, images, "packed", folded), expected)


def test_what_cannot_be_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert possible(make("static").vit)
    with torch.inference_mode():
        vit = copy.deepcopy(make("static").vit)
        for module in (vit.blocks[1].norm2, vit.blocks[1].mlp.fc1):
            module.bias = torch.nn.Parameter(torch.zeros_like(module.bias), requires_grad=False)
    assert not possible(vit)  # there is no count of its changes
    monkeypatch.setattr(folding, "precision", lambda dtype: "tf32")
    assert not possible(make("static").vit)
    assert possible(make("static").vit.to(torch.bfloat16))
