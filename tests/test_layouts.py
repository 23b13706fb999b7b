"""Laws of the layouts: each operation against a literal loop, then random sequences of answers, everywhere the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import (
    KINDS,
    assert_close,
    assert_same_run,
    literal_forward,
    merging,
    pictures,
    random_trace,
    tiny,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adaptivit import backbone, policies
from adaptivit.decision import Drop, Skip, Step, Trace
from adaptivit.forward import forward
from adaptivit.layouts import Layout, Masked, Packed
from adaptivit.output import Output

B, N, D, H = 4, 7, 6, 2
both = pytest.mark.parametrize("make", [Masked, Packed])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some(seed: int, share: float = 0.4) -> Tensor:
    """[B, N] bool: a random set, with an image of which all leave and one of which none does."""
    chosen = torch.rand(B, N, generator=torch.Generator().manual_seed(seed)) < share
    chosen[1], chosen[2] = True, False
    return chosen


def to_rows(layout: Layout, grid: Tensor) -> Tensor:
    """[B, N, ...] -> the layout's own rows."""
    return grid if isinstance(layout, Masked) else grid.flatten(0, 1)[layout.cells]  # type: ignore[attr-defined]


@both
def test_drop_freezes_and_hides(make: type[Layout]) -> None:
    x, leaving = noise(B, N, D), some(1)
    layout = make(x, N)
    layout.carry_out(Drop(leaving), "after")
    delta = noise(B, N, D, seed=2)
    layout.add(to_rows(layout, delta))
    for b in range(B):
        for i in range(N):
            assert torch.equal(layout.leading()[b, i], x[b, i] if leaving[b, i] else x[b, i] + delta[b, i])
    assert torch.equal(layout.here, ~leaving)
    layout.carry_out(Drop(torch.ones_like(leaving), zeroed=True), "after")
    for b in range(B):
        for i in range(N):  # zeroed is for those that leave now; who left before keeps its value
            assert torch.equal(layout.leading()[b, i], x[b, i] if leaving[b, i] else torch.zeros(D))


@both
@pytest.mark.parametrize("gated", [False, True])
def test_sit_out_and_come_back(make: type[Layout], gated: bool) -> None:
    x, left, sitting = noise(B, N, D), some(1, 0.2), some(2)
    gate = noise(B, N, seed=3) if gated else None
    layout = make(x, N)
    layout.carry_out(Drop(left), "after")
    layout.carry_out(Skip(sitting, gate), "before")
    assert torch.equal(layout.here, ~left & ~sitting)
    deltas = noise(2, B, N, D, seed=4)
    for delta in deltas:
        layout.add(to_rows(layout, delta))
    layout.come_back()
    for b in range(B):
        for i in range(N):
            g = 1.0 if gate is None else gate[b, i]
            moves = not left[b, i] and not sitting[b, i]
            assert_close(layout.leading()[b, i], x[b, i] + g * deltas[:, b, i].sum(0) if moves else x[b, i])
    assert torch.equal(layout.here, ~left)
    with pytest.raises(ValueError, match="only before"):
        layout.carry_out(Skip(sitting), "after")
    layout.carry_out(Skip(sitting), "before")
    with pytest.raises(ValueError, match="sit out"):
        layout.carry_out(Drop(left), "between")


@both
def test_value_of_who_sits_out(make: type[Layout]) -> None:
    """A share taken between attention and MLP must see the tokens that sit the block out, too."""
    x = noise(B, N, D)
    for read in (2, N):
        layout = make(x, read)
        layout.carry_out(Skip(some(2)), "before")
        assert_close(layout.leading(), x[:, :read])


@both
def test_merge_is_a_scaled_sum(make: type[Layout]) -> None:
    x, left = noise(B, N, D), some(1, 0.2)
    layout = make(x, N)
    layout.carry_out(Drop(left), "after")
    decision = merging(5, ~left)
    layout.carry_out(decision, "between")
    into, scale = decision.into, decision.scale
    for b in range(B):
        for j in range(N):
            stays = not left[b, j] and int(into[b, j]) == j
            met = [scale[b, i] * x[b, i] for i in range(N) if into[b, i] == j and not left[b, i]]
            assert_close(layout.leading()[b, j], torch.stack(met).sum(0) if stays else x[b, j])
            assert bool(layout.live[b, j]) == stays
            assert float((layout.size * layout.here)[b, j]) == (float(decision.size[b, j]) if stays else 0.0)  # type: ignore[index]


