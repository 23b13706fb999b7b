"""The loop: one forward pass of an adaptive ViT, for training and inference, every policy and every layout.

For every block: ask the policy, let the layout apply the answer, run attention, ask again, run the MLP, ask again.
Shapes: B images, N slots, D width, L blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor

from .budget.control import RunSetting
from .budget.limit import MacsLimiter
from .cost import AddedMacs, CostModel
from .decision import AppliedDecision, Decision, Drop, Keep, Merge, Skip, Trace, When, detached
from .execution.evidence import EvidenceRequest
from .execution.torch import Executor
from .kernels.constants import stacked
from .layouts import HeadRows, Layout
from .output import Output
from .policies.context import BlockContext


def forward(
    executor: Executor,
    make_layout: Callable[[Tensor, int], Layout],
    images: Tensor,
    setting: RunSetting,
    aux: Collection[str] = (),
    full_last_mlp: bool = False,
) -> Output:
    """Run `images` [B, C, H, W] under the policy, budget and limit of `setting`; `aux` names facts that are wanted
    though they do not act. `full_last_mlp`: patches go through the last MLP though nothing reads them.
    """
    run = PassState(executor, make_layout, images, setting, frozenset(aux), full_last_mlp)
    policy = setting.policy
    state = policy.init_state(BlockContext(run, 0, run.aux))
    for layer, block in enumerate(executor.backbone.blocks):
        run.layout.layer = layer
        ctx = BlockContext(run, layer, run.aux)
        request = EvidenceRequest(
            policy.evidence(layer, run.aux), policy.traits.evidence_index, policy.traits.evidence_grad
        )
        request.gate = policy.fused_gate(ctx, state)

        run.apply(layer, "before", policy.before(ctx, state))
        run.enter_attention(layer)
        executor.attention(block, run.layout, request)
        ctx.evidence.update(request.found or {})

        run.leave_attention()
        run.apply(layer, "between", policy.between(ctx, state))
        run.enter_mlp(ctx, request)
        executor.mlp(block, run.layout, request)
        ctx.evidence.update(request.found or {})
        run.stack_in_kernel = run.stack_in_kernel or "gate" in ctx.evidence

        run.layout.unskip()
        run.apply(layer, "after", policy.after(ctx, state))
        run.count_evidence(request.wanted, policy.evidence(layer, frozenset()))
    return run.output(policy.facts(state))


class PassState:
    """What one forward pass keeps while it runs."""

    def __init__(
        self,
        executor: Executor,
        make_layout: Callable[[Tensor, int], Layout],
        images: Tensor,
        setting: RunSetting,
        aux: frozenset[str],
        full_last_mlp: bool,
    ) -> None:
        policy, shape, backbone = setting.policy, setting.policy.shape, executor.backbone
        x = executor.embed(images)
        self.policy, self.shape, self.backbone, self.aux = policy, shape, backbone, aux
        self.wants_tokens = not aux.isdisjoint(("tokens", "patches"))
        training = policy.training or backbone.module.training
        self.full_last_mlp = full_last_mlp or executor.full_last_mlp or self.wants_tokens or training
        pools = shape.head_tokens == shape.tokens
        self.head_tokens = x.shape[1] if self.wants_tokens or pools else shape.head_tokens
        self.layout = make_layout(x, self.head_tokens)
        self.layout.keeps_prefix = policy.traits.keeps_prefix
        self.layout.positions = backbone.positions(images)
        self.costs = CostModel(shape, x.shape[1])
        self.shift = None if setting.shift is None else setting.shift[:, None]  # [B, 1]
        self.limiter = None if setting.limit is None else MacsLimiter(policy, self.costs, setting.limit)
        self.attended: list[Tensor] = []  # [B, N] bool each: in the attention of a block
        self.updated: list[Tensor] = []  # [B, N] bool each: in the MLP of a block
        self.steps: list[AppliedDecision] = []
        self.readout_sum: Tensor | None = None  # [B, head_tokens, D] weighted sum for the readout
        self.answers: list[tuple[Tensor, Tensor]] = []  # [B, 1] bool images that left, [B, C] with which logits
        self.zeroed: tuple[Tensor, Tensor] | None = None  # tokens set to zero [B, N], and their last values [B, N, D]
        self.prefix_only_mlp = False  # the last MLP runs on the rows that the head reads
        self.stack_in_kernel = False  # some masks come from kernels of ours: gates, merges and selections
        self.added_macs: list[AddedMacs] = []  # beside the blocks
        self._patch_slots: Tensor | None = None
        self.recorded_scores: list[tuple[int, Tensor]] = []  # (block, [B, N] what patches were ranked by)

    @property
    def patch_slots(self) -> Tensor:
        """[N] bool: slots behind the prefix tokens."""
        if self._patch_slots is None:
            alive = self.layout.alive
            self._patch_slots = torch.arange(alive.shape[1], device=alive.device) >= self.shape.num_prefix_tokens
        return self._patch_slots

    # -- on the way ------------------------------------------------------------------------------------------
    def apply(self, layer: int, when: When, decision: Decision | None) -> None:
        """Add what the readout takes, let the layout do the rest, and record the decision."""
        if decision is None:
            return
        self._check(decision)
        weight = getattr(decision, "readout_weight", None)
        if weight is not None:
            part = weight[:, : self.head_tokens, None].to(self.layout.rows.dtype) * self.layout.head_rows()
            self.readout_sum = part if self.readout_sum is None else self.readout_sum + part
        if isinstance(decision, Drop) and decision.logits is not None:
            self.answers.append((decision.leaving.any(-1, keepdim=True), decision.logits))
        if self.wants_tokens and isinstance(decision, Drop) and decision.zero_on_exit:
            self._keep_last_values(decision.leaving & self.layout.alive)
        self.layout.apply(decision, when)
        self.stack_in_kernel = self.stack_in_kernel or isinstance(decision, (Merge, Skip))
        self.steps.append(AppliedDecision(layer, when, detached(decision)))

    def _check(self, decision: Decision) -> None:
        """Refuse a decision that the policy's traits rule out. Values are read on a CPU alone, where none waits."""
        name, traits = type(decision).__name__, self.policy.traits
        if self.prefix_only_mlp and not isinstance(decision, Keep):
            raise ValueError(f"{name} after the last MLP, of a policy with the trait ignores_last_mlp_patches.")
        leaving = decision.target if isinstance(decision, Merge) else getattr(decision, "leaving", None)
        if not traits.keeps_prefix or leaving is None or leaving.is_cuda or torch.compiler.is_compiling():
            return
        prefix = leaving[:, : self.shape.num_prefix_tokens]
        own = torch.arange(prefix.shape[1]) if isinstance(decision, Merge) else torch.zeros((), dtype=torch.bool)
        if bool((prefix != own).any()):
            raise ValueError(f"{name} of a prefix token, of a policy with the trait keeps_prefix.")

    def enter_attention(self, layer: int) -> None:
        self.attended.append(self.layout.active)
        if self.limiter is not None:
            self.limiter.pay(layer, self.layout.active)

    def leave_attention(self) -> None:
        if self.limiter is not None:
            self.limiter.before_mlp(self.layout.active)

    def enter_mlp(self, ctx: BlockContext, request: EvidenceRequest) -> None:
        self.updated.append(self.layout.active)
        if self.limiter is not None:
            self.limiter.at_mlp(self.layout.active)
        if ctx.last and not self.full_last_mlp and self._reads_prefix_only(request):
            self.layout = HeadRows(self.layout)
            self.prefix_only_mlp = True

    def _reads_prefix_only(self, request: EvidenceRequest) -> bool:
        """True if nothing reads patch tokens after the last attention: neither the head nor the policy. In training
        they take the whole last block, so that it is the same to the bit however it is compiled."""
        policy, layout = self.policy, self.layout
        ignored = policy.traits.ignores_last_mlp_patches and policy.traits.keeps_prefix
        ignored = ignored and self.shape.head_tokens < self.shape.tokens and "fc1" not in request.wanted
        return ignored and layout.drops_rows and layout.active is layout.alive

    def count_evidence(self, wanted: frozenset[str], acting: frozenset[str]) -> None:
        """Count the MACs of evidence; what does not act is counted as asked for."""
        for name in sorted(wanted):
            macs = functools.partial(CostModel.evidence, self.costs, name)
            self.added_macs.append(AddedMacs("evidence" if name in acting else "asked", self.attended[-1], macs))

    def _keep_last_values(self, leaving: Tensor) -> None:
        """Keep the values of tokens that are about to be set to zero."""
        value = self.layout.head_rows()
        gone, last = (torch.zeros_like(leaving), value) if self.zeroed is None else self.zeroed
        self.zeroed = gone | leaving, torch.where(leaving[..., None], value, last)

    # -- in the end ------------------------------------------------------------------------------------------
    def output(self, facts: dict[str, Tensor]) -> Output:
        last, shape, pooled = self.layout.head_rows(), self.shape, None
        readout = last if self.readout_sum is None else self.readout_sum
        if shape.head_tokens < shape.tokens:
            readout = readout[:, : shape.head_tokens]
        elif self.policy.traits.pools_alive and self.readout_sum is None:
            readout = self.layout.alive_rows()
            pooled = readout.shape[1]
        features, logits = self.backbone.head(readout)
        for left, answer in self.answers:
            logits = torch.where(left, answer.to(logits.dtype), logits)
        trace = self._trace(facts)
        tokens = patches = None
        if self.wants_tokens:
            tokens = last if self.zeroed is None else torch.where(self.zeroed[0][..., None], self.zeroed[1], last)
            if "patches" in self.aux:
                patches = self.backbone.norm(tokens)[:, shape.num_prefix_tokens :]
        return Output(
            logits=logits,
            features=features,
            trace=trace,
            added_macs=self._macs_by_block(trace.attended),
            pooled=pooled,
            prefix_only_mlp=self.prefix_only_mlp,
            costs=self.costs,
            layout=self.layout.name,
            tokens=tokens if "tokens" in self.aux else None,
            patches=patches,
        )

    def _trace(self, facts: dict[str, Tensor]) -> Trace:
        layers = self.shape.layers
        constant = all(mask is self.attended[0] for mask in self.attended)  # then one copy serves every layer
        same = all(a is b for a, b in zip(self.attended, self.updated, strict=True))
        if constant and same:  # a copy: it may be a constant that layouts share
            attended = updated = self.attended[0].clone().expand(layers, -1, -1)
        else:
            masks = self.attended if same else self.attended + self.updated
            made = stacked(masks) if self.stack_in_kernel else torch.stack(masks)
            attended = made[:layers]
            updated = attended if same else made[-layers:]
        pooled = "remaining" if self.policy.traits.pools_alive else "all"
        facts = facts | self._score_facts()
        return Trace(attended, updated, self.shape.num_prefix_tokens, tuple(self.steps), facts, pooled)

    def _score_facts(self) -> dict[str, Tensor]:
        if not self.recorded_scores:
            return {}
        blocks = torch.tensor([block for block, _ in self.recorded_scores])
        return {"keep_scores": torch.stack([score for _, score in self.recorded_scores]), "keep_blocks": blocks}

    def _macs_by_block(self, attended: Tensor) -> tuple[AddedMacs, ...]:
        """MACs beside the blocks, counted by masks of the trace [L, B, N] where they are the same: a pass's own may be
        constants that layouts share."""
        found: list[AddedMacs] = []
        for added in self.added_macs:
            block = next((i for i, mask in enumerate(self.attended) if mask is added.present), None)
            found.append(added if block is None else replace(added, block=block, present=attended[block]))
        return tuple(found)
