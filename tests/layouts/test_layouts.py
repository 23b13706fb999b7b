"""Each operation of every layout against a literal loop. Sequences of decisions are in test_sequences.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivit.decision import Drop, Merge, Skip
from adaptivit.errors import UserError
from adaptivit.execution.torch import added
from adaptivit.kernels import launch
from adaptivit.layouts import Gathered, GatheredOnDevice, Layout, Masked, Packed, PackedOnDevice
from tests.support.fused import WARNINGS
from tests.support.interpreter import ON_GPU, here
from tests.support.layouts import Still
from tests.support.models import assert_close, pictures, tiny
from tests.support.traces import choice, merging

B, N, D, H = 4, 7, 6, 2


EQUAL = (Gathered, GatheredOnDevice)  # as many rows of every image
every = pytest.mark.parametrize("make", [Masked, Packed, PackedOnDevice, Still, *EQUAL])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some(make: type[Layout], seed: int, share: float = 0.4, live: Tensor | None = None) -> Tensor:
    """[B, N] bool: a random set; as many live ones in every image for gathered, else all of one and none of another."""
    g = torch.Generator().manual_seed(seed)
    if make in EQUAL:
        return choice(torch.ones(B, N, dtype=torch.bool) if live is None else live, share, g)
    chosen = torch.rand(B, N, generator=g) < share
    chosen[1], chosen[2] = True, False
    return chosen


def to_rows(layout: Layout, grid: Tensor) -> Tensor:
    """[B, N, ...] -> the layout's own rows."""
    if isinstance(layout, Masked):
        return grid
    if isinstance(layout, Gathered):
        return torch.stack([image[slots] for image, slots in zip(grid, layout.places, strict=True)])
    return grid.flatten(0, 1)[layout.cells]  # type: ignore[attr-defined]


def add(layout: Layout, delta: Tensor) -> None:
    """What a block adds, [B, N, D]."""
    layout.put(added(layout.rows, to_rows(layout, delta), None, layout.active_rows()))


@every
def test_drop_freezes_and_hides(make: type[Layout]) -> None:
    x, leaving = noise(B, N, D), some(make, 1)
    layout = make(x, N)
    layout.apply(Drop(leaving), "after")
    delta = noise(B, N, D, seed=2)
    add(layout, delta)
    for b in range(B):
        for i in range(N):
            assert torch.equal(layout.head_rows()[b, i], x[b, i] if leaving[b, i] else x[b, i] + delta[b, i])
    assert torch.equal(layout.active, ~leaving)
    layout.apply(Drop(torch.ones_like(leaving), zero_on_exit=True), "after")
    for b in range(B):
        for i in range(N):  # zeroed is for those that leave now; who left before keeps its value
            assert torch.equal(layout.head_rows()[b, i], x[b, i] if leaving[b, i] else torch.zeros(D))


@every
@pytest.mark.parametrize("gated", [False, True])
def test_skip_and_unskip(make: type[Layout], gated: bool) -> None:
    x, left = noise(B, N, D), some(make, 1, 0.2)
    sitting = some(make, 2, live=~left)
    gate = noise(B, N, seed=3) if gated else None
    layout = make(x, N)
    layout.apply(Drop(left), "after")
    layout.apply(Skip(sitting, gate), "before")
    assert torch.equal(layout.active, ~left & ~sitting)
    deltas = noise(2, B, N, D, seed=4)
    for delta in deltas:
        add(layout, delta)
    layout.unskip()
    for b in range(B):
        for i in range(N):
            g = 1.0 if gate is None else gate[b, i]
            moves = not left[b, i] and not sitting[b, i]
            assert_close(layout.head_rows()[b, i], x[b, i] + g * deltas[:, b, i].sum(0) if moves else x[b, i])
    assert torch.equal(layout.active, ~left)
    with pytest.raises(ValueError, match="only before"):
        layout.apply(Skip(sitting), "after")
    layout.apply(Skip(sitting), "before")
    with pytest.raises(ValueError, match="sit out"):
        layout.apply(Drop(left), "between")


@every
def test_value_of_skipped_tokens(make: type[Layout]) -> None:
    """A share taken between attention and MLP must see the tokens that sit the block out, too."""
    x = noise(B, N, D)
    for read in (1, 2, N):
        layout = make(x, read)
        layout.apply(Skip(some(make, 2)), "before")
        assert_close(layout.head_rows(), x[:, :read])


