"""What a policy is: it decides which tokens stop, skip or merge, without knowing how rows are stored."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..cost import CostModel, Shape
from ..decision import Decision
from ..kernels.threshold_gate import ThresholdGate

if TYPE_CHECKING:
    from ..model import AdaptiveViT
    from .context import BlockContext


@dataclass(frozen=True)
class Traits:
    """What layouts, budgets and the loop may rely on. The defaults are always right."""

    fixed_counts: bool = False
    """Equally many tokens stay in every image, in evaluation: `gathered` can run it."""
    fixed_counts_in_training: bool = False
    """The same in training, with no gradient through tokens that left."""
    keeps_prefix: bool = False
    """Class, distillation and register tokens never leave. Checked on a CPU."""
    pools_alive: bool = False
    """A pooling head reads the tokens that are left, not the last value of every token."""
    ignores_last_mlp_patches: bool = False
    """After the last attention it reads no patches and answers None or Keep: where the head reads none either, compact
    layouts leave them out of the last MLP. Checked."""
    dial: str | None = None
    """What a budget changes: "shift", which is added to the logit of leaving (ctx.shift), or the setting that fixes how
    many tokens stay. None: no budget."""
    dense_blocks: int = 1
    """This many first blocks run with every token, whatever max_macs is."""
    decides_before_mlp: bool = False
    """It asks ctx.over_limit between attention and MLP, and its own modules run after that. Checked."""
    optional_aux: frozenset[str] = frozenset()
    """Facts that it computes only when asked for."""
    evidence_grad: bool = False
    """Attention and keys that it reads carry a gradient."""
    fits_images: bool = False
    """init_gate finds on images what it is of no use without: `adaptivit apply` asks for --data."""
    evidence_index: int = 0
    """The element of the hidden layer that the evidence "fc1" reads."""

    @property
    def dial_fixes_counts(self) -> bool:
        """True if every position of the dial has shapes of its own."""
        return self.dial not in (None, "shift")


# Traits of the methods that fix how many patches stay or take part.
FIXED = Traits(fixed_counts=True, fixed_counts_in_training=True, keeps_prefix=True, ignores_last_mlp_patches=True)


class Policy(nn.Module):
    """Base class. A subclass takes (settings, shape), may own small parameters, and answers some of the questions.

    Nothing of a forward pass may stay on the module: keep it in the `state` that `init_state` returns.
    """

    def __init__(self, settings: Any, shape: Shape, traits: Traits | None = None) -> None:
        super().__init__()
        self.settings = settings
        self.shape = shape
        self.traits = traits or Traits()

    def evidence(self, layer: int, aux: frozenset[str]) -> frozenset[str]:
        """Names (execution.evidence.EVIDENCE) that this policy reads in this block; nothing else is computed.

        `aux` are the facts that the caller wants; what is read for them alone is counted as `asked`.
        """
        return frozenset()

    def init_state(self, ctx: BlockContext) -> Any:
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
        """Tensors on the grid for losses and reports (Trace.facts)."""
        return {}

    def schedule(self, epoch: float) -> None:
        """Training has done so many epochs, as a fraction; for methods whose rate changes."""

    def positions(self) -> tuple[float, float]:
        """Of a dial that fixes counts: the dearest and the cheapest position. For a share: all patches, and one."""
        return 1.0, 0.5 / max(self.shape.tokens - self.shape.num_prefix_tokens, 1)

    def at_position(self, position: float) -> Policy:
        """This policy, its parameters shared, with such a dial elsewhere; for evaluation."""
        other = copy.copy(self)
        other.training = False
        assert self.traits.dial is not None
        other.settings = replace(self.settings, **{self.traits.dial: position})
        return other

    def decides(self, layer: int) -> bool:
        """Whether it obeys ctx.over_limit in this block: after the dense blocks, in every one but the last."""
        return True

    def policy_macs(self, layer: int, costs: CostModel) -> tuple[float, float] | None:
        """MACs a present token and MACs an image that its own modules spend in this block, for max_macs. A policy that
        gives them also obeys ctx.over_limit. None: it does not, and max_macs is refused or held by its dial."""
        return None

    def init_gate(self, model: AdaptiveViT, images: Tensor, share: float | None = None) -> str | None:
        """Set starting values on one batch before training, which aims at this share of static's MACs, if at any;
        returns a line that says what was done."""
        return None
