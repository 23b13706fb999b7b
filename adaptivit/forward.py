"""The loop: one forward pass of an adaptive ViT, for training and inference, every policy and every layout.

For every block: aux the policy, let the layout carry the answer out, run attention, aux again, run the MLP, aux
again. Shapes: B images, N slots, D width, L blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from .backbones import timm_vit
from .backbones.timm_vit import EvidenceRequest, Shape
from .budget.limit import MacsLimiter
from .cost import AddedMacs, CostModel, row_macs
from .decision import AppliedDecision, Drop, Keep, Merge, Skip, Trace, When, detached
from .kernels.pack_index import stacked
from .layouts import HeadRows, Layout
from .output import Output
from .policies.base import Policy


def forward(
    vit: VisionTransformer,
    shape: Shape,
    policy: Policy,
    layout_type: Callable[[Tensor, int], Layout],
    images: Tensor,
    aux: Collection[str] = (),
    blocks: Any = timm_vit,
    shift: Tensor | None = None,
    limit: Tensor | None = None,
    whole_end: bool = False,
) -> Output:
    """Run `images` [B, C, H, W] under `policy`; `aux` names facts that are wanted though they do not act.

    `blocks` has the functions embed, attention and mlp: backbone.py, or fused.py (GPU) and lean.py (CPU) with the same
    in fewer passes. `shift` [B] is where a budget has set the policy's dial (budget.py), `limit` [B] what each image
    may cost at most (cap.py). `whole_end`: patches go through the last MLP though nobody reads them.
    """
    x = blocks.embed(vit, images)
    wanted = not {"tokens", "patches"}.isdisjoint(aux)
    read = x.shape[1] if wanted or shape.head_tokens == shape.tokens else shape.head_tokens
    layout = layout_type(x, read)
    layout.keeps_prefix = policy.keeps_prefix
    run = PassState(
        layout, CostModel(shape, x.shape[1]), read, shift=None if shift is None else shift[:, None], keep_zeroed=wanted
    )
    if limit is not None:
        run.limiter = MacsLimiter(policy, run.costs, limit)
    state = policy.start(BlockContext(run, 0, vit, shape, {}, frozenset(aux)))
    for layer, block in enumerate(vit.blocks):
        layout.layer = layer
        ctx = BlockContext(run, layer, vit, shape, {}, frozenset(aux))
        taps = EvidenceRequest(policy.evidence(layer, ctx.aux), policy.evidence_index, policy.evidence_gradient)

        run.apply(layer, "before", policy.before(ctx, state))
        run.attended.append(layout.active)
        if run.limiter is not None:
            run.limiter.pay(layer, layout.active)
        blocks.attention(block, layout, taps)
        ctx.evidence.update(taps.found or {})

        if run.limiter is not None:
            run.limiter.before_mlp(layout.active)
        run.apply(layer, "between", policy.between(ctx, state))
        run.updated.append(layout.active)
        if run.limiter is not None:
            run.limiter.at_mlp(layout.active)
        if ctx.last and not (wanted or whole_end or block.training) and reads_prefix_only(policy, shape, layout, taps):
            layout = run.layout = HeadRows(layout)
            run.prefix_only_mlp = True
        blocks.mlp(block, layout, taps)
        ctx.evidence.update(taps.found or {})

        layout.unskip()
        run.apply(layer, "after", policy.after(ctx, state))
        run.count_evidence(taps.wanted, policy.evidence(layer, frozenset()))
    last = layout.head_rows()
    readout = last if run.readout_sum is None else run.readout_sum
    if shape.head_tokens < shape.tokens:
        readout = readout[:, : shape.head_tokens]
    elif policy.pools_remaining and run.readout_sum is None:
        readout = layout.alive_rows()
        run.pooled = readout.shape[1]
    features, logits = timm_vit.head(vit, readout)
    always = all(mask is run.attended[0] for mask in run.attended)  # then one copy serves every layer
    same = all(a is b for a, b in zip(run.attended, run.updated, strict=True))
    if always and same:
        attended = updated = run.attended[0].clone().expand(shape.layers, -1, -1)  # it may be a constant that is kept
    else:
        masks = run.attended if same else run.attended + run.updated
        made = stacked(masks) if run.stack_in_kernel else torch.stack(masks)
        attended, updated = made[: shape.layers], made[-shape.layers :]
    trace = Trace(
        attended,
        attended if same else updated,
        shape.num_prefix_tokens,
        tuple(run.steps),
        policy.facts(state) | run.score_facts(),
        "remaining" if policy.pools_remaining else "all",
    )
    tokens = run.unzeroed(last) if wanted else None
    return Output(
        logits=logits,
        features=features,
        trace=trace,
        added_macs=run.macs_by_block(attended),
        pooled=run.pooled,
        prefix_only_mlp=run.prefix_only_mlp,
        costs=run.costs,
        layout=layout.name,
        tokens=tokens if "tokens" in aux else None,
        patches=vit.norm(tokens)[:, shape.num_prefix_tokens :] if tokens is not None and "patches" in aux else None,
    )


def reads_prefix_only(policy: Policy, shape: Shape, layout: Layout, taps: EvidenceRequest) -> bool:
    """Whether nobody hears of the patches after the last attention: neither the head nor the policy reads them. In
    training they go all the way, so that it is the same to the bit however it is compiled."""
    quiet = policy.quiet_end and type(policy).quiet_end and policy.keeps_prefix and not policy.training
    quiet = quiet and shape.head_tokens < shape.tokens and taps.wanted.isdisjoint(("fc1", "gelu"))
    return quiet and layout.drops_rows and layout.active is layout.alive


@dataclass
class PassState:
    """What one forward pass keeps while it runs."""

    layout: Layout
    costs: CostModel
    head_tokens: int
    attended: list[Tensor] = field(default_factory=list)  # [B, N] bool each
    updated: list[Tensor] = field(default_factory=list)
    steps: list[AppliedDecision] = field(default_factory=list)
    readout_sum: Tensor | None = None  # [B, read, D]
    pooled: int | None = None  # tokens that a pooling head reads, where it reads fewer than there are slots
    prefix_only_mlp: bool = False  # in the last MLP
    stack_in_kernel: bool = False  # some masks hang on kernels of ours: merges, selections
    added_macs: list[AddedMacs] = field(default_factory=list)  # MACs beside the blocks
    recorded_scores: list[tuple[int, Tensor]] = field(
        default_factory=list
    )  # (block, [B, N]) what patches were ranked by
    shift: Tensor | None = None  # [B, 1]
    limiter: MacsLimiter | None = None
    patch_slots: Tensor | None = None  # [N] bool: slots behind the prefix tokens
    keep_zeroed: bool = False  # last values are wanted of tokens that a head sees as zeros, too
    zeroed: tuple[Tensor, Tensor] | None = None  # who that is [B, N], and their last values [B, N, D]

    def apply(self, layer: int, when: When, decision: object) -> None:
        """Take the policy's share for the readout, then let the layout do the rest."""
        if decision is None:
            return
        if self.prefix_only_mlp and not isinstance(decision, Keep):
            raise ValueError(f"{type(decision).__name__} at the very end, of a policy that says quiet_end.")
        share = getattr(decision, "readout_weight", None)
        if share is not None:
            part = share[:, : self.head_tokens, None].to(self.layout.rows.dtype) * self.layout.head_rows()
            self.readout_sum = part if self.readout_sum is None else self.readout_sum + part
        if self.keep_zeroed and isinstance(decision, Drop) and decision.zero_on_exit:
            self.keep_last(decision.leaving & self.layout.alive, self.layout.head_rows())
        self.layout.apply(decision, when)  # type: ignore[arg-type]
        self.stack_in_kernel = self.stack_in_kernel or isinstance(decision, (Merge, Skip))
        self.steps.append(AppliedDecision(layer, when, detached(decision)))  # type: ignore[arg-type]

    def score_facts(self) -> dict[str, Tensor]:
        if not self.recorded_scores:
            return {}
        blocks = torch.tensor([block for block, _ in self.recorded_scores])
        return {"keep_scores": torch.stack([score for _, score in self.recorded_scores]), "keep_blocks": blocks}

    def keep_last(self, leaving: Tensor, value: Tensor) -> None:
        """Remember the value of tokens that are about to be set to zero."""
        gone, last = (torch.zeros_like(leaving), value) if self.zeroed is None else self.zeroed
        self.zeroed = gone | leaving, torch.where(leaving[..., None], value, last)

    def unzeroed(self, last: Tensor) -> Tensor:
        """[B, N, D] the last values with those back that were set to zero on leaving."""
        return last if self.zeroed is None else torch.where(self.zeroed[0][..., None], self.zeroed[1], last)

    def macs_by_block(self, attended: Tensor) -> tuple[AddedMacs, ...]:
        """What was spent, with the blocks by whose masks it is counted, those of the trace [L, B, N]: a pass's own may
        be constants that are kept."""
        masks = self.attended
        where = [next((i for i, mask in enumerate(masks) if mask is s.present), None) for s in self.added_macs]
        pairs = zip(self.added_macs, where, strict=True)
        return tuple(s if block is None else replace(s, block=block, present=attended[block]) for s, block in pairs)

    def count_evidence(self, wanted: frozenset[str], acting: frozenset[str]) -> None:
        for name in sorted(wanted):
            part = "evidence" if name in acting else "asked"
            self.added_macs.append(
                AddedMacs(part, self.attended[-1], functools.partial(CostModel.evidence, self.costs, name))
            )


