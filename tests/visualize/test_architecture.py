"""The picture of a model's architecture, and images beside their halted patches."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from adaptivit.errors import UserError
from adaptivit.utils.plotting import png_bytes
from adaptivit.visualize import architecture, halted, look
from adaptivit.visualize.architecture import svg
from tests.support.models import pictures, tiny


def words(seen: Any) -> list[str]:
    return re.findall(r">([^<>\n]+)</text>", svg(architecture(seen)).decode())


def test_blocks_have_the_tokens_that_were_measured() -> None:
    model = tiny("aht")
    seen = look(model, pictures(3))
    assert seen.plans is not None
    found = words(seen)
    for tokens in seen.live.mean(1):
        assert f"{tokens:.0f}" in found
    assert [w for w in found if re.fullmatch(r"P\d", w)] == [f"P{i + 1}" for i in range(len(seen.plans.stages))]
    assert set(seen.decisions.values()) == {"Drop"}
    assert sorted(seen.decisions) == [layer for layer in range(seen.layers) if model.policy.decides(layer)]  # type: ignore[operator]
    assert "supervisor of each block: halts tokens" in found
    assert (
        f"tokens a block, mean of 3 images; {100 * seen.macs.mean() / seen.static_macs:.0f} % of static's MACs" in found
    )
    assert svg(architecture(seen)) == svg(architecture(seen))
    assert png_bytes(architecture(seen)).startswith(b"\x89PNG")


@pytest.mark.parametrize(("policy", "what"), [("fold", "merges"), ("amod", "skips"), ("evit", "merges")])
def test_decisions_of_other_policies(policy: str, what: str) -> None:
    found = words(look(tiny(policy), pictures(2)))
    assert f"decision of each block: {what} tokens" in found
    assert not any("planner" in w for w in found)


def test_static_decides_nothing() -> None:
    assert not any("decision" in w for w in words(look(tiny("static"), pictures(1))))


def test_halted_patches_are_overlaid() -> None:
    seen = look(tiny("aht"), pictures(4))
    seen.attended[-1, 0] = True
    seen.attended[-1, 1] = False
    page = np.asarray(halted(seen, [0, 1], columns=1)).astype(int)
    tile = 224
    left, right = page[28 : 28 + tile, 28 : 28 + tile], page[28 : 28 + tile, 28 + tile + 14 :][:, :tile]
    assert np.abs(left - right).max() <= 1  # all patches reach the last block: the image itself
    low = 28 + tile + 34 + 14
    left, right = page[low : low + tile, 28 : 28 + tile], page[low : low + tile, 28 + tile + 14 :][:, :tile]
    assert np.abs(left - right).mean() > 10
    with pytest.raises(UserError, match="at least one image"):
        halted(seen, [])
