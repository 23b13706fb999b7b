"""What a policy sees of a pass: masks, evidence and budgets on the grid; never how rows are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..cost import AddedMacs, Shape, row_macs

if TYPE_CHECKING:
    from ..forward import PassState


@dataclass
class BlockContext:
    """One block of a pass. Shapes: B images, N slots, D width, R rows."""

    _run: PassState
    layer: int  # 0-based block index
    aux: frozenset[str] = frozenset()  # facts wanted though they do not act
    evidence: dict[str, Any] = field(default_factory=dict)  # what it declared for this block, as it is collected

    @property
    def shape(self) -> Shape:
        return self._run.shape

    @property
    def last(self) -> bool:
        return self.layer == self.shape.layers - 1

    @property
    def present(self) -> Tensor:
        """[B, N] bool: tokens that take part (have not left, do not skip this block). Not to be written to."""
        return self._run.layout.active

    @property
    def patches(self) -> Tensor:
        """[B, N] bool: the present tokens that are not class, distillation or register tokens."""
        return self.present & self._run.patch_slots

    def cached_full(self, value: float, dtype: torch.dtype) -> Tensor:
        """[B, N] of one value, not to be written to."""
        layout = self._run.layout
        return layout.full(layout.alive, layout.alive.shape, value, dtype)

    # -- budgets ---------------------------------------------------------------------------------------------
    @property
    def shift(self) -> Tensor | None:
        """[B, 1] what a budget adds to the logit of leaving, for policies whose dial is "shift"; None without one."""
        return self._run.shift

    @property
    def limited(self) -> bool:
        """Whether there is a max_macs, so that tokens may have to leave that would otherwise stay."""
        return self._run.limiter is not None

    def over_limit(self, keep: Tensor, priority: Tensor) -> Tensor | None:
        """[B, U] bool: which tokens of `keep` [B, U] must leave as well, so that max_macs holds; None without a limit.

        The highest `priority` [B, U] leaves first, prefix tokens last. U = 1 stands for the whole image.
        """
        limiter = self._run.limiter
        if limiter is None:
            return None
        if limiter.entered is not None and not self._run.policy.traits.decides_before_mlp:
            raise ValueError("over_limit before the MLP, of a policy without the trait decides_before_mlp.")
        if keep.shape[1] == 1:
            count = self.present.sum(-1)
            return keep & (limiter.allowed(self.layer, count) < count)[:, None]
        slot = torch.arange(keep.shape[1], device=keep.device)
        order = torch.where(slot < self.shape.num_prefix_tokens, -1.0, priority).masked_fill(~keep, float("inf"))
        rank = order.argsort(dim=-1, stable=True).argsort(dim=-1)
        return keep & (rank >= limiter.allowed(self.layer, keep.sum(-1))[:, None])

    # -- values ----------------------------------------------------------------------------------------------
    def channel(self, index: int) -> Tensor:
        """[B, N] one element of every token's row (float32), 0 where it is absent."""
        return self._run.layout.to_grid(self._rows()[..., index].float())

    def image(self) -> Tensor:
        """[B, D] one row an image (float32): the class token, or the mean of the tokens where the head pools them."""
        layout = self._run.layout
        if self.shape.head_tokens < self.shape.tokens:
            return layout.head_rows()[:, 0].to(torch.float32, copy=True)  # rows are written to in place
        return layout.mean(layout.rows)

    def logits(self, part: str = "policy") -> Tensor:
        """[B, classes] of the model's own head at this point (an exit); 0 for images that have left; counted."""
        shape, leading = self.shape, self._run.layout.head_rows()
        self._add_macs(self._run.costs.head, part, images=True)
        leading = leading if shape.head_tokens == shape.tokens else leading[:, : shape.head_tokens]
        return self._where_present(lambda rows: self._run.backbone.head(rows)[1], leading)

    def record_scores(self, score: Tensor, block: int) -> None:
        """With aux=('keep_scores',): record what patches are ranked by, [B, N], the higher the longer they stay.

        `block` is the first one that a patch which leaves now misses. NaN: not ranked.
        """
        if "keep_scores" in self.aux:
            score = score.detach().float()
            kept = torch.where(self.patches, score, torch.full_like(score, float("nan")))
            self._run.recorded_scores.append((block, kept))

    # -- a policy's own modules ------------------------------------------------------------------------------
    def apply(self, module: nn.Module, over: Tensor | None = None, *, part: str = "policy") -> Tensor:
        """Run a small row-wise module on every present token: [B, N, ...], 0 where absent; its MACs are counted.

        With `over` [B, N] the module is called as module(rows, mean): mean(values [R, C]) gives every row the mean of
        the values over its image, weighted by `over`.
        """
        layout = self._run.layout

        def mean(values: Tensor) -> Tensor:
            return layout.expand(layout.mean(values, over))

        out = module(self._rows()) if over is None else module(self._rows(), mean)
        self._add_macs(row_macs(module), part)
        return layout.to_grid(out)

    def apply_to_images(self, module: nn.Module, values: Tensor, part: str = "policy") -> Tensor:
        """Run a small module on one row an image, [B, C] -> [B, ...]; 0 for images that have left; counted."""
        self._add_macs(row_macs(module), part, images=True)
        return self._where_present(module, values)

    def _rows(self) -> Tensor:
        """[R, D] rows of the present tokens."""
        if self._run.prefix_only_mlp:
            raise ValueError("Patches read after the last MLP, of a policy with the trait ignores_last_mlp_patches.")
        return self._run.layout.rows

    def add_macs(self, macs: Tensor | float, part: str = "policy") -> None:
        """Count MACs [B] of a policy's own matrix products."""
        self._run.added_macs.append(AddedMacs(part, self.present, lambda present: torch.zeros_like(present) + macs))

    def _add_macs(self, each: float, part: str, *, images: bool = False) -> None:
        """So many MACs for every present token, or for every image that has one."""
        self._run.added_macs.append(
            AddedMacs(part, self.present, lambda present: (present > 0).double() * each if images else present * each)
        )

    def _where_present(self, run: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """`run` on the images that have a token left; on all of them where no shape may depend on that."""
        some = self._run.layout.active.any(-1)
        if self._run.layout.static_shapes:
            out = run(values)
            return torch.where(some.reshape(-1, *[1] * (out.ndim - 1)), out, torch.zeros_like(out))
        index = some.nonzero()[:, 0]
        out = run(values[index])
        return out.new_zeros(len(values), *out.shape[1:]).index_copy(0, index, out)
