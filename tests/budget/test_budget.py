"""Budgets as text, and the curve that turns them into a position; no model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptivit.budget.curve import Calibration, Latency, Point, falling, parse
from adaptivit.errors import UserError


def curve(continuous: bool = True, **more: Any) -> Calibration:
    points = (Point(-2.0, 100.0, 17.0), Point(0.0, 96.0, 16.0), Point(1.0, 92.0, 15.0), Point(2.0, 60.0, 9.0))
    return Calibration("shift", continuous, 17, 100.0, 8, points, points[1], **more)


@pytest.mark.parametrize(
    ("text", "macs", "share", "ms"),
    [
        ("0.8 GMACs", 0.8e9, None, None),
        ("800MMACs", 8e8, None, None),
        ("1e3 kmac", 1e6, None, None),
        ("12 MACs", 12.0, None, None),
        (" -33% ", None, 0.67, None),
        ("−33 %", None, 0.67, None),
        ("-0%", None, 1.0, None),
        ("3 ms", None, None, 3.0),
        (".5ms", None, None, 0.5),
        (8e8, 8e8, None, None),
        (800000000, 8e8, None, None),
        ("none", None, None, None),
    ],
)
def test_what_is_understood(text: Any, macs: float | None, share: float | None, ms: float | None) -> None:
    made = parse(text)
    assert (made.macs, made.ms) == (macs, ms)
    assert made.share == pytest.approx(share) if share is not None else made.share is None
    assert parse(made.text) == replace(made, text=made.text)  # its own text means the same


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-150%", r"between -0% and -100%, got '-150%'"),
        ("-100%", "between"),
        ("33%", "written with a minus"),
        ("+33%", "written with a minus"),
        ("3 parsecs", r"expected '0.8 GMACs', '-33%' \(less than static\) or '3 ms', got '3 parsecs'"),
        ("-3 ms", "more than 0"),
        ("0 GMACs", "more than 0"),
        ("", "expected"),
        ("nan MACs", "expected"),
        (0, "number of MACs > 0"),
        (float("nan"), "number of MACs > 0"),
        (float("inf"), "number of MACs > 0"),
        (10**400, "number of MACs > 0, .*got inf"),
        (-(10**400), "number of MACs > 0"),
        (True, "expected"),
        (None, "expected"),
        ({"macs": 3}, "expected"),
    ],
)
def test_what_is_not(text: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(text)


def test_positions() -> None:
    made = curve()
    assert made.at(100.0) == -2.0
    assert made.at(98.0) == pytest.approx(-1.0)  # on the line between two points
    assert made.at(92.0) == 1.0
    assert made.at(80.0) == 2.0  # a step: nothing between, so the one below
    assert made.at(60.0) == 2.0
    assert made.position_for(parse("-4%"), "") == 0.0
    assert made.position_for(parse("none"), "") is None
    with pytest.raises(UserError, match=r"-50% \(5e-08 GMACs\) is below the least .* 6e-08 GMACs \(-40.0 %\)"):
        made.position_for(parse("-50%"), "")
    with pytest.raises(UserError, match="101 MACs is above the static model's 1e-07 GMACs"):
        made.position_for(parse(101), "")
    steps = curve(continuous=False)
    assert [steps.at(m) for m in (100.0, 98.0, 96.0, 95.0, 80.0)] == [-2.0, 0.0, 0.0, 1.0, 2.0]
    small = replace(made, static=200.0)  # a model that cannot be as dear as static: its dearest
    assert small.position_for(parse("-0%"), "") == -2.0


def test_milliseconds() -> None:
    made = curve()
    with pytest.raises(UserError, match="no milliseconds have been measured"):
        made.position_for(parse("3 ms"), "here")
    timed = replace(made, latency=Latency("here", 4, "packed", "float32", ((100.0, 5.0), (96.0, 4.0), (60.0, 2.0))))
    assert timed.position_for(parse("4.5 ms"), "here") == pytest.approx(-1.0)
    assert timed.position_for(parse("9 ms"), "here") == -2.0
    assert timed.position_for(parse("2 ms"), "here") == 2.0
    with pytest.raises(UserError, match=r"measured on here and do not hold on there; call model.calibrate"):
        timed.position_for(parse("3 ms"), "there")
    with pytest.raises(UserError, match=r"1 ms is below the least .* 2 ms for 4 images on here"):
        timed.position_for(parse("1 ms"), "here")
    alone = replace(timed, latency=replace(timed.latency, batch=1))
    with pytest.raises(UserError, match=r"2 ms for 1 image on here"):
        alone.position_for(parse("1 ms"), "here")
    assert timed.position_for(parse("-4%"), "there") == 0.0  # MACs hold everywhere


@given(costs=st.lists(st.floats(1, 100), min_size=1, max_size=12), continuous=st.booleans())
def test_curves_fall(costs: list[float], continuous: bool) -> None:
    points = [Point(float(i), macs, macs / 10) for i, macs in enumerate(costs)]
    fallen = falling(points, continuous)
    assert all(a.macs > b.macs and a.position < b.position for a, b in itertools.pairwise(fallen))
    if not continuous:
        assert set(fallen) <= set(points)
        assert fallen[-1].macs == min(costs)
    assert falling(fallen, continuous) == fallen


def test_round_trip() -> None:
    timed = curve(latency=Latency("here", 4, "packed", "float32", ((100.0, 5.0), (60.0, 2.0))))
    again = Calibration.from_config(timed.to_config("-33%"))
    assert again == replace(timed, budget="-33%")
    for damage in (
        {"points": []},
        {"points": [{"position": 1.0}]},
        {"points": [{"position": 1.0, "macs": "x", "live": 1.0}]},
        {"points": [{"position": k, "macs": 5.0, "live": 1.0} for k in (0.0, 1.0)]},
        {"settings": None},
        {"odd": 1},
    ):
        with pytest.raises(UserError, match="calibration"):
            Calibration.from_config(timed.to_config(None) | damage)


def test_it_knows_its_own_error() -> None:
    """Two standard errors of the mean, and how many images would do."""
    spread = [Point(0.0, 100.0, 17.0, 0.0), Point(1.0, 80.0, 14.0, 40.0), Point(2.0, 60.0, 9.0, 20.0)]
    made = replace(curve(), images=100, points=tuple(spread), settings=spread[0])
    assert made.error(80.0) == pytest.approx(2 * 40 / 10 / 80)
    assert made.error(70.0) == pytest.approx(2 * 30 / 10 / 70)  # between two points
    assert made.error(100.0) == 0.0
    assert made.needed(80.0) == 2500  # 10 % of 100 images: 5 times better takes 25 times as many
    assert replace(made, images=2500).error(80.0) == pytest.approx(0.02)
    assert made.accuracy_warning("-20%") == (
        "-20% is met within about ±10.0 % on new images: they differ in cost, and the curve is of 100 images; "
        "about 2,500 would bring it to ±2 %."
    )
    assert "-20% is met within" in str(made.accuracy_warning())  # the worst of the tenths
    assert made.accuracy_warning("-1%") is None
    assert made.accuracy_warning("none") is None
    assert replace(made, images=2501).accuracy_warning("-20%") is None
    assert replace(made, continuous=False).accuracy_warning("-20%") is None  # every image costs the same
    assert replace(made, continuous=False).error(80.0) == 0.0
    assert curve().error(96.0) is None  # a curve of before
    assert "is not known from 8 images" in str(curve().accuracy_warning("-4%"))
    assert Calibration.from_config(made.to_config(None)) == made
    old = made.to_config(None)
    for point in (*old["points"], old["settings"]):
        del point["spread"]
    assert Calibration.from_config(old).points[0].spread is None
    old["points"][0]["spread"] = float("nan")
    with pytest.raises(UserError, match="spread: expected a finite number"):
        Calibration.from_config(old)


def test_pools_keep_the_spread() -> None:
    rising = [Point(0.0, 5.0, 5.0, 1.0), Point(1.0, 7.0, 7.0, 3.0), Point(2.0, 1.0, 1.0, None)]
    assert [p.spread for p in falling(rising, True)] == [2.0, None]
