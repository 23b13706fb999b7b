"""What a policy may ask to see of a block, and how it is collected while the block runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.threshold_gate import ThresholdGate
from ..layouts import Layout
from ..layouts.similarity import mean_key

# What Policy.evidence can name. MACs of each are in CostModel.evidence.
EVIDENCE = {
    "fc1": "[B, N] one element of the MLP's hidden layer before its activation",
    "received": "[B, N] attention received: mean over heads and queries (A-MoD's column mean)",
    "class_row": "[B, N] the class token's attention row, mean over heads (EViT)",
    "keys": "[B, N, d] keys, mean over heads",
    "match": "layouts.Match: the most similar of some tokens for each of others, by the cosine of those keys (ToMe)",
    "similarity": "layouts.Similarity: that cosine of all tokens, from which every token's nearest follows (folding)",
    "halted_row": "[B, D] what the block makes of a zeroed, masked row (a halted token in A-ViT's public code)",
}


@dataclass
class EvidenceRequest:
    """The evidence that a policy wants of one block; `found` fills while the block runs."""

    wanted: frozenset[str] = frozenset()
    index: int = 0  # the element of the hidden layer for "fc1"
    gradient: bool = False  # whether attention and keys carry one
    gate: ThresholdGate | None = None  # a decision that fc1 may take on the way; an executor that does gives "gate"
    found: dict[str, Any] | None = None

    def give(self, name: str, value: Any) -> None:
        if self.found is None:
            self.found = {}
        self.found[name] = value


def collect_evidence(layout: Layout, request: EvidenceRequest, q: Tensor, k: Tensor) -> None:
    """Give what is wanted of the attention, from q and k [R, H, d]."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and request.gradient):
        if "received" in request.wanted:
            request.give("received", layout.attention_rows(q, k, "all"))
        both = {"class_row", "similarity"} <= request.wanted
        if both:
            row, similarity = layout.class_row_and_similarity(q, k)
            request.give("class_row", row)
            request.give("similarity", similarity)
        elif "class_row" in request.wanted:
            request.give("class_row", layout.attention_rows(q, k, "class"))
        if "keys" in request.wanted:
            request.give("keys", layout.to_grid(mean_key(k)))
        if "match" in request.wanted:
            request.give("match", layout.match(k))
        if "similarity" in request.wanted and not both:
            request.give("similarity", layout.similarity(k))
