"""Halting profiles: how many patches are still live in each block. For benchmarks of models without trained weights.

Speed depends on how many tokens live where, not on which or why. torch is imported on use, so that --help is instant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import UserError, unknown

if TYPE_CHECKING:
    from ..decision import Trace

# Mean share of the patches that are live in each of 12 blocks; other depths are resampled.
PROFILES: dict[str, tuple[float, ...]] = {
    "none": (1.0,) * 12,
    "90": (1, 1, 0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.86, 0.82, 0.78, 0.76),
    "65": (1, 1, 0.95, 0.85, 0.8, 0.7, 0.65, 0.55, 0.45, 0.35, 0.28, 0.22),
    "50": (1, 0.9, 0.75, 0.6, 0.55, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15),
    "halting": (1, 1, 1, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25),
}
REPLAY = "replay:"  # a recorded trace instead of a name: replay:FILE


def check(name: str) -> None:
    """Refuse what is neither a named profile nor replay:FILE."""
    if name.startswith(REPLAY):
        if not name.removeprefix(REPLAY):
            raise UserError("profile: expected replay:FILE with a trace saved by adaptivit.save_trace, got no FILE.")
    elif name not in PROFILES:
        raise unknown("profile", name, (*PROFILES, "replay:FILE"))


def resampled(profile: Sequence[float], layers: int) -> list[float]:
    """The profile for another depth: first and last block stay, straight lines between neighbours."""
    if layers == 1:
        return [float(profile[0])]
    shares = []
    for layer in range(layers):
        place = layer * (len(profile) - 1) / (layers - 1)
        low = min(int(place), len(profile) - 2)
        shares.append(float(profile[low] + (profile[low + 1] - profile[low]) * (place - low)))
    return shares


def drawn_trace(profile: Sequence[float], batch: int, tokens: int, seed: int, prefix: int = 1) -> Trace:
    """A random trace: each patch is live in a block with the probability of the profile.

    Counts differ from image to image. The first `prefix` tokens stay. Tokens never come back, so a profile falls.
    """
    import torch

    from ..decision import AppliedDecision, Drop, Trace

    luck = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed))
    luck[:, :prefix] = -1.0
    live = luck < profile[0]
    if not live.all():
        raise UserError(f"profile: expected every patch in the first block (1.0), got {profile[0]}.")
    steps, attended = [], [live]
    for layer, share in enumerate(profile[1:]):
        stays = live & (luck < share)
        if not torch.equal(stays, live):
            steps.append(AppliedDecision(layer, "after", Drop(live & ~stays)))
        live = stays
        attended.append(live)
    grid = torch.stack(attended)
    return Trace(grid, grid, prefix, tuple(steps))


def trace_of(name: str, *, layers: int, batch: int, tokens: int, prefix: int, seed: int) -> Trace:
    """The trace of a named profile, or the one in a file, which must fit."""
    check(name)
    if not name.startswith(REPLAY):
        return drawn_trace(resampled(PROFILES[name], layers), batch, tokens, seed, prefix)
    from ..checkpoint.traces import load_trace

    path = name.removeprefix(REPLAY)
    trace = load_trace(path)
    found = tuple(trace.attended.shape)
    if found != (layers, batch, tokens):
        raise UserError(
            f"profile: {path} was recorded for {found[1]} images of {found[2]} tokens in {found[0]} blocks; "
            f"this benchmark has {batch} of {tokens} in {layers}. Use a --batch-sizes and a backbone that fit it."
        )
    return trace
