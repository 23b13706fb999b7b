"""Where a policy's dial stands in one pass: from the budget and the limit of the model or of the call, image by image.

Shapes: B images.

A dial that shifts scores takes one position an image, as a tensor. A dial that fixes counts gives every position its
own shapes, so images of one position run together, and the answers are put back in order. There the limit is held by
the dial, too: what a position costs is the same for every image. Elsewhere it is held while the pass runs (cap.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cost import CostModel
from ..decision import Trace
from ..errors import UserError
from ..output import Output
from ..policies.base import Policy
from ..utils.hardware import device_name
from . import curve as budgets
from .curve import Budget, Calibration, gmacs, unit_hint
from .limit import minimum

if TYPE_CHECKING:
    from ..model import AdaptiveViT

Budgets = str | float | Sequence[str | float] | Tensor  # one for all images, or one an image (numbers: MACs)


@dataclass(frozen=True)
class RunSetting:
    """How a pass, or a part of its images, runs."""

    policy: Policy
    shift: Tensor | None = None  # [B]
    limit: Tensor | None = None  # [B] MACs, float64
    images: Tensor | None = None  # [b] which of the batch, where there are several turns


def broadcast(given: Any, images: int, what: str) -> list[Any]:
    """One value for all, as a list of one, or one an image."""
    if isinstance(given, Tensor):
        given = given.tolist() if given.ndim else float(given)
    if not isinstance(given, (list, tuple)):
        return [given]
    if len(given) != images:
        raise UserError(f"{what}: expected one for all or one for each of the {images} images, got {len(given)}.")
    return list(given)


def curve(model: AdaptiveViT, why: str) -> Calibration:
    if model.policy.dial is None:
        raise UserError(f"{why}: the policy {model.policy_name!r} has no dial that a budget could turn.")
    if model.calibration is None:
        raise UserError(f"{why}: this model is not calibrated; call model.calibrate(images) or adaptivit calibrate.")
    return model.calibration


def solve(model: AdaptiveViT, budget: Budget, device: torch.device) -> float | None:
    """The position that meets a budget on this device."""
    if budget.free:
        return None
    where = device_name(device) if budget.ms is not None else ""
    return curve(model, "budget").position_for(budget, where)


def checked_limit(model: AdaptiveViT, given: object, tokens: int) -> float | None:
    """A limit in MACs; None for "none"."""
    limit, costs = budgets.parse(given, "max_macs"), CostModel(model.shape, tokens)
    if limit.ms is not None:
        raise UserError(f"max_macs: expected MACs or a saving ('1.0 GMACs', '-20%'), got {limit.text!r}.")
    if limit.free:
        return None
    macs = limit.macs or (limit.share or 0.0) * CostModel(model.whole or model.shape, tokens).static
    if fixes_counts(model.policy):
        least = curve(model, "max_macs").points[-1].macs
    elif model.policy.overhead(0, costs) is None:
        raise UserError(f"max_macs: the policy {model.policy_name!r} cannot be held to a limit.")
    else:
        least = minimum(model.policy, costs)
    if macs < least:
        raise UserError(f"max_macs: {limit.text} is below the least that can be held, {gmacs(least)}.{unit_hint(macs)}")
    return macs


def restore(model: AdaptiveViT, calibration: dict[str, Any] | None, max_macs: str | None) -> None:
    """What a checkpoint says; ValueError where its curve is none of this model's. A budget in milliseconds is settled
    when the model runs: it knows its device then."""
    if calibration is not None:
        model.calibration = Calibration.from_config(calibration)
        _check_curve(model, model.calibration)
        if model.calibration.budget is not None:
            model._budget = budgets.parse(model.calibration.budget)
    if max_macs is not None:
        model.max_macs = max_macs


def _check_curve(model: AdaptiveViT, found: Calibration) -> None:
    policy = model.policy
    if found.dial != policy.dial or found.continuous == fixes_counts(policy):
        raise ValueError(f"the calibration is of {found.dial!r}, the dial of {model.policy_name} is {policy.dial!r}")
    if found.tokens != model.shape.tokens:
        raise ValueError(f"the calibration is of {found.tokens} tokens, the model has {model.shape.tokens}")


def fitting(
    model: AdaptiveViT, calibration: dict[str, Any] | None, max_macs: str | None
) -> tuple[dict[str, Any] | None, str | None]:
    """What of a checkpoint's curve and limit holds for its weights at another image size: no curve, and no limit that
    needs one."""
    if not isinstance(calibration, dict) or calibration.get("tokens") == model.shape.tokens:
        return calibration, max_macs
    return None, None if fixes_counts(model.policy) else max_macs


def fixes_counts(policy: Policy) -> bool:
    """Whether every position of the dial has shapes of its own."""
    return policy.dial not in (None, "shift")


def split_batch(
    model: AdaptiveViT,
    images: Tensor,
    budget: Budgets | None = None,
    max_macs: Budgets | None = None,
    aux: Collection[str] = (),
) -> list[RunSetting]:
    """How these images run: in one pass, or in one for each position of a dial that fixes counts."""
    policy = model.policy
    if model.training:
        if budget is not None or max_macs is not None:
            raise UserError("budget and max_macs are for evaluation; call model.eval() first.")
        return [RunSetting(policy)]
    tokens = _tokens(model, images)
    limits = [model._limit]
    max_macs = model._max_macs if max_macs is None and tokens != model.shape.tokens else max_macs
    if max_macs is not None:
        limits = [checked_limit(model, one, tokens) for one in broadcast(max_macs, len(images), "max_macs")]
    positions = [model._position(images.device)]
    if budget is not None:
        made = [budgets.parse(one) for one in broadcast(budget, len(images), "budget")]
        positions = [solve(model, one, images.device) for one in made]
    held = any(limit is not None for limit in limits)
    if held and "exits" in policy.optional_aux and "exits" in aux:
        raise UserError("max_macs: with aux=('exits',) nobody leaves, so no limit can be held.")
    if tokens != model.shape.tokens and (any(p is not None for p in positions) or (held and fixes_counts(policy))):
        raise UserError(f"budget: the curve is of images of {model.shape.tokens} tokens, these have {tokens}.")
    if fixes_counts(policy):
        return _groups(model, positions, limits, images)
    return [RunSetting(policy, _shift(positions, images), _limit(limits, images))]


def _tokens(model: AdaptiveViT, images: Tensor) -> int:
    rows, columns = model.backbone.grid(*images.shape[2:])
    return rows * columns + model.shape.num_prefix_tokens


def _spread(values: list[float], images: Tensor, dtype: torch.dtype) -> Tensor:
    """[B]; a single value without a copy from the host, which a CUDA graph could not hold."""
    if len(values) == 1:
        return torch.full((len(images),), values[0], dtype=dtype, device=images.device)
    return torch.tensor(values, dtype=dtype, device=images.device)


def _shift(positions: list[float | None], images: Tensor) -> Tensor | None:
    if all(p is None for p in positions):
        return None
    return _spread([p or 0.0 for p in positions], images, torch.float32)


def _limit(limits: list[float | None], images: Tensor) -> Tensor | None:
    if all(limit is None for limit in limits):
        return None
    return _spread([float("inf") if m is None else m for m in limits], images, torch.float64)


def _groups(
    model: AdaptiveViT, positions: list[float | None], limits: list[float | None], images: Tensor
) -> list[RunSetting]:
    count = max(len(positions), len(limits))
    both = zip(positions * (count // len(positions)), limits * (count // len(limits)), strict=True)
    chosen = [_within(model, position, limit) for position, limit in both]
    if len(set(chosen)) == 1:
        return [RunSetting(model._turn(chosen[0]))]
    where: dict[float | None, list[int]] = {}
    for i, position in enumerate(chosen):
        where.setdefault(position, []).append(i)
    return [RunSetting(model._turn(p), images=torch.tensor(i, device=images.device)) for p, i in where.items()]


def _within(model: AdaptiveViT, position: float | None, limit: float | None) -> float | None:
    """The position, or the nearest cheaper one that costs no more than the limit."""
    if limit is None:
        return position
    found = curve(model, "max_macs")
    costs = {p.position: p.macs for p in found.points}
    macs = found.settings.macs if position is None else costs[position]
    return position if macs <= limit else found.at(limit)


def join_outputs(several: Sequence[RunSetting], outputs: Sequence[Output]) -> Output:
    """Passes over parts of a batch as one answer, in the order of the batch. The trace has neither steps nor facts."""
    order = torch.cat([turn.images for turn in several if turn.images is not None]).argsort()
    first = outputs[0]

    def rows(values: Sequence[Any], dim: int = 0) -> Any:
        return None if values[0] is None else torch.cat(list(values), dim).index_select(dim, order)

    return Output(
        logits=rows([o.logits for o in outputs]),
        features=rows([o.features for o in outputs]),
        trace=Trace(
            rows([o.trace.attended for o in outputs], 1),
            rows([o.trace.updated for o in outputs], 1),
            first.trace.num_prefix_tokens,
            pooled=first.trace.pooled,
        ),
        costs=first.costs,
        layout=first.layout,
        tokens=rows([o.tokens for o in outputs]),
        patches=rows([o.patches for o in outputs]),
        prefix_only_mlp=any(o.prefix_only_mlp for o in outputs),
        ran=rows([o.macs_ran for o in outputs]),
        counted={part: rows([o.parts[part] for o in outputs]) for part in first.parts},
    )