@every
@pytest.mark.parametrize("kind", ["sized", "unsized", "nowhere"])
def test_merge_is_a_scaled_sum(make: type[Layout], kind: str) -> None:
    x, left = noise(B, N, D), some(make, 1, 0.2)
    layout = make(x, N)
    layout.apply(Drop(left), "after")
    decision = merging(5, ~left, equal=make in EQUAL, nowhere=kind == "nowhere", sized=kind != "unsized")
    layout.apply(decision, "between")
    into, scale = decision.target, decision.source_weight
    assert kind != "nowhere" or (into < 0).any()
    for b in range(B):
        for j in range(N):
            stays = not left[b, j] and int(into[b, j]) == j
            met = [scale[b, i] * x[b, i] for i in range(N) if into[b, i] == j and not left[b, i]]
            assert_close(layout.head_rows()[b, j], torch.stack(met).sum(0) if stays else x[b, j])
            assert bool(layout.alive[b, j]) == bool(layout.active[b, j]) == stays
            if layout.size is not None and decision.size is not None and stays:
                assert float(layout.size[b, j]) == float(decision.size[b, j])
    assert (layout.size is None) == (kind == "unsized")


def settled(make: type[Layout], case: str) -> tuple[Layout, Tensor]:
    """A layout in some state, and the [B, N] key weights it must attend with."""
    layout = make(noise(B, N, D), N)
    weight = torch.ones(B, N)
    equal = make in EQUAL
    if case in ("dropped", "merged", "dropped and skipped"):
        layout.apply(Drop(some(make, 1, 0.2)), "after")
        weight = weight * ~some(make, 1, 0.2)
    if case == "straight-through":
        weight = weight * ~some(make, 1, 0.3)
        layout.apply(Drop(some(make, 1, 0.3), key_weight=weight), "after")
    if case == "merged":
        decision = merging(5, weight > 0, equal=equal)
        layout.apply(decision, "between")
        weight = decision.size * weight * (decision.target == torch.arange(N))
        gone = some(make, 8, 0.2, weight > 0)
        layout.apply(Drop(gone), "after")  # a size leaves with its token
        weight = weight * ~gone
        again = merging(6, weight > 0, equal=equal, nowhere=True, sized=False)
        layout.apply(again, "between")  # sizes stay as they were
        weight = weight * (again.target == torch.arange(N))
    if case in ("skipped", "dropped and skipped"):
        sitting = some(make, 3, live=weight > 0)
        layout.apply(Skip(sitting), "before")
        weight = weight * ~sitting
    if case == "empty":
        layout.apply(Drop(torch.ones(B, N, dtype=torch.bool)), "after")
        weight = weight * 0
    return layout, weight


CASES = ("whole", "dropped", "skipped", "dropped and skipped", "merged", "straight-through", "empty")


