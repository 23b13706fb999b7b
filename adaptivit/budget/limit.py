"""max_macs: a limit on what an image may cost, held while a pass runs, for every input.

Shapes: B images, N slots, L blocks.

With f_l(n) what block l costs with n tokens, evidence and the policy's own modules included, an image that has spent s
goes on untouched as long as all blocks up to the next one m in which tokens can leave can be paid, and the least that
must follow it (the prefix tokens alone where the policy never lets them go, else nothing):

    s + sum_{l < j <= m} f_j(n) + sum_{j > m} f_j(least) <= max_macs

(where tokens can still leave before that block's MLP, only the least of its MLP and of the policy's modules after it)

Where it cannot, so many tokens stay as could stay to the end: the largest n with s + sum_{j > l} f_j(n) <= max_macs.
Both keep the invariant that the least can be paid. So an image that stays below the limit by itself is not touched, and
another has as many tokens in all the blocks that are left. All of it is arithmetic on tensors, image by image: the host
never waits for a device, and an image in a batch gets what it gets alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cost import CostModel

if TYPE_CHECKING:
    from ..policies.base import Policy


class MacsLimiter:
    """What is left for every image of a pass."""

    def __init__(self, policy: Policy, costs: CostModel, limit: Tensor) -> None:  # limit [B], float64
        self.each = block_macs(policy, costs, limit.device)  # [L, N + 1] f_l(n)
        self.rest = self.each.flip(0).cumsum(0).flip(0)  # [L, N + 1] from block l on with the same number of tokens
        self.least = least_tokens(policy)
        self.left = limit - (costs.embedding + costs.head)  # [B]
        last = costs.shape.layers - 1  # no policy decides in the last block
        # [L] what a token saves that leaves before the MLP: the MLP, and the policy's modules after it
        own = [(policy.policy_macs(layer, costs) or (0.0, 0.0))[0] for layer in range(last + 1)]
        self.late = [2.0 * costs.shape.dim * costs.shape.mlp_dim + macs for macs in own]
        self.layer = 0
        counts = torch.arange(costs.tokens + 1, device=limit.device)
        spared = (counts - self.least).clamp_min(
            0
        ) * policy.traits.decides_before_mlp  # all but the least may leave before an MLP
        ends = [next(m for m in range(first, last + 1) if m == last or policy.decides(m)) for first in range(last + 1)]
        beyond = torch.cat([self.rest, torch.zeros_like(self.rest[:1])])
        self.next = torch.stack(
            [self.rest[i] - beyond[m + 1] - spared * self.late[m] * (m < last) for i, m in enumerate(ends)]
        )
        self.after = torch.stack([beyond[m + 1, self.least] for m in ends])  # [L] the least of what follows
        self.counts = counts
        self.entered: Tensor | None = None  # [B] tokens that are paid for, and may still leave before the MLP

    def pay(self, layer: int, present: Tensor) -> None:
        """Block `layer` runs with the tokens present [B, N]."""
        self.left, self.layer = self.left - self.each[layer][present.sum(-1)], layer

    def before_mlp(self, present: Tensor) -> None:
        """Tokens that leave between attention and MLP get back what was paid for them behind that."""
        self.entered = present.sum(-1)

    def at_mlp(self, present: Tensor) -> None:
        assert self.entered is not None
        self.left = self.left + self.late[self.layer] * (self.entered - present.sum(-1))
        self.entered = None

    def allowed(self, layer: int, count: Tensor) -> Tensor:
        """[B] how many of `count` [B] tokens may go on after block `layer`."""
        rest, left = self.rest[layer + 1], self.left[:, None]
        if self.entered is not None:
            left = left + self.late[layer] * (self.entered[:, None] - self.counts)  # [B, N + 1] by how many stay
        steady = (rest <= left).sum(-1) - 1
        now = left.expand(-1, len(rest)).gather(1, count[:, None])[:, 0]
        return torch.where(self.next[layer + 1][count] + self.after[layer + 1] <= now, count, steady)


def least_tokens(policy: Policy) -> int:
    """Tokens that no limit lets go: class, distillation and register tokens, where the policy never does."""
    return policy.shape.num_prefix_tokens if policy.traits.keeps_prefix else 0


def block_macs(policy: Policy, costs: CostModel, device: torch.device | None = None) -> Tensor:
    """[L, N + 1] MACs of each block with 0..N tokens, evidence and the policy's own modules included."""
    counts = torch.arange(costs.tokens + 1, device=device, dtype=torch.float64)
    some = (counts > 0).double()
    rows = []
    for layer in range(costs.shape.layers):
        token, image = policy.policy_macs(layer, costs) or (0.0, 0.0)
        macs = costs.blocks(counts[None], counts[None]) + token * counts + image * some
        for name in policy.evidence(layer, frozenset()):
            macs = macs + costs.evidence(name, counts) * some
        rows.append(macs)
    return torch.stack(rows)


def minimum(policy: Policy, costs: CostModel) -> float:
    """The smallest limit that can be held: the first blocks that the policy has to run in full, then the least."""
    each, full = block_macs(policy, costs), policy.traits.dense_blocks
    return costs.embedding + costs.head + float(each[:full, -1].sum() + each[full:, least_tokens(policy)].sum())