@dataclass
class BlockContext:
    """What a policy sees of the pass: never how rows are stored."""

    _run: PassState
    layer: int  # 0-based block index
    _vit: VisionTransformer
    shape: Shape
    evidence: dict[str, Any]  # the evidence it declared for this layer, once the block has come by it
    aux: frozenset[str]

    @property
    def last(self) -> bool:
        return self.layer == self.shape.layers - 1

    @property
    def present(self) -> Tensor:
        """[B, N] bool: tokens that take part (have not left, do not sit out this block). Not to be written to."""
        return self._run.layout.active

    def cached_full(self, value: float, dtype: torch.dtype) -> Tensor:
        """[B, N] of one value, not to be written to."""
        layout = self._run.layout
        return layout.full(layout.alive, layout.alive.shape, value, dtype)

    @property
    def patches(self) -> Tensor:
        """[B, N] bool: the present tokens that are not class, distillation or register tokens."""
        if self._run.patch_slots is None:
            slots = torch.arange(self.present.shape[1], device=self.present.device)
            self._run.patch_slots = slots >= self.shape.num_prefix_tokens
        return self.present & self._run.patch_slots

    @property
    def shift(self) -> Tensor | None:
        """[B, 1] what a budget adds to the logit of leaving, for policies whose dial is "shift"; None without one."""
        return self._run.shift

    @property
    def limited(self) -> bool:
        """Whether there is a max_macs, so that some may have to leave that would not by themselves."""
        return self._run.limiter is not None

    def over_limit(self, keep: Tensor, priority: Tensor) -> Tensor | None:
        """[B, U] bool: who of those that would `stay` [B, U] must leave as well, so that max_macs holds; None without
        that limit. The highest `standing` [B, U] leaves first, prefix tokens last. U = 1 stands for the image."""
        cap = self._run.limiter
        if cap is None:
            return None
        if keep.shape[1] == 1:
            count = self.present.sum(-1)
            return keep & (cap.allowed(self.layer, count) < count)[:, None]
        slot = torch.arange(keep.shape[1], device=keep.device)
        order = torch.where(slot < self.shape.num_prefix_tokens, -1.0, priority).masked_fill(~keep, float("inf"))
        rank = order.argsort(dim=-1, stable=True).argsort(dim=-1)
        return keep & (rank >= cap.allowed(self.layer, keep.sum(-1))[:, None])

    def channel(self, index: int) -> Tensor:
        """[B, N] one element of every token's row (float32), 0 where it is absent."""
        layout = self._run.layout
        return layout.to_grid(layout.rows[..., index].float())

    def image(self) -> Tensor:
        """[B, D] one row an image (float32): the class token, or the mean of the tokens where the head pools them."""
        layout = self._run.layout
        if self.shape.head_tokens < self.shape.tokens:
            return layout.head_rows()[:, 0].to(torch.float32, copy=True)  # rows are written to in place
        return layout.mean(layout.rows)

    def record_scores(self, score: Tensor, block: int) -> None:
        """With aux=('keep_scores',): keep what patches are ranked by, [B, N], the higher the longer they stay.

        `block` is the first one that a patch which goes now will miss. NaN: not ranked.
        """
        if "keep_scores" in self.aux:
            score = score.detach().float()
            self._run.recorded_scores.append(
                (block, torch.where(self.patches, score, torch.full_like(score, float("nan"))))
            )

    def apply(self, module: nn.Module, over: Tensor | None = None, *, part: str = "policy") -> Tensor:
        """Run a small row-wise module on every present token: [B, N, ...], 0 where absent; its MACs are counted.

        With `over` [B, N] the module is called as module(rows, mean): mean(values [R, C]) gives every row the mean of
        the values over its image, weighted by `over`.
        """
        layout = self._run.layout

        def mean(values: Tensor) -> Tensor:
            return layout.expand(layout.mean(values, over))

        out = module(layout.rows) if over is None else module(layout.rows, mean)
        self._add_macs(row_macs(module), part)
        return layout.to_grid(out)

    def apply_to_images(self, module: nn.Module, values: Tensor) -> Tensor:
        """Run a small module on one row an image, [B, C] -> [B, ...]; 0 for images that have left; counted."""
        self._add_macs(row_macs(module), "policy", images=True)
        return self._where_present(module, values)

    def logits(self, part: str = "policy") -> Tensor:
        """[B, classes] what the model's own head says at this point (an exit); 0 for images that have left; counted."""
        shape, leading = self.shape, self._run.layout.head_rows()
        self._add_macs(self._run.costs.head, part, images=True)
        leading = leading if shape.head_tokens == shape.tokens else leading[:, : shape.head_tokens]
        return self._where_present(lambda rows: timm_vit.head(self._vit, rows)[1], leading)

    def add_macs(self, macs: Tensor | float, part: str = "policy") -> None:
        """Count MACs [B] of a policy's own matrix products."""
        self._run.added_macs.append(AddedMacs(part, self.present, lambda present: torch.zeros_like(present) + macs))

    def _add_macs(self, each: float, part: str, *, images: bool = False) -> None:
        """So many MACs for every present token, or for every image that has one."""
        self._run.added_macs.append(
            AddedMacs(part, self.present, lambda present: (present > 0).double() * each if images else present * each)
        )

    def _where_present(self, run: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """`run` on the images that have a token left: on all of them where no shape may depend on who is there."""
        some = self._run.layout.active.any(-1)
        if self._run.layout.static_shapes:
            out = run(values)
            return torch.where(some.reshape(-1, *[1] * (out.ndim - 1)), out, torch.zeros_like(out))
        index = some.nonzero()[:, 0]
        out = run(values[index])
        return out.new_zeros(len(values), *out.shape[1:]).index_copy(0, index, out)
