"""The loop: one forward pass of an adaptive ViT, for training and inference, every policy and every layout.

For every block: ask the policy, let the layout carry the answer out, run attention, ask again, run the MLP, ask
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
from .backbones.timm_vit import Shape, Taps
from .budget.limit import Cap
from .cost import CostModel, Spent, row_macs
from .decision import Drop, Keep, Merge, Skip, Step, Trace, When, detached
from .kernels.pack_index import stacked
from .layouts import Ending, Layout
from .output import Output
from .policies.base import Policy


def forward(
    vit: VisionTransformer,
    shape: Shape,
    policy: Policy,
    layout_type: Callable[[Tensor, int], Layout],
    images: Tensor,
    ask: Collection[str] = (),
    blocks: Any = timm_vit,
    shift: Tensor | None = None,
    limit: Tensor | None = None,
    whole_end: bool = False,
) -> Output:
    """Run `images` [B, C, H, W] under `policy`; `ask` names facts that are wanted though they do not act.

    `blocks` has the functions embed, attention and mlp: backbone.py, or fused.py (GPU) and lean.py (CPU) with the same
    in fewer passes. `shift` [B] is where a budget has set the policy's dial (budget.py), `limit` [B] what each image
    may cost at most (cap.py). `whole_end`: patches go through the last MLP though nobody reads them.
    """
    x = blocks.embed(vit, images)
    wanted = not {"tokens", "patches"}.isdisjoint(ask)
    read = x.shape[1] if wanted or shape.read == shape.tokens else shape.read
    layout = layout_type(x, read)
    layout.prefix_stays = policy.prefix_stays
    run = _Run(
        layout, CostModel(shape, x.shape[1]), read, shift=None if shift is None else shift[:, None], keeps=wanted
    )
    if limit is not None:
        run.cap = Cap(policy, run.costs, limit)
    state = policy.start(View(run, 0, vit, shape, {}, frozenset(ask)))
    for layer, block in enumerate(vit.blocks):
        layout.layer = layer
        view = View(run, layer, vit, shape, {}, frozenset(ask))
        taps = Taps(policy.evidence(layer, view.asked), policy.evidence_index, policy.evidence_gradient)
        taps.gate = policy.inside(view, state)

        run.answer(layer, "before", policy.before(view, state))
        run.attended.append(layout.here)
        if run.cap is not None:
            run.cap.pay(layer, layout.here)
        blocks.attention(block, layout, taps)
        view.found.update(taps.found or {})

        if run.cap is not None:
            run.cap.before_mlp(layout.here)
        run.answer(layer, "between", policy.between(view, state))
        run.updated.append(layout.here)
        if run.cap is not None:
            run.cap.at_mlp(layout.here)
        if view.last and not (wanted or whole_end or block.training) and read_alone(policy, shape, layout, taps):
            layout = run.layout = Ending(layout)
            run.read_alone = True
        blocks.mlp(block, layout, taps)
        view.found.update(taps.found or {})
        run.masks_of_kernels = run.masks_of_kernels or "decided" in view.found

        layout.come_back()
        run.answer(layer, "after", policy.after(view, state))
        run.count_evidence(taps.wanted, policy.evidence(layer, frozenset()))
    last = layout.leading()
    readout = last if run.shares is None else run.shares
    if shape.read < shape.tokens:
        readout = readout[:, : shape.read]
    elif policy.pools_remaining and run.shares is None:
        readout = layout.remaining()
        run.pooled = readout.shape[1]
    features, logits = timm_vit.head(vit, readout)
    always = all(mask is run.attended[0] for mask in run.attended)  # then one copy serves every layer
    same = all(a is b for a, b in zip(run.attended, run.updated, strict=True))
    if always and same:
        attended = updated = run.attended[0].clone().expand(shape.layers, -1, -1)  # it may be a constant that is kept
    else:
        masks = run.attended if same else run.attended + run.updated
        made = stacked(masks) if run.masks_of_kernels else torch.stack(masks)
        attended, updated = made[: shape.layers], made[-shape.layers :]
    trace = Trace(
        attended,
        attended if same else updated,
        shape.prefix,
        tuple(run.steps),
        policy.facts(state) | run.noted_facts(),
        "remaining" if policy.pools_remaining else "all",
    )
    tokens = run.unzeroed(last) if wanted else None
    return Output(
        logits=logits,
        features=features,
        trace=trace,
        spent=run.spent_where(attended),
        pooled=run.pooled,
        read_alone=run.read_alone,
        costs=run.costs,
        layout=layout.name,
        tokens=tokens if "tokens" in ask else None,
        patches=vit.norm(tokens)[:, shape.prefix :] if tokens is not None and "patches" in ask else None,
    )


def read_alone(policy: Policy, shape: Shape, layout: Layout, taps: Taps) -> bool:
    """Whether nobody hears of the patches after the last attention: neither the head nor the policy reads them. In
    training they go all the way, so that it is the same to the bit however it is compiled."""
    quiet = policy.quiet_end and type(policy).quiet_end and policy.prefix_stays and not policy.training
    quiet = quiet and shape.read < shape.tokens and taps.wanted.isdisjoint(("fc1", "gelu"))
    return quiet and layout.compact and layout.here is layout.live


@dataclass
class _Run:
    """What one forward pass keeps while it runs."""

    layout: Layout
    costs: CostModel
    read: int
    attended: list[Tensor] = field(default_factory=list)  # [B, N] bool each
    updated: list[Tensor] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    shares: Tensor | None = None  # [B, read, D]
    pooled: int | None = None  # tokens that a pooling head reads, where it reads fewer than there are slots
    read_alone: bool = False  # in the last MLP
    masks_of_kernels: bool = False  # some masks hang on kernels of ours: decisions made in fc1, merges, selections
    spent: list[Spent] = field(default_factory=list)  # MACs beside the blocks
    noted: list[tuple[int, Tensor]] = field(default_factory=list)  # (block, [B, N]) what patches were ranked by
    shift: Tensor | None = None  # [B, 1]
    cap: Cap | None = None
    behind: Tensor | None = None  # [N] bool: slots behind the prefix tokens
    keeps: bool = False  # last values are wanted of tokens that a head sees as zeros, too
    zeroed: tuple[Tensor, Tensor] | None = None  # who that is [B, N], and their last values [B, N, D]

    def answer(self, layer: int, when: When, decision: object) -> None:
        """Take the policy's share for the readout, then let the layout do the rest."""
        if decision is None:
            return
        if self.read_alone and not isinstance(decision, Keep):
            raise ValueError(f"{type(decision).__name__} at the very end, of a policy that says quiet_end.")
        share = getattr(decision, "share", None)
        if share is not None:
            part = share[:, : self.read, None].to(self.layout.rows.dtype) * self.layout.leading()
            self.shares = part if self.shares is None else self.shares + part
        if self.keeps and isinstance(decision, Drop) and decision.zeroed:
            self.keep_last(decision.leaving & self.layout.live, self.layout.leading())
        self.layout.carry_out(decision, when)  # type: ignore[arg-type]
        self.masks_of_kernels = self.masks_of_kernels or isinstance(decision, (Merge, Skip))
        self.steps.append(Step(layer, when, detached(decision)))  # type: ignore[arg-type]

    def noted_facts(self) -> dict[str, Tensor]:
        if not self.noted:
            return {}
        blocks = torch.tensor([block for block, _ in self.noted])
        return {"keep_scores": torch.stack([score for _, score in self.noted]), "keep_blocks": blocks}

    def keep_last(self, leaving: Tensor, value: Tensor) -> None:
        """Remember the value of tokens that are about to be set to zero."""
        gone, last = (torch.zeros_like(leaving), value) if self.zeroed is None else self.zeroed
        self.zeroed = gone | leaving, torch.where(leaving[..., None], value, last)

    def unzeroed(self, last: Tensor) -> Tensor:
        """[B, N, D] the last values with those back that were set to zero on leaving."""
        return last if self.zeroed is None else torch.where(self.zeroed[0][..., None], self.zeroed[1], last)

    def spent_where(self, attended: Tensor) -> tuple[Spent, ...]:
        """What was spent, with the blocks by whose masks it is counted, those of the trace [L, B, N]: a pass's own may
        be constants that are kept."""
        masks = self.attended
        where = [next((i for i, mask in enumerate(masks) if mask is s.present), None) for s in self.spent]
        pairs = zip(self.spent, where, strict=True)
        return tuple(s if block is None else replace(s, block=block, present=attended[block]) for s, block in pairs)

    def count_evidence(self, wanted: frozenset[str], acting: frozenset[str]) -> None:
        for name in sorted(wanted):
            part = "evidence" if name in acting else "asked"
            self.spent.append(Spent(part, self.attended[-1], functools.partial(CostModel.evidence, self.costs, name)))


