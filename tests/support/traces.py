"""Random sequences of decisions for replay, and the loop without any layout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from adaptivit.decision import AppliedDecision, Decision, Drop, Keep, Merge, Skip, Trace, When

KINDS = ("none", "keep", "share", "drop", "drop_zeroed", "drop_all", "drop_weight", "skip", "gate", "skip_all")


KINDS = (*KINDS, "merge", "merge_nowhere", "merge_unsized")


def merging(seed: int, live: Tensor, *, equal: bool = False, nowhere: bool = False, sized: bool = True) -> Merge:
    """Random tokens fold into other live ones, or nowhere; with `equal` as many in every image."""
    g = torch.Generator().manual_seed(seed)
    into = torch.arange(live.shape[1]).repeat(len(live), 1)
    for b, alive in enumerate(live):
        slots = alive.nonzero()[torch.randperm(int(alive.sum()), generator=g), 0].tolist()
        stay = slots[: math.ceil(len(slots) / 2)]
        for n, i in enumerate(slots[len(stay) :]):
            if n % 3 < 2 if equal else torch.rand((), generator=g) < 0.7:
                lost = nowhere and torch.rand((), generator=g) < 0.5
                into[b, i] = -1 if lost else stay[int(torch.randint(len(stay), (), generator=g))]
    size = 0.5 + 2 * torch.rand(live.shape, generator=g)
    return Merge(into, 0.2 + torch.rand(live.shape, generator=g), size if sized else None)


def choice(live: Tensor, share: float, g: torch.Generator) -> Tensor:
    """[B, N] bool: a share of the live tokens, as many in every image, which has as many of them."""
    order = torch.rand(live.shape, generator=g).masked_fill(~live, 2.0).argsort(-1).argsort(-1)
    return order < round(share * int(live[0].sum()))


def random_trace(
    kinds: list[str], seed: int, images: int = 3, slots: int = 17, prefix: int = 1, equal: bool = False
) -> Trace:
    """Answers to 3 questions a layer; Drop and Merge wait while tokens are skipped; Skip comes before a block alone.

    With `equal` all images drop, skip and merge equally many tokens, though other ones.
    """
    g = torch.Generator().manual_seed(seed)
    live, skipping, steps = torch.ones(images, slots, dtype=torch.bool), False, []

    def rand() -> Tensor:
        return torch.rand(images, slots, generator=g)

    def some(share: float) -> Tensor:
        return choice(live, share, g) if equal else rand() < share

    for position, kind in enumerate(kinds):
        layer, when = position // 3, get_args(When)[position % 3]
        skipping = skipping and when == "between"
        share = rand() if kind == "share" or rand()[0, 0] < 0.15 else None
        told = equal and bool(rand()[0, 0] < 0.5)  # say the count beforehand, or let the layout look
        decision: Decision = Keep(share)
        if kind in ("skip", "gate", "skip_all") and when == "before":
            sitting = some(1.0 if kind == "skip_all" else 0.5)
            count = int((live & ~sitting)[0].sum()) if told else None
            decision, skipping = (
                Skip(sitting, 2 * rand() if kind == "gate" else None, readout_weight=share, tokens_left=count),
                True,
            )
        elif "drop" in kind and not skipping:
            whole = rand()[:, :1] < 0.6
            leaving = some(0.3) if kind != "drop_all" else whole[:1].expand_as(live) if equal else whole.expand_as(live)
            live = live & ~leaving
            weight = live.float() if kind == "drop_weight" else None
            count = int(live[0].sum()) if told else None
            decision = Drop(
                leaving, key_weight=weight, zero_on_exit=kind == "drop_zeroed", readout_weight=share, tokens_left=count
            )
        elif "merge" in kind and not skipping:
            nowhere, sized = kind == "merge_nowhere", kind != "merge_unsized"
            m = merging(seed + position, live, equal=equal, nowhere=nowhere, sized=sized)
            live = live & (m.target == torch.arange(slots))
            decision = replace(m, readout_weight=share, tokens_left=int(live[0].sum()) if told else None)
        if kind != "none":
            steps.append(AppliedDecision(layer, when, decision))
    shape = torch.zeros(len(kinds) // 3, images, slots, dtype=torch.bool)
    return Trace(shape, shape, prefix, tuple(steps))


def literal_forward(vit: Any, trace: Trace, images: Tensor) -> tuple[Tensor, Tensor]:
    """The loop without any layout: every image a dictionary of tokens. Returns the readout and who attended."""
    answer = {(s.layer, s.when): s.decision for s in trace.steps}
    everything = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    readouts, computed = [], torch.zeros(len(vit.blocks), *everything.shape[:2], dtype=torch.bool)
    for b, x in enumerate(everything):
        value, weight, shares = dict(enumerate(x)), dict.fromkeys(range(len(x)), 1.0), None
        for layer, block in enumerate(vit.blocks):
            here, gate, start = list(weight), None, dict(value)
            for when in ("before", "between", "after"):
                if when == "after":
                    for i in here if gate is not None else ():
                        value[i] = start[i] + gate[b, i] * (value[i] - start[i])
                    here = list(weight)
                decision = answer.get((layer, when), Keep())
                if decision.readout_weight is not None:
                    part = torch.stack([decision.readout_weight[b, i] * value[i] for i in value])
                    shares = part if shares is None else shares + part
                if isinstance(decision, Skip):
                    here, gate = [i for i in here if not decision.skipped[b, i]], decision.gate
                elif isinstance(decision, Drop):
                    for i in [i for i in here if decision.leaving[b, i]]:
                        value[i] = torch.zeros_like(value[i]) if decision.zero_on_exit else value[i]
                        del weight[i]
                    here = list(weight)
                elif isinstance(decision, Merge):
                    size = weight if decision.size is None else decision.size[b]
                    old, weight = dict(value), {j: float(size[j]) for j in here if decision.target[b, j] == j}
                    for j in weight:
                        value[j] = torch.stack(
                            [decision.source_weight[b, i] * old[i] for i in here if decision.target[b, i] == j]
                        ).sum(0)
                    here = list(weight)
                if when == "after" or not here:
                    continue
                rows = torch.stack([value[i] for i in here])
                if when == "before":
                    computed[layer, b, here] = True
                    q, k, v = block.attn.qkv(block.norm1(rows)).reshape(len(here), 3, 3, 8).permute(1, 2, 0, 3)
                    a = (q @ k.mT / 8**0.5 + torch.tensor([weight[i] for i in here]).log()).softmax(-1)
                    rows = rows + block.ls1(block.attn.proj((a @ v).transpose(0, 1).flatten(1)))
                else:
                    rows = rows + block.ls2(block.mlp(block.norm2(rows)))
                value |= dict(zip(here, rows, strict=True))
        readouts.append(torch.stack([value[i] for i in range(len(x))]) if shares is None else shares)
    return torch.stack(readouts), computed