def literal_attention(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """[H, d], [N, H, d], [N] -> [H, N]: the definition, absent keys not looked at."""
    a = torch.zeros(q.shape[0], len(k))
    for h in range(q.shape[0]):
        e = {j: float(weight[j]) * math.exp(float(q[h] @ k[j, h]) / math.sqrt(q.shape[1])) for j in range(len(k))}
        for j in (j for j in e if weight[j] > 0):
            a[h, j] = e[j] / sum(e[i] for i in e if weight[i] > 0)
    return a


@every
@pytest.mark.parametrize("case", CASES)
def test_attend(make: type[Layout], case: str) -> None:
    layout, weight = settled(make, case)
    q, k, v = (noise(B, N, H, 3, seed=s) for s in (6, 7, 8))
    out = layout.to_grid(layout.attend(*(to_rows(layout, t) for t in (q, k, v))))
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


@every
@pytest.mark.parametrize("case", CASES)
def test_evidence(make: type[Layout], case: str) -> None:
    layout, weight = settled(make, case)
    q, k, v = (noise(B, N, H, 3, seed=s) for s in (6, 7, 8))
    rows = [to_rows(layout, t) for t in (q, k, v)]
    one, empty = noise(B, H, 3, seed=9), noise(H, 3, seed=10)
    per_image, per_token = noise(B, 5, seed=11), noise(B, N, 5, seed=12)
    chosen = (noise(B, N, seed=13) > 0) * (weight > 0).float()
    found = {
        "query": layout.query(one, rows[1], rows[2], empty),
        "all": layout.attention_rows(rows[0], rows[1], "all"),
        "class": layout.attention_rows(rows[0], rows[1], "class"),
        "mean": layout.mean(to_rows(layout, per_token)),
        "weighted": layout.mean(to_rows(layout, per_token), chosen),
        "grid": layout.to_grid(to_rows(layout, per_token)),
        "expand": layout.to_grid(layout.expand(per_image)),
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
        total, over = chosen[b].sum(), sum((chosen[b, i] * per_token[b, i] for i in here), torch.zeros(5))
        assert_close(found["weighted"][b], over / total if total else torch.zeros(5))
        for i in range(N):
            assert torch.equal(found["grid"][b, i], per_token[b, i] if i in here else torch.zeros(5))
            assert torch.equal(found["expand"][b, i], per_image[b] if i in here else torch.zeros(5))
    assert found["query"].shape == (B, H, 3)


@every
@pytest.mark.parametrize("case", CASES)
def test_nearest(make: type[Layout], case: str) -> None:
    """The most similar other token out of a set, by cosine; none from an empty set."""
    layout, weight = settled(make, case)
    keys, among = noise(B, N, 3, seed=6), noise(B, N, seed=7) > 0
    among[3] = False
    raw = keys[:, :, None] + torch.tensor([-1.0, 1.0])[:, None]  # of two heads
    value, slot = layout.similarity(to_rows(layout, raw)).nearest(among)
    for b in range(B):
        for i in range(N):
            others = [j for j in range(N) if among[b, j] and weight[b, j] > 0 and j != i]
            if weight[b, i] == 0 or not others:
                assert (float(value[b, i]), int(slot[b, i])) == (float("-inf"), -1)
                continue
            cosine = {j: float(keys[b, i] @ keys[b, j] / keys[b, i].norm() / keys[b, j].norm()) for j in others}
            best = max(cosine, key=lambda j: cosine[j])
            assert int(slot[b, i]) == best
            assert float(value[b, i]) == pytest.approx(cosine[best], abs=1e-5)


@every
def test_alive_rows_are_in_order(make: type[Layout]) -> None:
    x, left = noise(B, N, D), some(Gathered, 1, 0.5)
    layout = make(x, N)
    layout.apply(Drop(left), "after")
    assert torch.equal(layout.alive_rows(), torch.stack([x[b, ~left[b]] for b in range(B)]))


@every
def test_head_rows_are_the_first_slots(make: type[Layout]) -> None:
    x, left = noise(B, N, D), some(make, 1)
    merge = merging(5, ~left, equal=make in EQUAL)
    last = some(make, 4, live=~left & (merge.target == torch.arange(N)))
    for read in (1, 2, N):
        layout, other = make(x, read), make(x, N)
        for one in (layout, other):
            one.apply(Drop(left), "after")
            add(one, noise(B, N, D, seed=2))
            one.apply(merge, "between")
            one.apply(Drop(last, zero_on_exit=True), "after")
        assert torch.equal(layout.head_rows(), other.head_rows()[:, :read])


@pytest.mark.parametrize("operation", ["drop", "skip", "merge"])
@pytest.mark.parametrize("layout", EQUAL)
def test_other_counts_are_refused_by_gathered(layout: type[Layout], operation: str) -> None:
    uneven = torch.zeros(B, N, dtype=torch.bool)
    uneven[0, :3], uneven[1:, 3] = True, True  # 4 and 6 of 7 stay
    into = torch.where(uneven, -1, torch.arange(N))
    make = {"drop": Drop, "skip": Skip, "merge": lambda gone, **more: Merge(into, torch.ones(B, N), **more)}[operation]
    with pytest.raises(UserError, match=r"got 4 to 6.*'packed' or 'masked'"):
        layout(noise(B, N, D), 1).apply(make(uneven), "before")
    if operation != "merge":
        even = torch.zeros_like(uneven)
        even[:, 2] = True
        with pytest.raises(UserError, match=r"\(5\), got 6 to 6"):  # a promise that is not kept
            layout(noise(B, N, D), 1).apply(make(even, tokens_left=5), "before")


# -- the same by kernels --------------------------------------------------------------------------------------------
@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "on_cpu", True)


def by_kernels(test: Any) -> Any:
    for mark in (*WARNINGS, here, pytest.mark.usefixtures("kernels")):
        test = mark(test)
    return pytest.mark.skipif(ON_GPU, reason="these tensors are on a CPU")(test)


@by_kernels
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [PackedOnDevice, Still, Gathered, GatheredOnDevice])
@torch.inference_mode()
def test_attention_and_evidence_by_kernels(layout: type[Layout], case: str) -> None:
    test_attend(layout, case)
    test_evidence(layout, case)
    test_nearest(layout, case)


@by_kernels
@pytest.mark.parametrize("layout", [PackedOnDevice, Still, GatheredOnDevice])
@torch.inference_mode()
def test_decisions_by_kernels(layout: type[Layout]) -> None:
    test_drop_freezes_and_hides(layout)
    test_value_of_skipped_tokens(layout)
    test_head_rows_are_the_first_slots(layout)
    test_alive_rows_are_in_order(layout)
    for gated in (False, True):
        test_skip_and_unskip(layout, gated)
    for kind in ("sized", "unsized", "nowhere"):
        test_merge_is_a_scaled_sum(layout, kind)


def test_blocks_without_rows_have_gradients() -> None:
    """Processes that train together need a gradient of every parameter: zeros where no row went through a block."""
    model = tiny("static", more={"depth": 3}, depth=1)
    model.train()
    model.run(model.choose("gathered", torch.device("cpu")), pictures()).logits.sum().backward()
    for block in model.vit.blocks[1:]:
        assert all(p.grad is not None and not p.grad.any() for p in block.parameters())
