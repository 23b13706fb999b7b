"""Every policy, built in or registered, through the one conformance call; and that the call catches what it is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import adaptivit
from adaptivit.layouts import Layout, Masked
from adaptivit.policies import BUILT_IN, registry
from adaptivit.policies.base import Traits
from adaptivit.testing import check_policy
from tests.support.models import assert_close, pictures, tiny
from tests.support.policies import CASES


def test_every_policy_is_among_the_cases() -> None:
    assert {name for name, _ in CASES.values()} == set(BUILT_IN) - {"replay"}


@pytest.fixture
def own_policies() -> Iterator[None]:
    """Policies registered in a test are gone after it."""
    yield
    registry.PLUGINS.registered.clear()


@pytest.mark.parametrize("case", CASES)
def test_built_in_policies_conform(case: str) -> None:
    name, settings = CASES[case]
    check_policy(name, **settings)


class EveryThird(adaptivit.Policy):
    """Drops every third patch after block 1, skips every second one in block 2."""

    def before(self, ctx: Any, state: Any) -> adaptivit.Skip | None:
        slot = torch.arange(ctx.present.shape[1]) - self.shape.num_prefix_tokens
        odd = (slot >= 0) & (slot % 2 == 1)
        return adaptivit.Skip(ctx.present & odd) if ctx.layer == 2 else None

    def after(self, ctx: Any, state: Any) -> adaptivit.Drop | None:
        slot = torch.arange(ctx.present.shape[1]) - self.shape.num_prefix_tokens
        return adaptivit.Drop(ctx.present & (slot >= 0) & (slot % 3 == 0)) if ctx.layer == 1 else None


@pytest.mark.usefixtures("own_policies")
def test_a_policy_of_ones_own_conforms() -> None:
    adaptivit.register_policy("every_third")(EveryThird)
    check_policy("every_third")


class Remembers(EveryThird):
    def after(self, ctx: Any, state: Any) -> adaptivit.Drop | None:
        self.seen = ctx.layer
        return super().after(ctx, state)


class LooksAtOthers(adaptivit.Policy):
    """Decides by the mean over the batch: an image alone gets another answer."""

    def after(self, ctx: Any, state: Any) -> adaptivit.Drop:
        value = ctx.channel(0)
        return adaptivit.Drop(ctx.present & (value < value.mean()))


class SpendsInSecret(EveryThird):
    def after(self, ctx: Any, state: Any) -> adaptivit.Drop | None:
        torch.eye(8) @ torch.eye(8)
        return super().after(ctx, state)


@pytest.mark.usefixtures("own_policies")
@pytest.mark.parametrize(
    ("policy", "message"), [(Remembers, "left something"), (LooksAtOthers, "alone"), (SpendsInSecret, "MACs")]
)
def test_what_does_not_conform_is_named(policy: type[adaptivit.Policy], message: str) -> None:
    adaptivit.register_policy("odd")(policy)
    with pytest.raises(AssertionError, match=message):
        check_policy("odd")


class WithEqualCounts(EveryThird):
    def __init__(self, settings: Any, shape: Any) -> None:
        super().__init__(settings, shape, Traits(fixed_counts=True))


class KeepsOtherCounts(WithEqualCounts):
    """Keeps other numbers of tokens in different images, against its trait."""

    def after(self, ctx: Any, state: Any) -> adaptivit.Drop:
        return adaptivit.Drop(ctx.present & (ctx.channel(0) < 0))


class MiscountsItself(WithEqualCounts):
    """The count that it gives is not what it keeps."""

    def after(self, ctx: Any, state: Any) -> adaptivit.Drop | None:
        answer = super().after(ctx, state)
        return None if answer is None else adaptivit.Drop(answer.leaving, tokens_left=5)


@pytest.mark.usefixtures("own_policies")
@pytest.mark.parametrize("policy", [KeepsOtherCounts, MiscountsItself])
def test_a_policy_that_is_not_equal_is_caught(policy: type[adaptivit.Policy]) -> None:
    adaptivit.register_policy("lies")(policy)
    with pytest.raises(
        adaptivit.UserError, match=r"as many tokens in every image.*got \d+ to \d+.*'packed' or 'masked'"
    ):
        check_policy("lies")


@pytest.mark.usefixtures("own_policies")
def test_an_equal_policy_of_ones_own_runs_on_gathered() -> None:
    adaptivit.register_policy("equal_third")(WithEqualCounts)
    check_policy("equal_third")
    model = adaptivit.create("test_vit", "equal_third", img_size=32, num_classes=3)
    assert model(torch.randn(2, 3, 32, 32)).layout == "gathered"
    assert model.train()(torch.randn(2, 3, 32, 32)).layout == "masked"


def test_a_leaking_layout_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead key that still answers is just what the comparison exists for."""

    def leak(self: Layout, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        from adaptivit.kernels import attention

        return attention.fused(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    monkeypatch.setattr(Masked, "attend", leak)
    with pytest.raises(AssertionError, match="masked against packed"):
        check_policy("avit", gate_scale=1.0, gate_center=1.0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("policy", "given"),
    [("static", {}), ("fold", {"keep": 0.8}), ("tome", {"r": 2}), ("evit", {"keep": 0.6}), ("mod", {}), ("amod", {})],
)
def test_equal_policies_train_on_gathered_with_the_gradients_of_masked(policy: str, given: Any, training: bool) -> None:
    images, found = pictures(5), []
    model = tiny(policy, more={"depth": 5}, **given).train(training)
    for layout in ("auto", "masked"):
        model.zero_grad()
        out = model(images, layout=layout)
        assert out.layout == ("gathered" if layout == "auto" else "masked")
        out.logits.square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in found[1].items():
        assert_close(found[0][name], gradient, 1e-5 * max(1.0, float(gradient.abs().max())))


def test_a_policy_that_differs_in_training_trains_on_masked() -> None:
    assert tiny("dynamicvit").train()(pictures(3)).layout == "masked"
