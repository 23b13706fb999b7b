"""What a policy is: it says which tokens stop, skip or merge. It never sees how rows are stored."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..cost import CostModel, Shape
from ..decision import Decision
from ..kernels.threshold_gate import ThresholdGate

if TYPE_CHECKING:
    from ..model import AdaptiveViT
    from .context import BlockContext


class Policy(nn.Module):
    """Base class. A subclass takes (settings, shape), may own small parameters, and answers some of the questions.

    Nothing of a forward pass may stay on the module: keep it in the `state` that `start` returns.
    """

    optional_aux: frozenset[str] = frozenset()  # facts it can be asked for though they do not act
    equal = False  # it keeps equally many tokens in every image, in evaluation mode: `gathered` can run it
    equal_in_training = False  # and in training mode too, with no gradient through those that left
    pools_remaining = False  # a pooling head reads the tokens that are left, not the last value of every token
    keeps_prefix = False  # class, distillation and register tokens never leave
    # after the last attention it does not look at patches and answers None or Keep: where the head does not read them
    # either, they are not taken through the last MLP (forward.py). Not inherited
    quiet_end = False
    evidence_gradient = False  # whether attention and keys that it looks at carry a gradient
    evidence_index = 0  # the element of fc1 that the evidence "fc1" and "gelu" reads
    # what a budget turns (calibrate.py): "shift" where the policy heeds ctx.shift, which is added to the logit of
    # leaving, so that more is cheaper; or the setting that fixes how many tokens stay; None: it cannot be dialled
    dial: str | None = None
    full_blocks = 1  # so many first blocks run with every token, whatever max_macs is
    early = False  # it heeds ctx.over_limit between attention and MLP, and its own modules run behind that

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "quiet_end" not in vars(cls):
            cls.quiet_end = False

    def __init__(self, settings: Any, shape: Shape) -> None:
        super().__init__()
        self.settings = settings
        self.shape = shape

    def evidence(self, layer: int, asked: frozenset[str]) -> frozenset[str]:
        """Names (backbone.EVIDENCE) that this policy wants to see in this layer; nothing else is computed.

        `asked` are the facts that the caller wants; what is looked at for them alone is counted as `asked`.
        """
        return frozenset()

    def start(self, ctx: BlockContext) -> Any:
        """A fresh state for one forward pass."""
        return None

    def fused_gate(self, ctx: BlockContext, state: Any) -> ThresholdGate | None:
        """Asked before a block: the gate on "fc1" that a kernel may apply inside the MLP. Where one does, after() finds
        its GateResult in ctx.evidence["gate"]; else after() decides itself."""
        return None

    def before(self, ctx: BlockContext, state: Any) -> Decision | None:
        """Asked before a block."""
        return None

    def between(self, ctx: BlockContext, state: Any) -> Decision | None:
        """Asked between attention and MLP."""
        return None

    def after(self, ctx: BlockContext, state: Any) -> Decision | None:
        """Asked after a block."""
        return None

    def facts(self, state: Any) -> dict[str, Tensor]:
        """What the policy wants known: tensors on the grid, read by losses and reports (Trace.facts)."""
        return {}

    def schedule(self, epoch: float) -> None:
        """Training has come to this epoch (a fraction counts); for methods whose rate changes on the way."""

    def positions(self) -> tuple[float, float]:
        """Of a dial that fixes counts: the dearest and the cheapest position. For a share: all patches, and one."""
        return 1.0, 0.5 / max(self.shape.tokens - self.shape.num_prefix_tokens, 1)

    def turned(self, position: float) -> Policy:
        """This policy, its parameters shared, with such a dial elsewhere; for evaluation."""
        other = copy.copy(self)
        other.training = False
        assert self.dial is not None
        other.settings = replace(self.settings, **{self.dial: position})
        return other

    def decides(self, layer: int) -> bool:
        """Whether it heeds ctx.over_limit in this block: after the first full_blocks, in every one but the last."""
        return True

    def overhead(self, layer: int, costs: CostModel) -> tuple[float, float] | None:
        """MACs a present token and MACs an image that its own modules spend in this block, for max_macs. A policy that
        says so also heeds ctx.over_limit. None: it does not, and max_macs is refused or held by its dial."""
        return None

    def calibrate(self, model: AdaptiveViT, images: Tensor, share: float | None = None) -> str | None:
        """Set starting values on one batch before training, which aims at this share of static's MACs, if at any;
        returns a line that says what was done."""
        return None