def settled(make: type[Layout], case: str) -> tuple[Layout, Tensor]:
    """A layout in some state, and the [B, N] key weights it must attend with."""
    layout = make(noise(B, N, D), N)
    weight = torch.ones(B, N)
    if case in ("dropped", "merged", "dropped and skipped"):
        layout.carry_out(Drop(some(1, 0.2)), "after")
        weight = weight * ~some(1, 0.2)
    if case == "straight-through":
        weight = weight * ~some(1, 0.3)
        layout.carry_out(Drop(some(1, 0.3), weight=weight), "after")
    if case == "merged":
        decision = merging(5, weight > 0)
        layout.carry_out(decision, "between")
        weight = decision.size * weight * (decision.into == torch.arange(N))
        layout.carry_out(Drop(some(8, 0.2)), "after")  # a size leaves with its token
        weight = weight * ~some(8, 0.2)
    if case in ("skipped", "dropped and skipped"):
        layout.carry_out(Skip(some(3)), "before")
        weight = weight * ~some(3)
    return layout, weight


CASES = ("whole", "dropped", "skipped", "dropped and skipped", "merged", "straight-through")


def literal_attention(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """[H, d], [N, H, d], [N] -> [H, N]: the definition, absent keys not looked at."""
    a = torch.zeros(q.shape[0], len(k))
    for h in range(q.shape[0]):
        e = {j: float(weight[j]) * math.exp(float(q[h] @ k[j, h]) / math.sqrt(q.shape[1])) for j in range(len(k))}
        for j in (j for j in e if weight[j] > 0):
            a[h, j] = e[j] / sum(e[i] for i in e if weight[i] > 0)
    return a


@both
@pytest.mark.parametrize("case", CASES)
def test_attend(make: type[Layout], case: str) -> None:
    layout, weight = settled(make, case)
    q, k, v = (noise(B, N, H, 3, seed=s) for s in (6, 7, 8))
    out = layout.grid(layout.attend(*(to_rows(layout, t) for t in (q, k, v))))
    for b in range(B):
        for i in range(N):
            if weight[b, i] == 0:
                assert (out[b, i] == 0).all()  # grid says 0 for who is absent
                continue
            a = literal_attention(q[b, i], k[b], weight[b])
            assert_close(out[b, i], torch.einsum("hj,jhd->hd", a, v[b]))


def test_dropped_is_absent() -> None:
    """Masked attention with dropped tokens is plain attention on the others, whatever the dropped ones hold."""
    layout, weight = settled(Masked, "dropped")
    q, k, v = (noise(B, N, H, 3, seed=s) for s in (6, 7, 8))
    k, v = (torch.where(weight[..., None, None] > 0, t, torch.full_like(t, 1e4)) for t in (k, v))
    out = layout.attend(q, k, v)
    for b in range(B):
        kept = weight[b] > 0
        alone = (t[None, b, kept].transpose(1, 2) for t in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*alone)
        assert_close(out[b, kept], expected[0].transpose(0, 1), 1e-6)


@both
@pytest.mark.parametrize("case", CASES)
def test_evidence(make: type[Layout], case: str) -> None:
    layout, weight = settled(make, case)
    q, k, v = (noise(B, N, H, 3, seed=s) for s in (6, 7, 8))
    rows = [to_rows(layout, t) for t in (q, k, v)]
    one, empty = noise(B, H, 3, seed=9), noise(H, 3, seed=10)
    per_image, per_token = noise(B, 5, seed=11), noise(B, N, 5, seed=12)
    found = {
        "query": layout.query(one, rows[1], rows[2], empty),
        "all": layout.attention_rows(rows[0], rows[1], "all"),
        "class": layout.attention_rows(rows[0], rows[1], "class"),
        "mean": layout.mean(to_rows(layout, per_token)),
        "grid": layout.grid(to_rows(layout, per_token)),
        "expand": layout.grid(layout.expand(per_image)),
    }
    for b in range(B):
        here = [i for i in range(N) if weight[b, i] > 0]
        received = {i: literal_attention(q[b, i], k[b], weight[b]).mean(0) for i in here}
        nothing = torch.zeros(N)
        assert_close(found["all"][b], sum(received.values(), nothing) / max(len(here), 1))
        assert_close(found["class"][b], received.get(0, nothing))
        asked = torch.einsum("hj,jhd->hd", literal_attention(one[b], k[b], weight[b]), v[b])
        assert_close(found["query"][b], asked if here else empty)
        assert_close(found["mean"][b], sum((per_token[b, i] for i in here), torch.zeros(5)) / max(len(here), 1))
        for i in range(N):
            assert torch.equal(found["grid"][b, i], per_token[b, i] if i in here else torch.zeros(5))
            assert torch.equal(found["expand"][b, i], per_image[b] if i in here else torch.zeros(5))
    assert found["query"].shape == (B, H, 3)


@both
def test_leading_reads_the_first_slots(make: type[Layout]) -> None:
    x = noise(B, N, D)
    for read in (1, 2, N):
        layout, other = make(x, read), make(x, N)
        for one in (layout, other):
            one.carry_out(Drop(some(1)), "after")
            one.add(to_rows(one, noise(B, N, D, seed=2)))
            one.carry_out(merging(5, ~some(1)), "between")
            one.carry_out(Drop(some(4), zeroed=True), "after")
        assert torch.equal(layout.leading(), other.leading()[:, :read])


# -- random sequences of answers ----------------------------------------------------------------------------------
LAYERS, SLOTS = 6, 17
answers = st.lists(st.sampled_from(KINDS), min_size=3 * LAYERS, max_size=3 * LAYERS)


def run(model: Any, layout: type[Layout], images: Tensor) -> Output:
    return forward(model.vit, model.shape, model.policy, layout, images, ("tokens",))


def replayed(kind: str, trace: Trace) -> Any:
    model = tiny("static", kind)
    model.policy = policies.build("replay", model.shape, {"trace": trace})
    return model


def check_sequence(kind: str, trace: Trace, masked: type[Layout] = Masked) -> None:
    model = replayed(kind, trace)
    a, b = run(model, masked, pictures()), run(model, Packed, pictures())
    assert_same_run(a, b)
    assert_close(a.tokens, b.tokens)
    readout, computed = literal_forward(model.vit, trace, pictures())
    assert torch.equal(a.trace.attended, computed)
    assert_close(a.logits, backbone.head(model.vit, readout)[1])


@given(kinds=answers, seed=st.integers(0, 99), kind=st.sampled_from(["class", "deit3", "average"]))
@torch.no_grad()
def test_random_answers_run_the_same(kinds: list[str], seed: int, kind: str) -> None:
    check_sequence(kind, random_trace(kinds, seed, slots=16 if kind == "average" else SLOTS))


@torch.no_grad()
def test_sizes_survive_a_weighted_drop() -> None:
    """Merge makes sizes; a later Drop with 0/1 weights (straight-through) says who is present, not that sizes end."""
    check_sequence("class", random_trace(["keep"] * 4 + ["merge"] + ["drop_weight"] * 5 + ["keep"] * 8, 0))


@torch.no_grad()
def test_everything_dropped_before_the_first_block() -> None:
    gone = Drop(torch.ones(3, SLOTS, dtype=torch.bool))
    trace = random_trace(["none"] * 3 * LAYERS, 0)
    check_sequence("class", Trace(trace.attended, trace.updated, 1, (Step(0, "before", gone),)))


@torch.no_grad()
def test_a_leaking_dead_key_is_caught() -> None:
    """The comparison has teeth: a masked layout that lets dropped tokens be seen does not pass it."""

    class Leaky(Masked):
        def _key_weight(self) -> None:
            return None

    trace = random_trace(["none", "none", "drop"] + ["none"] * 15, 1)
    check_sequence("class", trace)
    with pytest.raises(AssertionError, match="not close"):
        check_sequence("class", trace, Leaky)
