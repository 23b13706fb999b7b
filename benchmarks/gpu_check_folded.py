"""The part of gpu_check.py about norms inside products: python3 benchmarks/gpu_check.py --folded"""

from __future__ import annotations

import copy

import torch
from gpu_report import BOUND, WRONG, attempt, close, noise, rows_of, same

import adaptivit
from adaptivit.evaluation.halting_profiles import drawn_trace
from adaptivit.kernels import linear, norm_folded, norm_linear
from adaptivit.model import AdaptiveViT

MANY = (100, 3000, 6304, 50000)  # one tile each; float32 has one for all


def check_folded(
    dtype: torch.dtype, width: int, live: int, room: int, tiles: tuple[int, ...], mean: float = 0.0
) -> None:
    """A product that measures its rows, and the one behind the norm, by the same tiles as in a block."""
    count = torch.tensor([live], device="cuda", dtype=torch.int32)
    x, residual = (rows_of(live, noise(room, width, dtype=dtype)) for _ in range(2))
    p, b, scale = noise(width, width, dtype=dtype) * width**-0.5, noise(width, dtype=dtype), noise(width, dtype=dtype)
    gain, offset = 1 + noise(width, dtype=dtype) / 4, noise(width, dtype=dtype)
    w, c = noise(4 * width, width, dtype=dtype) * width**-0.5, noise(4 * width, dtype=dtype)
    name = f"{str(dtype)[6:]} width {width} live {live}/{room} mean {mean:.0f}"
    for expected in (6304,) if dtype == torch.float32 else tiles:
        y, moments = norm_folded.measured(x, p, b, residual + mean, scale, count, expected)
        plain = linear.linear(x, p, b, residual + mean, scale, count, False, expected)
        same(f"measured, tile for {expected}, {name}", (y[:live],), (plain[:live],))
        piece = norm_folded.piece(expected, width, dtype)
        want = norm_folded.reference_moments(y.double(), piece, count)[:, :, :live]
        for part, which in enumerate(("means", "squares")):
            close(f"{which}, tile for {expected}, {name}", moments[:, part, :live], want[:, part], 1e-5)
        for gelu, probe in ((False, -1), (True, 4 * width - 3)):
            folded = norm_folded.fold(gain, offset, w, c)
            out, seen = norm_folded.normed(y, moments, piece, 1e-6, *folded, count, probe, gelu, expected)
            given = [t.double() for t in (y, gain, offset)]
            out64, _, seen64 = norm_linear.reference(*given, 1e-6, w.double(), c.double(), None, count, probe, gelu)  # type: ignore[misc]
            bound = BOUND[dtype] * max(1.0, mean / 3 if dtype == torch.float32 else 1.0)
            close(f"normed, tile for {expected}, gelu {gelu}, {name}", out[:live], out64[:live], bound)
            if seen is not None and seen64 is not None:
                # one number of a single row may be near zero, and is not as exact as it is small
                close(f"normed seen, tile for {expected}, {name}", seen[:live], seen64[:live], bound, least=1.0)


@torch.inference_mode()
def check_folded_model(policy: str, dtype: torch.dtype, compiled: bool) -> None:
    """Seven images are rows enough: captured with folded norms, against the masked layout in float32, before and after
    the weights change."""
    torch.manual_seed(0)
    trace = drawn_trace([1, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1], batch=7, tokens=197, seed=1)
    settings = {"trace": trace} if policy == "replay" else {}
    with torch.inference_mode(False):
        model = adaptivit.create("deit_tiny_patch16_224", policy, **settings).cuda().to(dtype)
    images, bound = noise(7, 3, 224, 224, dtype=dtype), 1e-4 if dtype == torch.float32 else 3e-2
    name = f"{policy} {str(dtype)[6:]}, {'compiled' if compiled else 'as it is'}"
    captured, apart = (model.capture(7, compile=compiled, fold_norms=fold) for fold in (True, False))
    for told, found, wanted in (("folded", captured, True), ("apart", apart, False)):
        good = ("norms inside products" in found.explain()) == wanted
        print(f"{'ok   ' if good else 'WRONG'} {name}, {told}: {found.explain()}", flush=True)
        WRONG.extend([] if good else [f"{name}, {told}"])
    for when in ("", ", other weights"):
        twin = AdaptiveViT(copy.deepcopy(model.vit).float(), policy, settings).eval()
        want = twin(images.float(), layout="masked").logits
        close(f"{name}, norms folded{when}", captured(images).logits, want, bound)
        close(f"{name}, norms apart{when}", apart(images).logits, want, bound)
        for p in model.vit.parameters():
            p.mul_(1.1)


def check_kernels() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width, live, room, tiles in (
            *((384, 131, 300, MANY), (384, 1, 1, (6304,)), (192, 65, 65, (6304, 50000)), (768, 200, 201, (6304,))),
            *((208, 7, 70, (6304, 50000)), (80, 65, 66, (6304,))),
        ):
            attempt("folded", lambda d=dtype, w=width, n=live, r=room, t=tiles: check_folded(d, w, n, r, t))  # type: ignore[misc]
        attempt("folded", lambda d=dtype: check_folded(d, 384, 6000, 6304, (6304,), 30.0))  # type: ignore[misc]


def check_models(compiled: bool, part: int = 0, parts: int = 1) -> None:
    cases = [(p, d) for p in ("static", "replay") for d in (torch.bfloat16, torch.float16, torch.float32)]
    for policy, dtype in cases[part::parts]:
        attempt(policy, lambda p=policy, d=dtype: check_folded_model(p, d, compiled))  # type: ignore[misc]
