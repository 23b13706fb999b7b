"""Looking is paid for where it is asked for: attention stays fused in every block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptivit.kernels import attention
from tests.support.models import pictures, tiny

# policy -> blocks (of 6) in which the attention matrix itself may be computed, and for which of its queries
LOOKS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "amod": ({}, [0, 2, 4]),
    "evit": ({"blocks": (1, 4)}, [1, 4]),
    "fold": ({"blocks": (2,), "keep": 0.5}, [2]),
    "tome": ({"r": 2}, []),
    "mod": ({}, []),
    "dynamicvit": ({}, []),
    "patch_slimming": ({"counts": (14, 9, 9, 5, 2)}, []),
    "spvit": ({"select": "count"}, []),
    "static": ({}, []),
}


@pytest.mark.parametrize("layout", ["masked", "packed", "gathered"])
@pytest.mark.parametrize("name", LOOKS)
@torch.no_grad()
def test_attention_is_fused_in_every_block(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, blocks = LOOKS[name]
    model = tiny(name, **settings)
    events: list[str] = []

    def spy(what: str) -> None:
        real = getattr(attention, what)

        def call(*given: Any, **more: Any) -> Any:
            events.append(what)
            return real(*given, **more)

        monkeypatch.setattr(attention, what, call)

    for what in ("fused", "weighted", "probabilities"):
        spy(what)
    model(pictures(2), layout=layout)
    assert events.count("fused") == 6
    assert "weighted" not in events
    looked, block = [], 0
    for event in events:
        if event == "probabilities":
            looked.append(block)  # evidence is taken before the block attends
        block += event == "fused"
    assert looked == blocks
