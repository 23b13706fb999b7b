"""max_macs: a limit on what an image may cost, held while a pass runs, for every input.

Shapes: B images, N slots, L blocks.

With f_l(n) what block l costs with n tokens, evidence and the policy's own modules included, an image that has spent s
goes on untouched as long as the next block can be paid and the least that must follow it (the prefix tokens alone where
the policy never lets them go, else nothing):

    s + f_{l+1}(n) + sum_{j > l+1} f_j(least) <= max_macs

Where it cannot, so many tokens stay as could stay to the end: the largest n with s + sum_{j > l} f_j(n) <= max_macs.
Both keep the invariant that the least can be paid. So whoever stays below the limit by itself is not touched, and what
is left of an image that does not is spread over the blocks that are left. All of it is arithmetic on tensors, image by
image: nobody waits for a device, and an image in a batch fares as it does alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .cost import CostModel

if TYPE_CHECKING:
    from .policies.base import Policy


class Cap:
    """What is left for every image of a pass."""

    def __init__(self, policy: Policy, costs: CostModel, limit: Tensor) -> None:  # limit [B], float64
        self.each = block_macs(policy, costs, limit.device)  # [L, N + 1] f_l(n)
        self.rest = self.each.flip(0).cumsum(0).flip(0)  # [L, N + 1] from block l on with the same number of tokens
        self.least = least_tokens(policy)
        self.left = limit - (costs.embedding + costs.head)  # [B]

    def pay(self, layer: int, present: Tensor) -> None:
        """Block `layer` runs with the tokens present [B, N]."""
        self.left = self.left - self.each[layer][present.sum(-1)]

    def allowed(self, layer: int, count: Tensor) -> Tensor:
        """[B] how many of `count` [B] tokens may go on after block `layer`."""
        each, rest, left = self.each[layer + 1], self.rest[layer + 1], self.left
        after = rest[self.least] - each[self.least]  # of the blocks behind the next one
        steady = (rest <= left[:, None]).sum(-1) - 1
        return torch.where(each[count] + after <= left, count, steady)


def least_tokens(policy: Policy) -> int:
    """Tokens that no limit lets go: class, distillation and register tokens, where the policy never does."""
    return policy.shape.prefix if policy.prefix_stays else 0


def block_macs(policy: Policy, costs: CostModel, device: torch.device | None = None) -> Tensor:
    """[L, N + 1] MACs of each block with 0..N tokens, evidence and the policy's own modules included."""
    counts = torch.arange(costs.tokens + 1, device=device, dtype=torch.float64)
    some = (counts > 0).double()
    rows = []
    for layer in range(costs.shape.layers):
        token, image = policy.overhead(layer, costs) or (0.0, 0.0)
        macs = costs.blocks(counts[None], counts[None]) + token * counts + image * some
        for name in policy.evidence(layer, frozenset()):
            macs = macs + costs.evidence(name, counts) * some
        rows.append(macs)
    return torch.stack(rows)


def minimum(policy: Policy, costs: CostModel) -> float:
    """The smallest limit that can be held: the first block in full, then the least."""
    each = block_macs(policy, costs)
    return costs.embedding + costs.head + float(each[0, -1] + each[1:, least_tokens(policy)].sum())
