"""The kernels on a real GPU against float64 references, without pytest: python3 benchmarks/gpu_check.py

The tests in tests/kernels and tests/execution do this and more; this script needs nothing but the checkout,
for machines where nothing can be installed. Exit code 1 where something is wrong. --compiled: see --help.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from gpu_report import BOUND, WRONG, attempt, close, noise, rows_of, same
from torch import Tensor

import adaptivit
from adaptivit.decision import Trace
from adaptivit.evaluation.halting_profiles import drawn_trace
from adaptivit.kernels import (
    attention,
    attention_scores,
    bipartite_match,
    constants,
    launch,
    linear,
    merge,
    merge_assign,
    nearest_token,
    norm,
    norm_linear,
    pack_index,
    patch_embed,
    ragged_attention,
    scores_and_keys,
    threshold_gate,
    topk,
    unskip,
    weighted_attention,
)
from adaptivit.kernels.merge_score import MergeScore
from adaptivit.model import AdaptiveViT


def check_rows(dtype: torch.dtype, width: int, live: int, room: int) -> None:
    x, count = rows_of(live, noise(room, width, dtype=dtype)), torch.tensor([live], device="cuda", dtype=torch.int32)
    w, b = noise(3 * width, width, dtype=dtype) * width**-0.5, noise(3 * width, dtype=dtype)
    p, c, scale = noise(width, width, dtype=dtype) * width**-0.5, noise(width, dtype=dtype), noise(width, dtype=dtype)
    d64 = [t.double() for t in (x, w, b, p, c, scale)]
    name = f"{str(dtype)[6:]} width {width} live {live}/{room}"
    for expected in (100, 5000, 6304, 30000):
        out = linear.linear(x, w, b, None, None, count, True, expected)[:live]
        close(
            f"linear gelu, tile for {expected}, {name}",
            out,
            linear.reference(*d64[:3], rows=count, gelu=True)[:live],
            BOUND[dtype],
        )
        out = linear.linear(x, p, c, x, scale, count, False, expected)[:live]
        want = linear.reference(d64[0], d64[3], d64[4], d64[0], d64[5], count)[:live]
        close(f"linear residual, tile for {expected}, {name}", out, want, BOUND[dtype])
    index = torch.randint(0, live, (room,), device="cuda", dtype=torch.int32)
    y, kept, seen = norm.norm(launch.KernelRows(x, index, count), c, scale, 1e-6, w[5], b[5:6])
    want64 = norm.reference(d64[0], d64[4], d64[5], 1e-6, index, count, d64[1][5], d64[2][5:6])
    for part, out, want in zip(("y", "kept", "seen"), (y, kept, seen), want64, strict=True):
        assert out is not None
        assert want is not None
        close(f"norm {part}, {name}", out[:live], want[:live], BOUND[dtype])
    if norm_linear.split(width):
        want64 = norm_linear.reference(d64[0], d64[4], d64[5], 1e-6, d64[1], d64[2], index, count, 5, True)
        for expected in (9, 500):
            given = launch.KernelRows(x, index, count, expected)
            made = norm_linear.norm_linear(given, c, scale, 1e-6, w, b, 5, True)[:3]
            for part, out, want in zip(("out", "kept", "seen"), made, want64, strict=True):
                assert out is not None
                assert want is not None
                close(f"norm_linear {part}, tile for {expected}, {name}", out[:live], want[:live], BOUND[dtype])


def check_gate(dtype: torch.dtype, images: int, moves: bool) -> None:
    """The gate inside fc1; the element itself is compared in check_rows."""
    slots, width = 197, 384
    own = torch.arange(images * slots, device="cuda", dtype=torch.int32)
    stay = torch.rand(images, slots, device="cuda") < (0.6 if moves else 1.0)
    place, cells, offsets, index = pack_index.pack_index(stay, own)
    w, b = noise(4 * width, width, dtype=dtype) * width**-0.5, noise(4 * width, dtype=dtype)
    x, gain, offset = noise(images * slots, width, dtype=dtype), noise(width, dtype=dtype), noise(width, dtype=dtype)
    scale, shift0 = (torch.full((12,), value, device="cuda", dtype=dtype)[3] for value in (1.5, -0.5))
    total, shift = torch.rand(images, slots, device="cuda"), torch.randn(images, 1, device="cuda")
    gate = threshold_gate.ThresholdGate(scale, shift0, shift, 0.99, 1, total, stay & (torch.rand_like(total) < 0.9))
    rows = launch.KernelRows(x, index if moves else None, offsets[-1:] if moves else None, images * slots)
    where = (cells, place) if moves else (None, None)
    given = (rows, gain, offset, 1e-6, w, b, 5, True)
    out, kept, element, found = norm_linear.norm_linear(*given, gate=gate, where=where)
    plain = norm_linear.norm_linear(*given)
    live, name = int(offsets[-1]), f"{str(dtype)[6:]}, {images} images{', moved' * moves}"
    assert element is not None
    assert found is not None
    same(f"gate leaves the product alone, {name}", (out[:live], kept[:live]), (plain[0][:live], plain[1][:live]))
    element[live:] = 0.0
    want = threshold_gate.reference(element, gate, *where)
    close(f"gate score, {name}", found.score, want.score, 1e-6)
    close(f"gate total, {name}", found.total, want.total, 1e-6)
    edge = (want.total - gate.threshold).abs() < 1e-5
    if moves:
        same(f"gate, of rows, {name}", (found.active_rows[:live],), (found.active.flatten()[cells[:live].long()],))
    same(f"gate active, {name}", (found.active | edge,), (want.active | edge,))


def check_attention(dtype: torch.dtype, width: int, lengths: list[int]) -> None:
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    room, live = sum(lengths) + 7, sum(lengths)
    q, k, v = rows_of(live, noise(room, 3, 2, width, dtype=dtype)).unbind(1)
    sizes = torch.rand(room, device="cuda") * 3 * (torch.rand(room, device="cuda") < 0.7)
    for kind, weight in (("none", None), ("bool", sizes > 0), ("sizes", sizes)):
        name = f"{str(dtype)[6:]} d {width} lengths {lengths[:4]}, weight {kind}"
        q64, k64, v64 = (t.double() for t in (q, k, v))
        out = ragged_attention.attend(q, k, v, offsets, max(lengths), weight)[:live]
        close(f"attend {name}", out, ragged_attention.reference(q64, k64, v64, offsets, weight)[:live], BOUND[dtype])
        row = scores_and_keys.class_row(q, k, offsets, max(lengths), weight)[:live]
        want = scores_and_keys.class_row_reference(q64, k64, offsets, weight)[:live]
        close(f"class row {name}", row, want, BOUND[dtype])
        row = attention_scores.received(q, k, offsets, max(lengths), weight)[:live]
        close(f"received {name}", row, attention_scores.reference(q64, k64, offsets, weight)[:live], BOUND[dtype])


def check_similar(dtype: torch.dtype, width: int, slots: int, ragged_rows: bool) -> None:
    """Cosines against float64; the tokens that are found, where the float64 cosine of no other is within 1e-6."""
    here = torch.rand(9, slots, device="cuda") < 0.7 if ragged_rows else torch.ones(9, slots, device="cuda").bool()
    cells = here.flatten().nonzero()[:, 0]
    live, among = len(cells), torch.rand(9, slots, device="cuda") < 0.6
    k = rows_of(live, noise(live + 7, 3, 4, width, dtype=dtype) + noise(4, width, dtype=dtype))[:, 1]
    index = torch.cat([cells, cells.new_zeros(7)]).int()
    offsets = torch.cat([cells.new_zeros(1), here.sum(-1).cumsum(0)]).int()
    name = f"{str(dtype)[6:]} d {width} n {slots} {'ragged' if ragged_rows else 'equal'}"
    units = scores_and_keys.unit_keys(k, index, offsets, slots)
    x = k[:live].double().mean(1)
    exact = torch.zeros(9 * slots, width, device="cuda", dtype=torch.float64)
    exact[cells] = x / x.norm(dim=-1, keepdim=True)
    close(f"units {name}", units[cells].double().sum(1) / 64, exact[cells], 2e-7)
    row, again = scores_and_keys.class_row_and_unit_keys(k.contiguous(), k, index, offsets, slots, None, slots)
    apart = scores_and_keys.class_row(*launch.alike(k.contiguous(), k), offsets, slots)
    same(f"class row and unit keys {name}", (row[:live], again[cells]), (apart[:live], units[cells]))
    u = exact.unflatten(0, (9, slots))
    cosine = (u @ u.transpose(1, 2)).masked_fill(torch.eye(slots, device="cuda").bool(), float("-inf"))

    def compare(what: str, value: Tensor, slot: Tensor, cosine: Tensor) -> None:
        two = cosine.topk(2, -1) if cosine.shape[-1] > 1 else cosine.expand(*cosine.shape[:2], 2).topk(2, -1)
        best, some = two.values[..., 0], two.values[..., 0] > float("-inf")
        close(f"{what} {name}", value[some], best[some], 1e-6)
        clear = ~some | (two.values[..., 0] - two.values[..., 1] > 1e-6)
        same(f"{what}: who, {name}", (slot[clear],), (torch.where(some, two.indices[..., 0], -1)[clear],))

    allowed = here[:, :, None] & (among & here)[:, None, :]
    found = nearest_token.nearest(units, index, offsets, among, here)
    compare("nearest", *found, cosine.masked_fill(~allowed, float("-inf")))
    leaving, patches_ = ~among, here & (torch.arange(slots, device="cuda") > 0)
    stay = (patches_ & ~leaving)[:, None, :] & (patches_ & leaving)[:, :, None]
    size, say = torch.rand(2, *here.shape, device="cuda") + 0.1
    with torch.inference_mode():
        into, scale, after, left = merge_assign.merge_assign(units, patches_, here, size, say, leaving, None, 0)
    same(f"merge assign, left {name}", left[1:], ((here & ~leaving).sum(-1).int(),))
    best = cosine.masked_fill(~stay, float("-inf"))
    compare("merge assign", best.max(-1).values, torch.where(leaving, into, -1), best)
    exact = merge.mean_weights_reference(into, size.double(), here, say.double())
    for part, out, want in zip(("weight", "size"), (scale, after), exact, strict=True):
        close(f"merge assign, {part} {name}", out, want, 1e-5)
    score = noise(*here.shape, dtype=torch.float32)
    with torch.inference_mode():
        for merge_score in (
            MergeScore(score, None, 0.5, 0.5),
            MergeScore(score.abs(), found[0].clamp(-1, 1), 0.5, 0.5),
        ):
            by, its = merge_score.numbers(size)
            rest = topk.reference(by, patches_, 3, rest=True)
            one = merge_assign.merge_assign(units, patches_, here, size, None, None, merge_score, 3)
            two = merge_assign.merge_assign(units, patches_, here, size, its, rest, None, 0)
            assert one is not None and two is not None  # noqa: PT018
            same(f"merge assign, by score {name}", one[:1], two[:1])
            close(f"merge assign, by score, weight {name}", one[1], two[1], 1e-6)
    if not ragged_rows and slots > 3:
        order = torch.stack([torch.cat([cells.new_zeros(1), torch.randperm(slots - 1, device="cuda") + 1])] * 9)
        a, b = order[:, ::2], order[:, 1::2]
        value, slot = nearest_token.match(units, a, b, slots, 1)
        column = torch.where(slot < 0, -1, (slot[..., None] == b[:, None]).long().argmax(-1))
        pick = cosine.gather(1, a[..., None].expand(-1, -1, slots)).gather(2, b[:, None].expand(-1, a.shape[1], -1))
        compare("match", value, column, pick.masked_fill((a < 1)[..., None], float("-inf")))
        given = (value, slot, order, here, (slots - 1) // 3, 1)
        got, want = bipartite_match.bipartite_match(*given), bipartite_match.reference(*given)
        same(f"bipartite match {name}", got, want)


def check_weighted(dtype: torch.dtype, width: int, tokens: int) -> None:
    given = [noise(2, 3, tokens, width, dtype=dtype).requires_grad_() for _ in range(3)]
    weight = (torch.rand(2, tokens, device="cuda") * 2 * (torch.rand(2, tokens, device="cuda") < 0.6)).requires_grad_()
    with torch.no_grad():
        weight[:, 0] = 1.0  # no image without any key: the reference has no gradient there
    twin = [t.detach().double().requires_grad_() for t in (*given, weight)]
    out = weighted_attention.attention(*given, weight)
    grad = noise(*out.shape, dtype=dtype)
    out.backward(grad)
    want = attention.probabilities(*twin[:2], twin[3]) @ twin[2].float()
    want.backward(grad.float())
    close(f"weighted {str(dtype)[6:]} d {width} n {tokens}", out, want, BOUND[dtype])
    for name, a, b in zip(("dq", "dk", "dv", "dw"), (*given, weight), twin, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        close(f"weighted {name} {str(dtype)[6:]} d {width} n {tokens}", a.grad, b.grad, 3 * BOUND[dtype], 1.0)


@torch.inference_mode()
def check_selection(batch: int, slots: int) -> None:
    name, wanted = f"of {batch} images of {slots}", slots * 2 // 3
    score = noise(batch, slots, dtype=torch.float32)
    score[:, ::5], score[:, 1::7], score[:, 2::11] = 0.25, float("nan"), float("-inf")
    among = torch.rand(batch, slots, device="cuda") < 0.9
    for rest in (False, True):
        top = topk.topk(score, among, wanted, rest=rest)
        same(f"topk {name}, rest {rest}", (top,), (topk.reference(score, among, wanted, rest),))
    stay = topk.reference(score, torch.ones_like(among), wanted)
    cells = torch.arange(stay.numel(), device="cuda", dtype=torch.int32)
    same(f"order {name}, equal", pack_index.pack_index(stay, cells, wanted), pack_index.reference(stay, cells, wanted))
    some = among & stay
    same(f"order {name}", pack_index.pack_index(some, cells), pack_index.reference(some, cells))
    goes = (stay.float() + 1e-9).multinomial(slots, replacement=True)
    goes = torch.where(torch.rand(batch, slots, device="cuda") < 0.2, -1, goes)
    into = torch.where(stay, torch.arange(slots, device="cuda"), goes)
    size, say = 1.0 + torch.randint(5, (batch, slots), device="cuda"), torch.rand(batch, slots, device="cuda")
    scale, after = merge.mean_weights(into, size, among, say)
    want_scale, want_after = merge.mean_weights_reference(into, size.double(), among, say.double())
    close(f"mean weights {name}", scale, want_scale, 1e-6)
    close(f"sizes {name}", after, want_after, 1e-7)


@torch.inference_mode()
def check_merge(dtype: torch.dtype, width: int, batch: int, slots: int, equal: bool) -> None:
    name = f"{str(dtype)[6:]} width {width}, {batch} images of {slots}, {'equal' if equal else 'ragged'}"
    rows = noise(batch * slots + 3, width, dtype=dtype)
    live = torch.ones(batch, slots, dtype=torch.bool, device="cuda")
    if not equal:
        live = torch.rand(batch, slots, device="cuda") < torch.rand(batch, 1, device="cuda")
    score = torch.rand(batch, slots, device="cuda")
    kept = slots * 3 // 4
    stay = topk.reference(score, live, kept)
    goes = (stay.float() + 1e-9).multinomial(slots, replacement=True)
    goes = torch.where(torch.rand(batch, slots, device="cuda") < 0.2, -1, goes)
    into = torch.where(stay, torch.arange(slots, device="cuda"), goes)
    cells = torch.arange(batch * slots, device="cuda", dtype=torch.int32)
    place, _, offsets, index = pack_index.reference(live, cells)
    rows = rows_of(int(offsets[-1]), torch.cat([rows[index], rows[-3:]]))
    scale, count = torch.rand(batch, slots, device="cuda"), kept if equal else None
    got, _ = merge.merge(rows, live, into, scale, place, count)
    want = merge.reference(rows.double(), live, into, scale.double(), place, count)
    number = int(want[4][-1])
    close(f"merge {name}", got[0][:number], want[0][:number], {torch.float32: 2e-6}.get(dtype, BOUND[dtype] / 2))
    same(f"merge's places {name}", got[1:], want[1:])
    left = got[1].sum(-1).int()
    again, weight = merge.merge(rows, live, into, scale, place, count, scale, left)
    assert weight is not None
    logs = scale.flatten()[got[3][:number].long()].double().log2()
    close(f"merge's weights {name}", weight[:number], logs, 1e-6)
    same(f"merge with counts {name}", (again[0][:number],), (got[0][:number],))
    bad = rows.clone()
    bad[0] = float("nan")
    found = merge.merge(bad, live, into, scale, place, count)[0][0][:number]
    known = merge.reference(bad, live, into, scale, place, count)[0][:number]
    same(f"a bad row in merge {name}", (found.isfinite(),), (known.isfinite(),))
    took_part = live & stay
    there, _, ends, _ = pack_index.reference(took_part, place)
    moved = rows_of(int(ends[-1]), noise(batch * slots, width, dtype=dtype))
    _, whose, limits, _ = pack_index.reference(live, cells)
    for share in (None, scale):
        wide = None if share is None else share.double()
        out = unskip.unskip(rows[: batch * slots], whose, moved, there, share, limits[-1:])
        known = unskip.reference(rows[: batch * slots].double(), whose, moved.double(), there, wide, limits[-1:])
        stop = int(limits[-1])
        close(f"unskip {name}, gate {share is not None}", out[:stop], known[:stop], BOUND[dtype] / 2)


@torch.inference_mode()
def check_model(policy: str, settings: dict[str, object], dtype: torch.dtype, compiled: bool, batch: int = 5) -> None:
    """Five images are few rows, seven many."""
    torch.manual_seed(0)
    with torch.inference_mode(False):
        model = adaptivit.create("deit_tiny_patch16_224", policy, **settings).cuda().to(dtype)
    images = noise(batch, 3, 224, 224, dtype=dtype)
    model(images)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = model(images)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    shown = f"{policy} {', '.join(settings)}, {batch} images"
    float32 = copy.deepcopy(model.vit).float()

    def replayed(decided: Trace) -> Tensor:
        return AdaptiveViT(float32, "replay", {"trace": decided}).eval()(images.float(), layout="masked").logits

    close(f"{shown} {str(dtype)[6:]}, {out.layout}", out.logits, replayed(out.trace), 3e-2)
    captured = model.capture(batch, compile=compiled)
    one, recorded = captured(images), captured.record(images)
    close(f"{shown}, captured", one.logits, replayed(recorded.trace), 3e-2)
    alike = float((one.trace.attended == recorded.trace.attended).double().mean())
    good = alike >= (0.99 if compiled else 1.0)  # compiled scores round otherwise, too
    print(f"{'ok   ' if good else 'WRONG'} {shown}, captured, decisions as recorded {100 * alike:.2f} %", flush=True)
    WRONG.extend([] if good else [f"{shown}, captured, decisions"])
    close(f"{shown}, captured, MACs", one.macs, out.macs, 2e-2)
    if policy == "replay":  # it knows places, not images
        two = captured(images[:2]).logits
    else:
        two = captured(images[:2].flip(0).contiguous()).logits.flip(0)
    close(f"{shown}, captured, smaller batch", two, one.logits[:2], 2e-2)


def check_kernels() -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for width, live, room in ((384, 1, 1), (384, 131, 300), (192, 0 + 65, 65), (768, 200, 201)):
            attempt("rows", lambda d=dtype, w=width, n=live, r=room: check_rows(d, w, n, r))  # type: ignore[misc]
        for width in (32, 64, 80):
            attempt("attention", lambda d=dtype, w=width: check_attention(d, w, [1, 0, 197, 64, 33]))  # type: ignore[misc]
        for images, moves in ((1, False), (1, True), (5, True)):
            attempt("gate", lambda d=dtype, i=images, m=moves: check_gate(d, i, m))  # type: ignore[misc]
        attempt("long", lambda d=dtype: check_attention(d, 64, [1025, 1, 577]))  # type: ignore[misc]
        for width, tokens in ((64, 197), (32, 1), (80, 65), (64, 1025)):
            for kind in (False, True):
                attempt("similar", lambda d=dtype, w=width, n=tokens, r=kind: check_similar(d, w, n, r))  # type: ignore[misc]
        for width, tokens in ((64, 197), (32, 1), (80, 65)):
            attempt("weighted", lambda d=dtype, w=width, n=tokens: check_weighted(d, w, n))  # type: ignore[misc]
        for width, batch, slots in ((384, 32, 197), (192, 1, 17), (48, 3, 1025), (768, 256, 197)):
            for equal in (True, False):
                attempt(
                    "merge",
                    lambda d=dtype, w=width, b=batch, n=slots, e=equal: check_merge(d, w, b, n, e),  # type: ignore[misc]
                )
    for batch, slots in ((1, 1), (32, 197), (256, 197), (3, 1025), (40, 577)):
        attempt("selection", lambda b=batch, n=slots: check_selection(b, n))  # type: ignore[misc]
    stay = torch.rand(300, 197, device="cuda") < 0.5
    cells = torch.arange(stay.numel(), device="cuda", dtype=torch.int32)
    for images in (1, 40, 300):
        got, want = (f(stay[:images], cells[: images * 197]) for f in (pack_index.pack_index, pack_index.reference))
        same(f"order of {images} images", got, want)
    with torch.inference_mode():
        masks = [stay[:, ::2], stay[:, 1::2].T.contiguous().T, *(stay[:, :99] for _ in range(10))]
        masks = [mask[:, :98] for mask in masks]
        same("masks stacked", (constants.stacked(masks),), (torch.stack(masks),))
    pixels, w, b = (
        noise(3, 3, 224, 224, dtype=torch.bfloat16),
        noise(192, 768, dtype=torch.bfloat16) / 28,
        noise(192, dtype=torch.bfloat16),
    )
    at, lead = noise(196, 192, dtype=torch.bfloat16), noise(2, 192, dtype=torch.bfloat16)
    want = patch_embed.reference(*(t.double() for t in (pixels, w, b, at, lead)), (16, 16))
    close("patches", patch_embed.patch_embed(pixels, w, b, at, lead, 16, 16), want, BOUND[torch.bfloat16])
    check_models(compiled=False)


def policies(batch: int) -> list[tuple[str, dict[str, object]]]:
    trace = drawn_trace([1, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1], batch=batch, tokens=197, seed=1)
    plain: dict[str, object] = {"gate": "shared", "center_per_image": 0.0, "halt_point": "after"}
    plain["halting_blocks"] = tuple(range(11))
    return [
        *(("static", {}), ("static", {"depth": 5}), ("replay", {"trace": trace})),
        ("aht", {"gamma": 10, "beta": -4.0}),
        ("aht_merge", plain | {"gamma": 10, "beta": -4.0, "feature": "fc1"}),
        ("aht_merge", plain | {"gamma": 4, "beta": -9.0}),
        ("aht_merge", plain | {"gamma": 4, "beta": -6.0, "halting_blocks": (3, 6, 9)}),
        ("avit", {"gate_scale": 10, "gate_center": 2.0}),
        *(("amod", {}), ("mod", {}), ("tome", {"r": 13}), ("fold", {}), ("evit", {}), ("dynamicvit", {})),
        *(("dynamicvit", {"removal": "merge"}), ("confidence", {})),
    ]


def check_models(compiled: bool, part: int = 0, parts: int = 1) -> None:
    for batch in (5, 7):
        for policy, settings in policies(batch)[part::parts]:
            attempt(
                policy,
                lambda p=policy, s=settings, b=batch: check_model(p, s, torch.bfloat16, compiled, b),  # type: ignore[misc]
            )


def main() -> None:
    """every N-th policy, from the I-th (0 first), captured after torch.compile, and nothing else: run N side by side"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiled", metavar="I/N", help=main.__doc__)
    given = parser.parse_args()
    if given.compiled:
        share = [int(part) for part in given.compiled.split("/")]
        check_models(True, *share)
    else:
        check_kernels()
    print(f"{len(WRONG)} wrong: {WRONG}")
    sys.exit(1 if WRONG else 0)


if __name__ == "__main__":
    main()
