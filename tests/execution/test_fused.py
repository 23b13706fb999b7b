"""Whole passes through the fused kernels against timm's modules on `masked`: the same tokens, answers and costs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.layers import RmsNorm
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import adaptivit
from adaptivit.budget.control import RunSetting
from adaptivit.decision import Trace
from adaptivit.errors import UserError
from adaptivit.execution import cuda_graph, row_schedule, select, triton
from adaptivit.kernels import launch, ragged_attention
from adaptivit.layouts import PackedOnDevice, RowSchedule
from adaptivit.model import AdaptiveViT
from adaptivit.output import Output
from tests.support.fused import (
    CONFIG,
    HALTING,
    POLICIES,
    WARNINGS,
    _restored,  # noqa: F401  (applies to this file)
    assert_near,
    assert_same,
    images_of,
    make,
    run,
)
from tests.support.interpreter import DEVICE, ON_GPU, here, on_gpu
from tests.support.models import randomise
from tests.support.traces import KINDS, random_trace

pytestmark = WARNINGS

LARGER = CONFIG | {"img_size": 112, "embed_dim": 192, "depth": 6, "num_heads": 3}  # on a GPU
BACKBONES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"qkv_bias": False},
    "no bias at all": {"qkv_bias": False, "proj_bias": False, "pre_norm": True},
    "distilled": {"distilled": True},
    "registers": {"reg_tokens": 2, "no_embed_class": True},
    "average": {"global_pool": "avg"},
    "average without a class token": {"class_token": False, "global_pool": "avg"},
    "any size": {"dynamic_img_size": True, "img_size": 24},
    "wide heads": {"embed_dim": 80, "num_heads": 1, "mlp_ratio": 1.4},
    "odd hidden width": {"mlp_ratio": 1.6},
}
policies = pytest.mark.parametrize("case", POLICIES)


def replaying(trace: Trace, change: dict[str, Any] | None = None) -> AdaptiveViT:
    return AdaptiveViT(make("static", change).vit, "replay", {"trace": trace}).eval()


def check(
    model: AdaptiveViT,
    images: Tensor,
    which: tuple[str, ...] = (),
    aux: tuple[str, ...] = (),
    plan: RowSchedule | None = None,
) -> Output:
    """The fused kernels on these layouts (default: those that the policy can run on) and timm's modules are one."""
    expected = run(model, images, "masked", False, aux)
    for layout in which or (("packed", "gathered") if model.policy.traits.fixed_counts else ("packed",)):
        found = run(model, images, layout, True, aux, plan)
        assert found.layout == layout
        assert_same(found, expected)
        if expected.tokens is not None:
            assert_near(found.tokens, expected.tokens)  # type: ignore[arg-type]
    return expected


# -- passes ---------------------------------------------------------------------------------------------------------
@here
@policies
def test_policies(case: str) -> None:
    model = make(case, {"init_values": 0.5})
    output = check(model, images_of())
    if case not in ("static", "static, fewer blocks"):
        assert not output.trace.attended.all()
        assert output.trace.attended[0].all()


@here
@pytest.mark.parametrize("case", ["evit", "dynamicvit", "amod", "mod"])  # who merges: test_merging_backbones
@pytest.mark.parametrize("kind", ["registers", "average", "distilled"])
def test_equal_policies_on_other_backbones(kind: str, case: str) -> None:
    """Several prefix tokens; a head that reads all, those that left or those that remain."""
    check(make(case, BACKBONES[kind]), images_of(batch=3), ("gathered",), ("tokens",) if kind == "average" else ())


@here
@pytest.mark.parametrize("kind", BACKBONES)
def test_backbones(kind: str) -> None:
    model = make("avit", BACKBONES[kind])
    if kind == "odd hidden width":  # 51 numbers are no whole lot of 16 bytes: run or refused, but right
        launch.on_cpu = True
        with torch.inference_mode():
            assert_same(model(images_of(), layout="packed"), model(images_of(), layout="masked"))
    else:
        check(model, images_of(), aux=("tokens",) if kind == "average" else ())


@here
@pytest.mark.parametrize("case", ["tome", "fold"])
@pytest.mark.parametrize("kind", ["distilled", "registers", "average", "average without a class token", "wide heads"])
def test_merging_backbones(case: str, kind: str) -> None:
    """Prefix tokens of every number, and a head as wide as 80."""
    output = check(make(case, BACKBONES[kind]), images_of(), (), ("tokens",) if kind == "average" else ())
    assert not output.trace.attended.all()


