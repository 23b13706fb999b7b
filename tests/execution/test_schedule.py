"""When rows move: the choice against every other one, and what it is made of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivit.decision import Trace
from adaptivit.errors import UserError
from adaptivit.execution import row_schedule, triton
from adaptivit.execution.row_schedule import Times, choose, expected_rows, live_rows, plan
from adaptivit.layouts import RowSchedule
from tests.support.models import assert_close, pictures, tiny

L = 6


def held(live: Sequence[float], moves: Sequence[int] | frozenset[int]) -> list[float]:
    """[L] rows in store in every block, literally."""
    rows = [live[0]]
    for layer in range(1, len(live)):
        rows.append(live[layer] if layer - 1 in moves else rows[-1])
    return rows


def seconds(live: Sequence[float], moves: Sequence[int] | frozenset[int], times: Times) -> float:
    each = (times.at(rows, masked=now < rows) for now, rows in zip(live, held(live, moves), strict=True))
    return sum(each) + times.move * len(moves)


@st.composite
def falling(draw: st.DrawFn) -> list[float]:
    counts = st.lists(st.integers(0, 2000), min_size=1, max_size=7)
    return [float(n) for n in sorted(draw(counts), reverse=True)]


@st.composite
def measured(draw: st.DrawFn) -> Times:
    """Times as a device could give them, not always rising."""
    rows = sorted(draw(st.sets(st.integers(1, 2000), min_size=1, max_size=5)))
    second = st.floats(0.01, 10)
    plain, masked = (tuple(draw(second) for _ in rows) for _ in range(2))
    return Times(tuple(rows), plain, draw(st.floats(0, 3)), draw(st.sampled_from([None, masked])))


@given(falling(), measured())
def test_no_other_choice_is_faster(live: list[float], times: Times) -> None:
    moves = choose(live, times)
    blocks = range(len(live) - 1)  # after the last block no rows are needed
    assert moves <= set(blocks)
    every = (chosen for n in range(len(live)) for chosen in itertools.combinations(blocks, n))
    best = min(seconds(live, chosen, times) for chosen in every)
    assert seconds(live, moves, times) == pytest.approx(best, rel=1e-9)


LIVE = [100.0, 100.0, 80.0, 80.0, 30.0, 29.0]
RISING = Times((10, 100), (0.1, 1.0), 0.0)


def test_moves_that_cost_nothing_or_everything() -> None:
    assert choose(LIVE, RISING) == {1, 3, 4}
    assert choose(LIVE, Times((10, 100), (0.1, 1.0), 1e6)) == frozenset()
    assert choose(LIVE, Times((10, 100), (1.0, 1.0), 0.1)) == frozenset()  # rows cost nothing: nothing to win
    assert choose([100.0] * L, RISING) == frozenset()
    assert choose([100.0], RISING) == frozenset()


def test_masks_may_make_a_move_pay() -> None:
    live, times = [100.0, 100.0, 99.0, 99.0], ((10, 100), (1.0, 1.0), 0.5)
    assert choose(live, Times(*times)) == frozenset()
    assert choose(live, Times(*times, (1.2, 1.2))) == frozenset()
    assert choose(live, Times(*times, (1.3, 1.3))) == {1}
    assert Times(*times, (1.0, 1.6)).at(70, masked=True) == pytest.approx(1.4)


def test_a_move_must_pay_for_itself_in_the_blocks_to_come() -> None:
    late = [100.0, 100.0, 100.0, 100.0, 100.0, 10.0]  # saves 0.9 once
    early = [100.0, 10.0, 10.0, 10.0, 10.0, 10.0]  # five times
    costly = Times((10, 100), (0.1, 1.0), 1.0)
    assert choose(late, costly) == frozenset()
    assert choose(early, costly) == {0}


def test_times_between_measurements() -> None:
    times = Times((10, 30, 100), (1.0, 2.0, 9.0), 0.5)
    measured = {10: 1.0, 30: 2.0, 100: 9.0}
    between = {20: 1.5, 25: 1.75, 65: 5.5}
    below, above = {0: 1.0, 5: 1.0}, {200: 18.0, 150: 13.5}  # a launch is not less; more rows than ever in proportion
    for rows, expected in (measured | between | below | above).items():
        assert times.at(rows) == pytest.approx(expected)
    one = Times((40,), (2.0,), 0.0)
    assert [one.at(rows) for rows in (1, 40, 80)] == [2.0, 2.0, 4.0]


def test_expected_rows() -> None:
    assert expected_rows(LIVE, frozenset()) == (100,) * L
    assert expected_rows(LIVE, frozenset({1, 3, 4})) == (100, 100, 80, 80, 30, 29)
    assert expected_rows(LIVE, frozenset({3})) == (100, 100, 100, 100, 30, 30)
    assert expected_rows([2.6, 0.2, 0.0], frozenset({0, 1})) == (3, 1, 1)  # whole, and at least one


@given(falling(), st.sets(st.integers(0, L)))
def test_expected_rows_are_those_in_store(live: list[float], moves: set[int]) -> None:
    assert expected_rows(live, frozenset(moves)) == tuple(max(1, round(n)) for n in held(live, frozenset(moves)))


# -- profiles -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("aht", gamma=2.0, beta=-1.5)


def test_live_rows_of_images_a_trace_and_shares(model: Any) -> None:
    images = pictures(5)
    trace = model(images).trace
    expected = 8 * trace.live.double().mean(1)
    assert expected[-1] < expected[0]
    for profile in (images, trace, (expected / 8 / model.shape.tokens).tolist()):
        assert_close(torch.tensor(live_rows(model, profile, 8), dtype=torch.double), expected)


def test_live_rows_of_a_trace_count_attention() -> None:
    attended, updated = torch.ones(2, 3, 4, dtype=torch.bool), torch.zeros(2, 3, 4, dtype=torch.bool)
    attended[1, 0] = False
    assert live_rows(None, Trace(attended, updated, 1), 6) == [24.0, 16.0]  # type: ignore[arg-type]


@pytest.mark.parametrize("shares", [[0.5] * (L - 1), [0.5] * (L + 1), [], [1.2] + [0.5] * (L - 1), [-0.1] * L])
def test_shares_that_are_none(model: Any, shares: list[float]) -> None:
    with pytest.raises(UserError, match=rf"profile: expected {L} live shares in 0\.\.1"):
        live_rows(model, shares, 2)


# -- plans ----------------------------------------------------------------------------------------------------------
def test_a_plan_without_a_profile(model: Any) -> None:
    most = triton.FEW_ROWS // model.shape.tokens
    assert plan(model, 1, None) == plan(model, most, None) == RowSchedule(moves=frozenset())
    assert plan(model, most + 1, None) == RowSchedule(moves=None)


@pytest.mark.parametrize("move", [0.0, 0.05, 1e6])
def test_a_plan_with_a_profile(model: Any, monkeypatch: pytest.MonkeyPatch, move: float) -> None:
    times, asked = Times((4, 136), (0.2, 1.0), move), []

    def measure(*given: Any) -> Times:
        asked.append(given)
        return times

    monkeypatch.setattr(row_schedule, "measure", measure)
    shares = [1.0, 1.0, 0.5, 0.25, 0.25, 0.1]
    made = plan(model, 8, shares)
    live = [8 * 17 * share for share in shares]
    assert asked == [(model, 8, live)]
    assert made.moves == choose(live, times)
    assert made.rows == expected_rows(live, choose(live, times))
    assert made.moves == {0.0: {1, 2, 4}, 0.05: {1, 2, 4}, 1e6: set()}[move]


def test_what_a_plan_says() -> None:
    anywhere, still, some = RowSchedule(), RowSchedule(frozenset()), RowSchedule(frozenset({1}), (9, 5))
    assert [p.moves_after(1) for p in (anywhere, still, some)] == [True, False, True]
    assert not some.moves_after(0)
    assert [some.expected(layer, 7) for layer in (0, 1, 2)] == [9, 5, 7]  # the room where nothing is known
