"""Decisions inside fc1 on a real GPU: a part of gpu_check.py."""

from __future__ import annotations

import torch
from gpu_report import close, noise, same

from adaptivit.kernels import halting_gate, norm_linear, pack_index


def check_gate(dtype: torch.dtype, images: int, moves: bool) -> None:
    """A supervisor's decision inside fc1; the seen element itself is compared in check_rows."""
    slots, width = 197, 384
    own = torch.arange(images * slots, device="cuda", dtype=torch.int32)
    stay = torch.rand(images, slots, device="cuda") < (0.6 if moves else 1.0)
    place, cells, offsets, index = pack_index.order(stay, own)
    w, b = noise(4 * width, width, dtype=dtype) * width**-0.5, noise(4 * width, dtype=dtype)
    x, gain, offset = noise(images * slots, width, dtype=dtype), noise(width, dtype=dtype), noise(width, dtype=dtype)
    gamma, beta = (torch.full((12,), value, device="cuda", dtype=dtype)[3] for value in (1.5, -0.5))
    spent, shift = torch.rand(images, slots, device="cuda"), torch.randn(images, 1, device="cuda")
    knows = halting_gate.Gate(gamma, beta, shift, 0.99, 1, spent, stay & (torch.rand_like(spent) < 0.9))
    count, where = (offsets[-1:], (cells, place)) if moves else (None, (None, None))
    given = (x, gain, offset, 1e-6, w, b, index if moves else None, count, 5, True, images * slots, 0)
    out, kept, seen, found = norm_linear.norm_linear_gated(*given, knows, where)
    plain = norm_linear.norm_linear(*given)
    live, name = int(offsets[-1]), f"{str(dtype)[6:]}, {images} images{', moved' * moves}"
    assert plain[2] is not None
    same(f"gate leaves the product alone, {name}", (out[:live], kept[:live]), (plain[0][:live], plain[1][:live]))
    seen[live:] = 0.0
    want = halting_gate.reference(seen, knows, *where)
    close(f"gate score, {name}", found.score, want.score, 1e-6)
    close(f"gate spent, {name}", found.spent, want.spent, 1e-6)
    edge = (want.spent - knows.level).abs() < 1e-5
    if moves:
        same(f"gate, of rows, {name}", (found.rows[:live],), (found.going.flatten()[cells[:live].long()],))
    same(f"gate going, {name}", (found.going | edge,), (want.going | edge,))
