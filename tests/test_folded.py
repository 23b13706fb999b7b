"""Whole passes with norms worked into their products (folded.py) against timm's modules on `masked`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import test_fused as others
import torch
from conftest import random_trace, randomise
from interpreted import DEVICE, here, on_gpu
from test_fused import BACKBONES, CONFIG, HALTING, LARGER, REPLAYED, TRACES, assert_near, assert_same, images_of, make
from test_fused import replaying as replayed
from torch import Tensor

import adaptivit
from adaptivit.budget.control import RunSetting
from adaptivit.decision import Drop, Merge, Skip
from adaptivit.errors import UserError
from adaptivit.execution import cuda_graph, triton
from adaptivit.execution.norm_fused import Folded
from adaptivit.kernels import launch
from adaptivit.kernels.norm_folded import reference_moments
from adaptivit.layouts import GatheredOnDevice, HeadRows, PackedOnDevice, RowSchedule
from adaptivit.layouts.base import KernelRows, RowStats
from adaptivit.model import AdaptiveViT
from adaptivit.output import Output

pytestmark = others.pytestmark
_restored = others._restored
fresh_compiler = others.fresh_compiler
NORMS = 2 * CONFIG["depth"]


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of rows is many."""
    monkeypatch.setattr(triton, "FEW_ROWS", -1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each kernel has run."""
    found = dict.fromkeys(("norm", "normed", "measured", "linear", "norm_linear"), 0)

    def counting(name: str) -> Any:
        run = getattr(triton, name)

        def counted(*args: Any) -> Any:
            found[name] += 1
            return run(*args)

        return counted

    for name in found:
        monkeypatch.setattr(triton, name, counting(name))
    return found


def run(
    model: AdaptiveViT, images: Tensor, layout: str, folded: Folded | None, plan: RowSchedule | None = None
) -> Output:
    launch.on_cpu = True
    with torch.inference_mode():
        choice = model._choose(layout, images.device)
        assert choice.fused
        return model._run(choice, images, plan=plan, folded=folded)


def settled(model: AdaptiveViT, layout: str = "packed", plan: RowSchedule | None = None) -> Folded:
    """As `capture` makes it."""
    folded = Folded(model.vit)
    run(model, images_of(seed=9), layout, folded, plan)
    folded.settle()
    return folded


def check(
    model: AdaptiveViT, calls: dict[str, int], layouts: tuple[str, ...] = (), plan: RowSchedule | None = None
) -> tuple[Output, int]:
    """The pass that finds out what to fold, and those after it, are those of `masked`; and how many norms are folded:
    for each of them rows are measured by the product before it (and once more where they then meet or come back)."""
    images, norms = images_of(), 0
    expected = others.run(model, images, "masked", False)
    for layout in layouts or (("packed", "gathered") if model.policy.equal else ("packed",)):
        folded = Folded(model.vit)
        assert_same(run(model, images, layout, folded, plan), expected)
        norms = folded.norms
        assert folded.settle() == (norms > 0)
        calls.update(dict.fromkeys(calls, 0))
        found = run(model, images, layout, folded, plan)
        assert found.layout == layout
        assert_same(found, expected)
        assert folded.norms == norms
        assert calls["normed"] == calls["measured"] == norms
        assert calls["norm"] == 2 * len(model.vit.blocks) - norms
        assert calls["norm_linear"] == 0
    return expected, norms


# -- passes ---------------------------------------------------------------------------------------------------------
# Of eight norms, the first has no product before it, and the last is often for the class token alone. Rows that meet or
# come back are measured too; those that move are not.
FOLDED = {
    "static": 6,
    "aht": 3,  # tokens leave after every block
    "aht, mean field": 4,
    "aht, folds": 6,
    "avit": 4,
    "evit": 6,
    "dynamicvit": 3,
    "tome": 6,
    "fold": 6,
    "amod": 5,
    "mod": 5,
}


@here
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("case", FOLDED)
def test_policies(case: str, calls: dict[str, int]) -> None:
    output, norms = check(make(case, {"init_values": 0.5}), calls)
    assert case == "static" or not output.trace.attended.all()
    assert norms == FOLDED[case]


@here
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("kind", BACKBONES)
def test_backbones(kind: str, calls: dict[str, int]) -> None:
    if kind == "odd hidden width":
        pytest.skip("refused")
    _, norms = check(make("aht", BACKBONES[kind]), calls)
    assert norms > 0


@here
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("moves", [None, frozenset()], ids=["moves", "still"])
def test_replay(name: str, moves: frozenset[int] | None, calls: dict[str, int]) -> None:
    whole = moves is None and name.startswith("equal")
    _, norms = check(
        replayed(TRACES[name]), calls, ("packed", "gathered") if whole else ("packed",), RowSchedule(moves)
    )
    assert 0 < norms < NORMS


@here
@pytest.mark.usefixtures("many")
def test_a_plan_that_moves_less_folds_more(calls: dict[str, int]) -> None:
    """aht lets tokens leave after every block; where their rows stay, so does what is known of them."""
    model = make("aht")
    found = [check(model, calls, plan=RowSchedule(moves))[1] for moves in (None, frozenset({1}), frozenset())]
    assert found == [3, 5, 6]


@here
def test_few_rows_are_not_measured(calls: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """34 rows, of which 20 are expected from the third block on."""
    rows, moments = torch.zeros(3, 16), RowStats(torch.zeros(1, 2, 3), 16)
    assert [triton.foldable(KernelRows(rows, None, None, n, moments)) for n in (1024, 1025)] == [False, True]
    model = make("aht")
    expected = others.run(model, images_of(), "masked", False)
    plan = RowSchedule(frozenset({1}), (34, 34, 20, 20))
    for few, norms, measured in ((25, 3, 4), (34, 0, 0)):
        monkeypatch.setattr(triton, "FEW_ROWS", few)
        calls.update(dict.fromkeys(calls, 0))
        folded = Folded(model.vit)
        assert_same(run(model, images_of(), "packed", folded, plan), expected)
        assert (calls["normed"], calls["measured"]) == (0, measured)  # which ones are folded is being found out
        assert folded.settle() == (norms > 0)
        assert_same(run(model, images_of(), "packed", folded, plan), expected)
        assert (calls["normed"], calls["measured"]) == (norms, measured + norms)


@here
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("feature", ["fc1", "gelu", "received", "class_row"])
def test_what_a_supervisor_reads(feature: str, calls: dict[str, int]) -> None:
    model = adaptivit.create(CONFIG, "aht", feature=feature, index=3, **HALTING)
    randomise(model.vit)
    output, norms = check(model.to(DEVICE), calls)
    assert not output.trace.attended.all()
    assert norms == 3


@here
@pytest.mark.usefixtures("many")
def test_only_who_folds_measures(calls: dict[str, int]) -> None:
    run(make("static"), images_of(), "packed", None)
    assert calls["measured"] == calls["normed"] == 0
    assert calls["norm"] == NORMS


@here
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("moves", [None, frozenset(), frozenset({1})])
@pytest.mark.parametrize("seed", range(2))
def test_random_answers(moves: frozenset[int] | None, seed: int) -> None:
    """What is known of rows is never that of others, whatever is answered when."""
    kinds = ["none", "drop", "skip", "merge"]
    order = [kinds[i] for i in torch.randint(4, (9,), generator=torch.Generator().manual_seed(seed)).tolist()]
    model = replayed(random_trace(order, seed, 2), {"depth": 3})
    expected = others.run(model, images_of(), "masked", False)
    folded = Folded(model.vit)
    assert_same(run(model, images_of(), "packed", folded, RowSchedule(moves)), expected)
    folded.settle()
    assert_same(run(model, images_of(), "packed", folded, RowSchedule(moves)), expected)


# -- rows that change are not known any more ---------------------------------------------------------------------------
def known(kind: type[PackedOnDevice], batch: int = 2, slots: int = 6, width: int = 16) -> PackedOnDevice:
    x = torch.randn(batch, slots, width, device=DEVICE)
    layout = kind(x, 1)
    assert layout.kernel_rows().moments is None
    rows = layout.rows.clone()
    layout.put(rows, RowStats(torch.zeros(1, 2, len(rows), device=DEVICE), width))
    assert triton.foldable(layout.kernel_rows())
    return layout


@here
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("kind", [PackedOnDevice, GatheredOnDevice])
@torch.inference_mode()
def test_what_is_known_of_rows_is_forgotten_when_they_change(kind: type[PackedOnDevice]) -> None:
    launch.on_cpu = True
    slot = torch.arange(6, device=DEVICE).expand(2, -1)
    layout = known(kind)
    layout.put(layout.rows)
    assert layout.kernel_rows().moments is None

    layout = known(kind)
    layout.merge(Merge(torch.where(slot == 5, 4, slot), torch.ones(2, 6, device=DEVICE)))
    assert layout.kernel_rows().moments is None

    layout = known(kind)
    layout.skip(Skip(slot == 3))
    assert not triton.foldable(layout.kernel_rows())
    layout.unskip()
    assert layout.kernel_rows().moments is None

    layout = known(kind)
    layout.drop(Drop(slot == 3))
    assert not triton.foldable(layout.kernel_rows())
    layout.put(layout.rows)
    assert layout.kernel_rows().moments is None

    for change in ("merge", "come back"):  # where they are measured on the way, it is of what they have become
        layout = known(kind)
        layout.measures = True
        if change == "merge":
            layout.merge(Merge(torch.where(slot == 5, 4, slot), torch.ones(2, 6, device=DEVICE)))
        else:
            layout.skip(Skip(slot == 3))
            layout.put(2 * layout.rows)
            layout.unskip()
        rows, moments = layout.rows, layout.kernel_rows().moments
        assert moments is not None
        of = reference_moments(rows.double(), moments.width)
        live = len(rows) if kind is GatheredOnDevice else int(layout.offsets[-1])
        assert_near(moments.values[..., :live], of[..., :live])

    layout = known(kind)
    layout.plan = RowSchedule(frozenset())
    layout.drop(Drop(slot == 3))
    assert triton.foldable(layout.kernel_rows())  # the rows stay where they are
    assert HeadRows(layout).kernel_rows().moments is None


# -- captured ---------------------------------------------------------------------------------------------------------
class Replay:
    """A graph for machines that have none."""

    def __init__(self, step: Any) -> None:
        self.replay = step


@here
@pytest.mark.usefixtures("many")
def test_a_captured_call_sees_changed_weights(calls: dict[str, int]) -> None:
    """But for the graph itself."""
    model, images = make("aht"), images_of()
    captured = cuda_graph.Captured.__new__(cuda_graph.Captured)
    folded = settled(model)
    pattern = run(model, images, "packed", None)
    made = [t.clone() for t in cuda_graph._tensors(pattern, cuda_graph._masks(pattern)[0])]

    def step() -> None:
        output = run(model, captured._images, "packed", folded)
        for held, now in zip(made, cuda_graph._tensors(output, cuda_graph._masks(output)[0]), strict=True):
            held.copy_(now)

    captured.model, captured.batch, captured._images = model, 2, images.clone()
    captured._ends, captured._turn, captured._folded = (), RunSetting(model.policy), folded  # type: ignore[assignment]
    captured._pattern, captured._made, captured._graph = pattern, made, Replay(step)  # type: ignore[assignment]
    captured.asked, captured.plan, captured.compiled = "auto", None, False
    with torch.inference_mode():
        captured._choice = model._choose("packed", images.device)
    assert "; 3 norms inside products" in captured.explain()
    for change in (lambda: None, lambda: randomise(model.vit, 5)):
        change()
        expected = others.run(model, images, "masked", False)
        assert_same(captured(images), expected)
        calls.update(dict.fromkeys(calls, 0))
        recorded = captured.record(images)
        assert calls["normed"] == folded.norms == 3
        assert_same(recorded, expected)
        assert len(recorded.trace.steps) == len(expected.trace.steps) > 0
    with pytest.raises(UserError, match=r"expected images \(2, .* got \(1, "):
        captured.record(images[:1])
    for p in model.vit.parameters():
        p.data.mul_(0.9)
    captured.refresh()
    assert_same(captured(images), others.run(model, images, "masked", False))


@here
@pytest.mark.usefixtures("fresh_compiler", "many")
@pytest.mark.parametrize("case", ["static", "aht", "tome", "amod", "replay"])
def test_a_captured_pass_is_one_graph(case: str) -> None:
    """What capture gives to torch.compile (but for its backend): traced as a whole; weights that change are no part."""
    change = {"depth": 3}
    model = replayed(REPLAYED, change) if case == "replay" else make(case, change)
    layout = "gathered" if case in ("static", "tome", "amod") else "packed"
    folded = settled(model, layout)
    assert folded.norms > 0
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.inference_mode():
        launch.on_cpu = True
        choice = model._choose(layout, images_of().device)
        first, _ = cuda_graph._masks(model._run(choice, images_of(), folded=folded))

        def step(images: Tensor) -> list[Tensor]:
            return cuda_graph._tensors(model._run(choice, images, folded=folded), first)

        compiled = torch.compile(step, fullgraph=True, dynamic=False, backend=backend)
        compiled(images_of())
        for seed in (1, 2):
            expected, found = step(images_of(seed=seed)), compiled(images_of(seed=seed))
            for one, other in zip(found, expected, strict=True):
                assert_near(one.float(), other.float())
            randomise(model.vit, 5)
            folded.update()
        assert len(graphs) == 1
        assert str(graphs[0].code).count("adaptivit.linear_normed") == folded.norms


@on_gpu
@pytest.mark.usefixtures("fresh_compiler", "many")
@pytest.mark.parametrize(("case", "compiled"), [("static", True), ("aht", False), ("aht", True), ("tome", False)])
def test_a_captured_pass(case: str, compiled: bool) -> None:
    model = make(case, {}, LARGER)
    captured = model.capture(batch=4, compile=compiled)
    apart = model.capture(batch=4, compile=False, fold_norms=False)
    assert "norms inside products" in captured.explain()
    assert "norms inside products" not in apart.explain()
    for batch, seed, weights in ((4, 0, 0), (4, 1, 0), (3, 2, 5), (1, 3, 5)):
        randomise(model.vit, weights)
        images = images_of(LARGER, batch, seed)
        expected = others.run(model, images, "auto", True)
        assert_same(captured(images), expected, 1e-4)
        assert_same(apart(images), expected, 1e-4)
        if batch == 4:
            assert_same(captured.record(images), captured(images), 1e-5)
    for p in model.vit.parameters():
        p.data.mul_(0.9)
    captured.refresh()
    assert_same(captured(images), others.run(model, images, "auto", True), 1e-4)


@on_gpu
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_captured_pass_in_half_precision(dtype: torch.dtype) -> None:
    model, images = make("static", {}, LARGER).to(dtype), images_of(LARGER, 4).to(dtype)
    found = model.capture(batch=4, compile=False)(images)
    expected = others.run(copy.deepcopy(model).float(), images.float(), "masked", False)
    assert_near(found.logits, expected.logits, 3e-2)
