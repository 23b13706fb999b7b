"""The budget and the limit of a model, and how they make its passes run, image by image.

Shapes: B images.

A dial that shifts scores takes one position an image, as a tensor. A dial that fixes counts gives every position its
own shapes, so images of one position run together, and the answers are put back in order. There the limit is held by
the dial, too: what a position costs is the same for every image. Elsewhere it is held while the pass runs (limit.py).
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
from .curve import Budget, Calibration, gmacs, parse, unit_hint
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
    images: Tensor | None = None  # [b] which of the batch, where it runs in several passes


class BudgetState:
    """The budget of a model, which its cost curve turns into a position of the dial, and its limit."""

    def __init__(self, model: AdaptiveViT) -> None:
        self.model = model
        self.calibration: Calibration | None = None  # what each position of the policy's dial costs
        self.budget: Budget | None = None
        self.limit: tuple[str, float] | None = None  # as it was given, and in MACs at the model's image size
        self._solved: tuple[torch.device, float | None] | None = None  # the position of the budget on this device
        self._policies: dict[float, Policy] = {}  # the policy at other positions, with the same parameters

    @property
    def free(self) -> bool:
        """True if neither budget nor limit is set."""
        return self.budget is None and self.limit is None

    # -- what is set -------------------------------------------------------------------------------------------
    def curve(self, why: str) -> Calibration:
        if self.model.policy.traits.dial is None:
            raise UserError(f"{why}: the policy {self.model.policy_name!r} has no dial that a budget could turn.")
        if self.calibration is None:
            raise UserError(
                f"{why}: this model is not calibrated; call model.calibrate(images) or adaptivit calibrate."
            )
        return self.calibration

    def set_budget(self, given: str | float | None) -> None:
        budget = None if given is None else parse(given)
        budget = None if budget is None or budget.free else budget
        device = next(self.model.parameters()).device
        solved = None if budget is None else (device, self.solve(budget, device))
        self.budget, self._solved = budget, solved

    def set_limit(self, given: str | float | None) -> None:
        macs = None if given is None else self.limit_in_macs(given, self.model.shape.tokens)
        self.limit = None if macs is None else (parse(given).text, macs)

    def solve(self, budget: Budget, device: torch.device) -> float | None:
        """The position that meets a budget on this device; None: what the policy's settings say."""
        if budget.free:
            return None
        return self.curve("budget").position_for(budget, device_name(device) if budget.ms is not None else "")

    def position(self, device: torch.device) -> float | None:
        """Where the model's budget puts the dial. Milliseconds are solved anew on every device."""
        if self.budget is None:
            return None
        if self._solved is None or (self.budget.ms is not None and self._solved[0] != device):
            self._solved = (device, self.solve(self.budget, device))
        return self._solved[1]

    def limit_in_macs(self, given: object, tokens: int) -> float | None:
        """A limit in MACs for images of so many tokens, checked; None for "none"."""
        model, policy = self.model, self.model.policy
        limit, costs = parse(given, "max_macs"), CostModel(model.shape, tokens)
        if limit.ms is not None:
            raise UserError(f"max_macs: expected MACs or a saving ('1.0 GMACs', '-20%'), got {limit.text!r}.")
        if limit.free:
            return None
        macs = limit.macs or (limit.share or 0.0) * CostModel(model.whole or model.shape, tokens).static
        if policy.traits.dial_fixes_counts:
            least = self.curve("max_macs").points[-1].macs
        elif policy.policy_macs(0, costs) is None:
            raise UserError(f"max_macs: the policy {model.policy_name!r} cannot be held to a limit.")
        else:
            least = minimum(policy, costs)
        if macs < least:
            raise UserError(
                f"max_macs: {limit.text} is below the least that can be held, {gmacs(least)}.{unit_hint(macs)}"
            )
        return macs

    def calibrated(self, curve: Calibration, budget: str | float | None) -> None:
        """Take a new curve; it is kept where the budget turns out to be impossible, as another one needs no data."""
        self.calibration = curve
        self.set_budget(None)
        self._policies.clear()
        self.set_budget(budget)

    def restore(self, curve: dict[str, Any] | None, max_macs: str | None) -> None:
        """Take what a checkpoint says; ValueError where its curve does not fit the model. A budget in milliseconds is
        solved when the model runs: it knows its device then."""
        if curve is not None:
            self.calibration = Calibration.from_config(curve)
            found, traits, tokens = self.calibration, self.model.policy.traits, self.model.shape.tokens
            if found.dial != traits.dial or found.continuous == traits.dial_fixes_counts:
                raise ValueError(
                    f"the calibration is of {found.dial!r}, the dial of {self.model.policy_name} is {traits.dial!r}"
                )
            if found.tokens != tokens:
                raise ValueError(f"the calibration is of {found.tokens} tokens, the model has {tokens}")
            self.budget = None if found.budget is None else parse(found.budget)
        if max_macs is not None:
            self.set_limit(max_macs)

    def restore_at_other_size(self, curve: dict[str, Any] | None, max_macs: str | None) -> None:
        """The same for a model that may have another image size: then without the curve, and without a limit that
        needs one."""
        if isinstance(curve, dict) and curve.get("tokens") != self.model.shape.tokens:
            curve, max_macs = None, None if self.model.policy.traits.dial_fixes_counts else max_macs
        self.restore(curve, max_macs)

    # -- how passes run ----------------------------------------------------------------------------------------
    def policy_at(self, position: float | None) -> Policy:
        """The policy with its dial, one that fixes counts, at this position."""
        if position is None:
            return self.model.policy
        if position not in self._policies:
            self._policies[position] = self.model.policy.at_position(position)
        return self._policies[position]

    def setting_at(self, position: float | None, images: Tensor) -> RunSetting:
        """All images at one position of the dial."""
        if position is None or self.model.policy.traits.dial_fixes_counts:
            return RunSetting(self.policy_at(position))
        return RunSetting(self.model.policy, shift=_for_each([position], 0.0, images, torch.float32))

    def settings(
        self,
        images: Tensor,
        budget: Budgets | None = None,
        max_macs: Budgets | None = None,
        aux: Collection[str] = (),
    ) -> list[RunSetting]:
        """How these images run: in one pass, or in one for each position of a dial that fixes counts."""
        model, traits = self.model, self.model.policy.traits
        if model.training:
            if budget is not None or max_macs is not None:
                raise UserError("budget and max_macs are for evaluation; call model.eval() first.")
            return [RunSetting(model.policy)]
        rows, columns = model.backbone.grid(*images.shape[2:])
        tokens = rows * columns + model.shape.num_prefix_tokens
        limits, positions = self._limits(images, max_macs, tokens), self._positions(images, budget)
        held = any(limit is not None for limit in limits)
        if held and "exits" in traits.optional_aux and "exits" in aux:
            raise UserError("max_macs: with aux=('exits',) no image leaves, so no limit can be held.")
        needs_curve = any(p is not None for p in positions) or (held and traits.dial_fixes_counts)
        if needs_curve and tokens != model.shape.tokens:
            raise UserError(f"budget: the curve is of images of {model.shape.tokens} tokens, these have {tokens}.")
        if traits.dial_fixes_counts:
            return self._groups(positions, limits, images)
        shift = _for_each(positions, 0.0, images, torch.float32)
        return [RunSetting(model.policy, shift, _for_each(limits, float("inf"), images, torch.float64))]

    def _positions(self, images: Tensor, budget: Budgets | None) -> list[float | None]:
        if budget is None:
            return [self.position(images.device)]
        return [self.solve(parse(one), images.device) for one in broadcast(budget, len(images), "budget")]

    def _limits(self, images: Tensor, max_macs: Budgets | None, tokens: int) -> list[float | None]:
        if max_macs is None and self.limit is not None and tokens != self.model.shape.tokens:
            max_macs = self.limit[0]
        if max_macs is None:
            return [None if self.limit is None else self.limit[1]]
        return [self.limit_in_macs(one, tokens) for one in broadcast(max_macs, len(images), "max_macs")]

    def _groups(self, positions: list[float | None], limits: list[float | None], images: Tensor) -> list[RunSetting]:
        count = max(len(positions), len(limits))
        both = zip(positions * (count // len(positions)), limits * (count // len(limits)), strict=True)
        where: dict[float | None, list[int]] = {}
        for i, (position, limit) in enumerate(both):
            where.setdefault(self._within(position, limit), []).append(i)
        if len(where) == 1:
            return [self.setting_at(next(iter(where)), images)]
        return [RunSetting(self.policy_at(p), images=torch.tensor(i, device=images.device)) for p, i in where.items()]

    def _within(self, position: float | None, limit: float | None) -> float | None:
        """The position, or the nearest cheaper one that costs no more than the limit."""
        if limit is None:
            return position
        curve = self.curve("max_macs")
        macs = curve.settings.macs if position is None else {p.position: p.macs for p in curve.points}[position]
        return position if macs <= limit else curve.at(limit)


def broadcast(given: Any, images: int, what: str) -> list[Any]:
    """One value for all, as a list of one, or one an image."""
    if isinstance(given, Tensor):
        given = given.tolist() if given.ndim else float(given)
    if not isinstance(given, (list, tuple)):
        return [given]
    if len(given) != images:
        raise UserError(f"{what}: expected one for all or one for each of the {images} images, got {len(given)}.")
    return list(given)


def _for_each(values: Sequence[float | None], missing: float, images: Tensor, dtype: torch.dtype) -> Tensor | None:
    """[B], None where there is no value; a single value without a copy from the host, which a graph could not hold."""
    if all(v is None for v in values):
        return None
    filled = [missing if v is None else v for v in values]
    if len(filled) == 1:
        return torch.full((len(images),), filled[0], dtype=dtype, device=images.device)
    return torch.tensor(filled, dtype=dtype, device=images.device)


def join_outputs(several: Sequence[RunSetting], outputs: Sequence[Output]) -> Output:
    """Passes over parts of a batch as one answer, in the order of the batch. The trace has neither steps nor facts."""
    order = torch.cat([setting.images for setting in several if setting.images is not None]).argsort()
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