@dataclass
class View:
    """What a policy sees of the pass: never how rows are stored."""

    _run: _Run
    layer: int  # 0-based block index
    _vit: VisionTransformer
    shape: Shape
    found: dict[str, Any]  # the evidence it declared for this layer, once the block has come by it
    asked: frozenset[str]

    @property
    def last(self) -> bool:
        return self.layer == self.shape.layers - 1

    @property
    def present(self) -> Tensor:
        """[B, N] bool: tokens that take part (have not left, do not sit out this block). Not to be written to."""
        return self._run.layout.here

    def full(self, value: float, dtype: torch.dtype) -> Tensor:
        """[B, N] of one value, not to be written to."""
        layout = self._run.layout
        return layout.full(layout.live, layout.live.shape, value, dtype)

    @property
    def patches(self) -> Tensor:
        """[B, N] bool: the present tokens that are not class, distillation or register tokens."""
        if self._run.behind is None:
            slots = torch.arange(self.present.shape[1], device=self.present.device)
            self._run.behind = slots >= self.shape.prefix
        return self.present & self._run.behind

    @property
    def shift(self) -> Tensor | None:
        """[B, 1] what a budget adds to the logit of leaving, for policies whose dial is "shift"; None without one."""
        return self._run.shift

    @property
    def limited(self) -> bool:
        """Whether there is a max_macs, so that some may have to leave that would not by themselves."""
        return self._run.cap is not None

    def surplus(self, stay: Tensor, standing: Tensor) -> Tensor | None:
        """[B, U] bool: who of those that would `stay` [B, U] must leave as well, so that max_macs holds; None without
        that limit. The highest `standing` [B, U] leaves first, prefix tokens last. U = 1 stands for the image."""
        cap = self._run.cap
        if cap is None:
            return None
        if stay.shape[1] == 1:
            count = self.present.sum(-1)
            return stay & (cap.allowed(self.layer, count) < count)[:, None]
        slot = torch.arange(stay.shape[1], device=stay.device)
        order = torch.where(slot < self.shape.prefix, -1.0, standing).masked_fill(~stay, float("inf"))
        rank = order.argsort(dim=-1, stable=True).argsort(dim=-1)
        return stay & (rank >= cap.allowed(self.layer, stay.sum(-1))[:, None])

    def element(self, index: int) -> Tensor:
        """[B, N] one element of every token's row (float32), 0 where it is absent."""
        layout = self._run.layout
        return layout.grid(layout.rows[..., index].float())

    def image(self) -> Tensor:
        """[B, D] one row an image (float32): the class token, or the mean of the tokens where the head pools them."""
        layout = self._run.layout
        if self.shape.read < self.shape.tokens:
            return layout.leading()[:, 0].to(torch.float32, copy=True)  # rows are written to in place
        return layout.mean(layout.rows)

    def note(self, score: Tensor, block: int) -> None:
        """With ask=('keep_scores',): keep what patches are ranked by, [B, N], the higher the longer they stay.

        `block` is the first one that a patch which goes now will miss. NaN: not ranked.
        """
        if "keep_scores" in self.asked:
            score = score.detach().float()
            self._run.noted.append((block, torch.where(self.patches, score, torch.full_like(score, float("nan")))))

    def apply(self, module: nn.Module, over: Tensor | None = None, *, part: str = "policy") -> Tensor:
        """Run a small row-wise module on every present token: [B, N, ...], 0 where absent; its MACs are counted.

        With `over` [B, N] the module is called as module(rows, mean): mean(values [R, C]) gives every row the mean of
        the values over its image, weighted by `over`.
        """
        layout = self._run.layout

        def mean(values: Tensor) -> Tensor:
            return layout.expand(layout.mean(values, over))

        out = module(layout.rows) if over is None else module(layout.rows, mean)
        self._spend(row_macs(module), part)
        return layout.grid(out)

    def apply_to_images(self, module: nn.Module, values: Tensor) -> Tensor:
        """Run a small module on one row an image, [B, C] -> [B, ...]; 0 for images that have left; counted."""
        self._spend(row_macs(module), "policy", images=True)
        return self._where_present(module, values)

    def logits(self, part: str = "policy") -> Tensor:
        """[B, classes] what the model's own head says at this point (an exit); 0 for images that have left; counted."""
        shape, leading = self.shape, self._run.layout.leading()
        self._spend(self._run.costs.head, part, images=True)
        leading = leading if shape.read == shape.tokens else leading[:, : shape.read]
        return self._where_present(lambda rows: timm_vit.head(self._vit, rows)[1], leading)

    def spend(self, macs: Tensor | float, part: str = "policy") -> None:
        """Count MACs [B] of a policy's own matrix products."""
        self._run.spent.append(Spent(part, self.present, lambda present: torch.zeros_like(present) + macs))

    def _spend(self, each: float, part: str, *, images: bool = False) -> None:
        """So many MACs for every present token, or for every image that has one."""
        self._run.spent.append(
            Spent(part, self.present, lambda present: (present > 0).double() * each if images else present * each)
        )

    def _where_present(self, run: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """`run` on the images that have a token left: on all of them where no shape may depend on who is there."""
        some = self._run.layout.here.any(-1)
        if self._run.layout.fixed:
            out = run(values)
            return torch.where(some.reshape(-1, *[1] * (out.ndim - 1)), out, torch.zeros_like(out))
        index = some.nonzero()[:, 0]
        out = run(values[index])
        return out.new_zeros(len(values), *out.shape[1:]).index_copy(0, index, out)