@here
@pytest.mark.parametrize("kind", ["plain", "registers", "average"])
def test_norms_apart_from_their_products(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many rows."""
    monkeypatch.setattr(triton, "FEW_ROWS", 0)
    check(make("evit", BACKBONES[kind]), images_of(), ("gathered",))
    check(make("aht", BACKBONES[kind]), images_of())


def traces() -> Iterator[tuple[str, Trace]]:
    """Random answers; in some, all images drop, skip and merge equally many tokens."""
    answers = ["none", "drop", "none", "skip", "none", "none", "none", "merge", "drop_zeroed", "gate", "none", "share"]
    yield "chosen", random_trace(answers, 9, 2)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        kinds = [KINDS[i] for i in torch.randint(len(KINDS), (12,), generator=g).tolist()]
        equal = seed % 2 == 1
        yield f"{'equal ' if equal else ''}{seed}", random_trace(kinds, seed, 2, equal=equal)


TRACES = dict(traces())


def test_every_kind_of_answer_is_replayed() -> None:
    found = {type(step.decision).__name__ for trace in TRACES.values() for step in trace.steps}
    assert found == {"Keep", "Drop", "Skip", "Merge"}


@here
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("moves", [None, frozenset()], ids=["moves", "still"])
def test_replay(name: str, moves: frozenset[int] | None) -> None:
    whole = moves is None and name.startswith("equal")
    which = ("packed", "gathered") if whole else ("packed",)
    check(replaying(TRACES[name]), images_of(), which, ("tokens",), RowSchedule(moves))


@here
@pytest.mark.parametrize("equal", [False, True])
def test_everything_left_after_the_first_block(equal: bool) -> None:
    kinds = ["none", "none", "drop_all", "none", "drop_all", "none"] + ["none"] * 6
    trace = next(t for t in (random_trace(kinds, s, 2, equal=equal) for s in range(99)) if _emptied(t))
    check(replaying(trace), images_of(), ("packed", "gathered") if equal else ("packed",))


def _emptied(trace: Trace) -> bool:
    gone = torch.stack([step.decision.leaving for step in trace.steps]).any(0)  # type: ignore[union-attr]
    return bool(gone.all())


@here
@pytest.mark.parametrize("case", ["aht", "avit", "aht_merge, by fc1"])
def test_when_rows_move_changes_nothing(case: str) -> None:
    model = make(case)
    expected = run(model, images_of(), "masked", False)
    for plan in (RowSchedule(frozenset()), RowSchedule(frozenset({1}), (34, 30, 20)), RowSchedule(None, (5000,) * 4)):
        assert_same(run(model, images_of(), "packed", True, plan=plan), expected)


@here
@pytest.mark.parametrize("case", ["static", "aht", "aht_merge, by fc1", "fold", "amod", "dynamicvit"])
def test_an_answer_is_the_callers_own(case: str) -> None:
    """Masks of all tokens, and zeros, are constants that are kept: writing to an answer does not change them,
    nor does a pass."""
    model, images = make(case).eval(), images_of()
    layout = "packed" if model.explain_layout().startswith("packed") else "gathered"
    first = run(model, images, layout, True)
    attended, logits = first.trace.attended.clone(), first.logits.clone()
    with torch.inference_mode():
        answers = [first.trace.attended, first.trace.updated, *(s.present for s in first.added_macs)]
        for t in (*answers, *first.trace.facts.values()):
            for part in t if t.ndim else [t]:  # some are expanded
                part.zero_()
    again = run(model, images, layout, True)
    assert torch.equal(again.trace.attended, attended)
    assert torch.equal(again.logits, logits)


@here
def test_one_image_and_facts_on_request() -> None:
    check(make("aht"), images_of(batch=1), aux=("plan", "tokens"))
    model = make("aht")
    found, expected = (run(model, images_of(), *how, aux=("plan",)) for how in (("packed", True), ("masked", False)))
    assert set(found.trace.facts) == set(expected.trace.facts)
    assert_near(found.trace.facts["scores"], expected.trace.facts["scores"])


@here
def test_raw_scores_of_avit() -> None:
    """They need the evidence `ghost`: a zeroed row through the block."""
    model = make("avit")
    found = run(model, images_of(), "packed", True, aux=("raw_scores",))
    expected = run(model, images_of(), "masked", False, aux=("raw_scores",))
    assert_same(found, expected)
    assert_near(found.trace.facts["raw_scores"], expected.trace.facts["raw_scores"])


@here
@pytest.mark.parametrize("feature", ["received", "class_row"])
def test_what_a_supervisor_reads(feature: str) -> None:
    more = {"gate": "shared", "center_per_image": 0.0, "removal": "drop", "gamma": 4.0, "beta": 0.5}
    model = adaptivit.create(CONFIG, "aht_merge", feature=feature, **more)
    randomise(model.vit)
    output = check(model.to(DEVICE), images_of())
    assert not output.trace.attended.all()


# -- what they do not run -------------------------------------------------------------------------------------------
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "norms of q and k": ({"qk_norm": True}, "norms or gates inside"),
    "a norm in the MLP": ({"scale_mlp_norm": True}, "norms or gates inside"),
    "another activation": ({"act_layer": "relu"}, "activation is ReLU"),
    "another GELU": ({"act_layer": "gelu_tanh"}, "activation is"),
    "odd width": ({"embed_dim": 24, "num_heads": 3}, "width 24"),
}


@here
@pytest.mark.parametrize("what", REFUSED)
def test_refused_models_run_without(what: str) -> None:
    change, reason = REFUSED[what]
    model = make("aht", change)
    launch.on_cpu = True
    with torch.inference_mode():
        refusal = triton.refusal(model.backbone, torch.float32, torch.device(DEVICE))
        assert refusal is not None
        assert reason in refusal
        assert_same(model(images_of(), layout="packed"), model(images_of(), layout="masked"))
    if ON_GPU:
        assert reason in model.explain_layout()
        assert "masked on cuda with PyTorch modules" in model.explain_layout()
        assert f"no fused kernels: {refusal}" in model.explain_layout("packed")
    else:
        how = "products in place" if what == "odd width" else "PyTorch modules"
        assert f"packed on cpu with {how}" in model.explain_layout()


@here
@pytest.mark.parametrize("layer", [RmsNorm, partial(nn.LayerNorm, bias=False), partial(nn.LayerNorm, eps=0.1)])
def test_other_norms(layer: Any) -> None:
    """Those that the kernels do not know are refused, the others run."""
    vit = VisionTransformer(**CONFIG, norm_layer=layer)
    randomise(vit)
    model = adaptivit.create(vit, "aht", **HALTING).to(DEVICE).eval()
    launch.on_cpu = True
    with torch.inference_mode():
        reason = triton.refusal(model.backbone, torch.float32, torch.device(DEVICE))
        assert layer is not RmsNorm or "norms are RmsNorm" in str(reason)
        assert_same(model(images_of(), layout="packed"), model(images_of(), layout="masked"))


@here
def test_refusals_that_are_not_the_models() -> None:
    backbone, device = make().backbone, torch.device(DEVICE)
    launch.on_cpu = True
    assert "gradients are on" in str(triton.refusal(backbone, torch.float32, device))
    with torch.inference_mode():
        assert triton.refusal(backbone, torch.float32, device) is None
        assert "float64" in str(triton.refusal(backbone, torch.float64, device))
        with torch.autocast(DEVICE, torch.bfloat16):
            assert "autocast is on" in str(triton.refusal(backbone, torch.float32, device))
        launch.on_cpu = False
        assert "no GPU" in str(triton.refusal(backbone, torch.float32, torch.device("cpu")))


@here
def test_the_layout_is_explained() -> None:
    launch.on_cpu = True
    assert f"packed on {DEVICE} with fused Triton kernels: images differ" in make("aht").explain_layout()
    assert f"gathered on {DEVICE} with fused Triton kernels" in make("static").explain_layout()
    assert f"masked on {DEVICE} with PyTorch modules: asked for" in make("static").explain_layout("masked")
    assert "PyTorch modules: training" in make("aht").train().explain_layout()


@pytest.mark.parametrize("name", ["auto", "packed", "gathered", "masked"])
def test_a_refusal_is_passed_on(name: str) -> None:
    backbone, gpu = make().backbone, torch.device("cuda")
    with torch.enable_grad():
        choice = select.choose(backbone, name, gpu, torch.float32, fixed_counts=False, training=False)
    assert not choice.fused
    assert choice.layout is not PackedOnDevice
    assert name != "auto" or (choice.layout.name == "masked" and "gradients are on" in choice.why)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


REPLAYED = random_trace(["none", "drop", "none", "skip", "none", "none", "none", "merge", "none"], 9, 2)


@here
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("case", "moves"), [("replay", None), ("aht", frozenset({1})), ("replay", frozenset())])
def test_a_captured_pass_is_one_graph(case: str, moves: frozenset[int] | None) -> None:
    """What capture gives to torch.compile (but for its backend): traced as a whole, and the same. The passes of all
    policies are in test_compile_forward.py."""
    change = {"depth": 3}
    model = replaying(REPLAYED, change) if case == "replay" else make(case, change)
    launch.on_cpu = True
    with torch.inference_mode():
        choice = model.choose("auto", images_of().device)
        assert choice.fused

        first, _ = cuda_graph._masks(model.run(choice, images_of(), plan=RowSchedule(moves)))

        def step(images: Tensor) -> list[Tensor]:
            return cuda_graph._tensors(model.run(choice, images, plan=RowSchedule(moves)), first)

        compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="eager")
        compiled(images_of())
        expected, found = step(images_of(seed=1)), compiled(images_of(seed=1))  # who leaves is no part of the graph
        assert not expected[1].all()
        for one, other in zip(found, expected, strict=True):
            assert_near(one.float(), other.float())


@here
def test_what_is_measured_for_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass that is timed runs: one block and four, at every number of rows of a profile, with masks, and with a
    move between them. Each pass here takes as long as it has norms."""
    passes, norms, masks = [], [0], []
    apart, attend = triton.norm, ragged_attention.attend

    def seen(*args: Any) -> Any:
        masks.append(len(args) > 5 and args[5] is not None and args[5].dtype == torch.bool)
        return attend(*args)

    def counted(*args: object) -> object:
        norms[0] += 1
        return apart(*args)  # type: ignore[arg-type]

    def clock(run: Callable[[], object]) -> float:
        norms[0] = 0
        run()
        passes.append(norms[0])
        return float(norms[0])

    monkeypatch.setattr(triton, "norm", counted)
    monkeypatch.setattr(ragged_attention, "attend", seen)
    monkeypatch.setattr(triton, "FEW_ROWS", -1)
    monkeypatch.setattr(row_schedule, "_replayed", clock)
    launch.on_cpu = True
    times = row_schedule.measure(make("aht"), 2, [40.0, 34.0, 16.4, 15.8, 0.2])
    assert times.rows == (2, 16, 34)  # of 17 slots each
    assert passes == [2, 8] * 7
    assert times.block == times.masked == (2,) * 3
    assert times.move == 0
    assert sum(masks) == 3 * 5  # blocks of the passes with masks


@here
@policies
def test_a_captured_answer_has_the_figures_of_its_images(case: str) -> None:
    """Of a batch of three all figures of the first two, in memory of their own."""
    model = make(case)
    first = run(model, images_of(batch=3), "auto", False)
    second = run(model, images_of(batch=3, seed=1), "auto", False)
    made = [tensor.clone() for tensor in cuda_graph._tensors(second, cuda_graph._masks(first)[0])]
    found, expected = cuda_graph._answer(first, made, 2), run(model, images_of(batch=3, seed=1)[:2], "auto", False)
    for tensor in made:
        tensor.zero_()
    for name, macs in expected.parts.items():
        assert torch.equal(found.parts[name], macs), name
    assert_same(found, expected)


@here
def test_a_captured_call_and_its_record() -> None:
    """All of `Captured` but the graph itself: the pass runs again in its place."""
    model, images = make("aht"), images_of()
    captured = cuda_graph.Captured.__new__(cuda_graph.Captured)
    pattern = run(model, images, "packed", True)
    made = [t.clone() for t in cuda_graph._tensors(pattern, cuda_graph._masks(pattern)[0])]

    def replay() -> None:
        output = run(model, captured._images, "packed", True)
        for held, now in zip(made, cuda_graph._tensors(output, cuda_graph._masks(output)[0]), strict=True):
            held.copy_(now)

    captured.model, captured.batch, captured._images = model, 2, images.clone()
    captured._ends, captured._setting = (), RunSetting(model.policy)  # type: ignore[assignment]
    captured._pattern, captured._made = pattern, made
    captured._graph = SimpleNamespace(replay=replay)  # type: ignore[assignment]
    captured.asked, captured.plan, captured.compiled = "auto", None, False
    with torch.inference_mode():
        captured._choice = model.choose("packed", images.device)
    assert captured.explain().startswith("one CUDA graph of 2 images, as it is: packed")
    expected = run(model, images, "masked", False)
    recorded = captured.record(images)
    assert_same(recorded, expected)
    assert len(recorded.trace.steps) == len(expected.trace.steps) > 0
    with pytest.raises(UserError, match=r"expected images \(2, .* got \(1, "):
        captured.record(images[:1])
    if ON_GPU:  # a call refuses images on a CPU
        assert_same(captured(images), expected)


@pytest.mark.parametrize("case", ["static", "amod", "aht", "tome"])
@pytest.mark.parametrize("images", [1, 2, 3])
@pytest.mark.parametrize("same", [True, False])
def test_a_captured_answer_of_a_part_of_its_batch(case: str, images: int, same: bool) -> None:
    """Any number of images, in memory of their own and no more than they need, also where dtypes differ."""
    model = make(case)
    output = run(model, images_of(batch=3), "auto", False)
    if not same:
        output = replace(output, features=output.features.double())
    made = [tensor.clone() for tensor in cuda_graph._tensors(output, cuda_graph._masks(output)[0])]
    assert len(made) == (2 if same else 3)
    found = cuda_graph._answer(output, made, images)
    for tensor in made:
        tensor.zero_()
    for name in ("logits", "features"):
        one, whole = getattr(found, name), getattr(output, name)
        assert one.dtype == whole.dtype
        assert torch.equal(one, whole[:images])
        assert one.is_contiguous()
        if images < 3:
            assert one.untyped_storage().nbytes() == one.numel() * one.element_size()
    assert torch.equal(found.trace.attended, output.trace.attended[:, :images])
    assert torch.equal(found.trace.updated, output.trace.updated[:, :images])
    assert (found.trace.updated is found.trace.attended) == (output.trace.updated is output.trace.attended)
    assert torch.equal(found.macs, output.macs[:images])


def test_capture_needs_a_gpu() -> None:
    with pytest.raises(UserError, match="needs the model on a GPU"):
        make().cpu().capture(batch=2)


# -- on a GPU -------------------------------------------------------------------------------------------------------
@on_gpu
@policies
def test_bfloat16_against_a_replay_in_float32(case: str) -> None:
    model = make(case, {"init_values": 0.5}, LARGER).to(torch.bfloat16)
    images = images_of(LARGER, 4).to(torch.bfloat16)
    for layout in ("packed", "gathered") if model.policy.traits.fixed_counts else ("packed",):
        found = run(model, images, layout, True)
        trace = found.trace
        replay = AdaptiveViT(copy.deepcopy(model.vit).float(), "replay", {"trace": trace}).eval()
        expected = run(replay, images.float(), "masked", False)
        assert torch.equal(trace.attended, expected.trace.attended)
        assert torch.equal(trace.updated, expected.trace.updated)
        assert_near(found.logits, expected.logits, 3e-2)


@on_gpu
@policies
def test_nobody_waits_for_the_gpu(case: str) -> None:
    model, images = make(case, {}, LARGER), images_of(LARGER, 4)
    for layout in ("packed", "gathered") if model.policy.traits.fixed_counts else ("packed",):
        expected = run(model, images, layout, True)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = run(model, images, layout, True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_same(found, expected)


@on_gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("case", "compiled"), [*((case, False) for case in POLICIES), ("aht", True), ("evit", True)])
def test_a_captured_pass(case: str, compiled: bool) -> None:
    """Other images halt elsewhere, and the last batch may be smaller: the same graph."""
    model = make(case, {}, LARGER)
    captured = model.capture(batch=4, compile=compiled)
    first = captured(images_of(LARGER, 4))
    kept = first.logits.clone()
    for batch, seed in ((4, 0), (4, 1), (3, 2), (1, 3)):
        images = images_of(LARGER, batch, seed)
        assert_same(captured(images), run(model, images, "auto", True), 1e-4)
    assert torch.equal(first.logits, kept)  # the answer is the caller's own


@on_gpu
@pytest.mark.parametrize("batch", [1, 64])
def test_a_capture_with_a_profile(batch: int) -> None:
    model, images = make("aht", {}, LARGER), images_of(LARGER, batch)
    captured = model.capture(batch, profile=images, compile=False)
    assert captured.plan is not None
    assert captured.plan.moves is not None
    assert len(captured.plan.rows) == LARGER["depth"]
    assert_same(captured(images), run(model, images, "auto", True), 1e-4)


@on_gpu
def test_a_capture_is_refused() -> None:
    model, images = make("aht"), images_of(batch=2)
    with pytest.raises(UserError, match="training mode"):
        model.train().capture(batch=2)
    with pytest.raises(UserError, match="at least 1 image"):
        model.eval().capture(batch=0)
    captured = model.capture(batch=2, compile=False)
    assert "one CUDA graph of 2 images" in captured.explain()
    assert "packed on cuda with fused" in captured.explain()
    with pytest.raises(UserError, match="up to 2 images, got 3"):
        captured(images_of(batch=3))
    with pytest.raises(UserError, match="Captured for images"):
        captured(images.cpu())
    model.half()
    with pytest.raises(UserError, match="capture it again"):
        captured(images.half())


@on_gpu
def test_weights_may_change_after_capture() -> None:
    model, images = make("aht"), images_of(batch=2)
    captured = model.capture(batch=2, compile=False)
    randomise(model.vit, 5)
    assert_same(captured(images), run(model, images, "auto", True), 1e-4)
