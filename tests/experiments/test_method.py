"""The arithmetic that comparisons share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.method import (
    Interval,
    Ratios,
    crossing,
    median_or_miss,
    ratio_of,
    smoothed,
    value_at,
)

losses = st.lists(st.floats(0.01, 10), min_size=1, max_size=30)
needs = st.one_of(st.none(), st.floats(0.1, 100))


def test_a_crossing_lies_on_the_line_between_two_points() -> None:
    assert crossing([10, 20, 30], [3.0, 2.0, 1.0], 1.5) == 25
    assert crossing([10, 20, 30], [3.0, 1.0, 2.0], 2.0) == 15, "the first, though it goes up again"
    assert crossing([10, 20, 30], [3.0, 2.0, 1.0], 3.5) == 10
    assert crossing([10, 20, 30], [3.0, 2.0, 1.0], 0.5) is None


@given(losses, st.floats(0.01, 10))
def test_nothing_before_a_crossing_reaches_the_target(values: list[float], target: float) -> None:
    at = [10.0 * i for i in range(len(values))]
    found = crossing(at, values, target)
    if found is None:
        assert min(values) > target
    else:
        assert all(v > target for place, v in zip(at, values, strict=True) if place < found - 1e-6)
        assert value_at(found, at, values) <= target + 1e-6


@given(losses, st.floats(0.01, 10), st.floats(0.01, 5))
def test_a_lower_target_is_crossed_no_earlier(
    values: list[float], target: float, less: float
) -> None:
    at = [10.0 * i for i in range(len(values))]
    found, later = crossing(at, values, target), crossing(at, values, target - less)
    assert later is None or (found is not None and found <= later)


@given(losses)
def test_smoothing_keeps_length_and_range_and_constants(values: list[float]) -> None:
    found = smoothed(values)
    assert len(found) == len(values)
    assert min(values) - 1e-9 <= min(found) <= max(found) <= max(values) + 1e-9
    assert smoothed([2.0] * len(values)) == [2.0] * len(values)


def test_smoothing_does_not_look_ahead() -> None:
    assert smoothed([5.0, 4.0, 3.0, 2.0, 1.0]) == [5.0, 4.5, 4.0, 3.0, 2.0]
    values = [1.0, 2.0, 6.0, 1.0]
    for seen in range(1, 5):
        assert smoothed(values[:seen]) == smoothed(values)[:seen]


@given(st.lists(st.tuples(needs, st.floats(100, 200), needs), min_size=1, max_size=9))
def test_no_pair_is_left_out(pairs: list[tuple[float | None, float, float | None]]) -> None:
    ratios = Ratios.of(*map(list, zip(*pairs, strict=True)))
    assert len(ratios.values) == len(pairs)
    assert ratios.values.count(0.0) == sum(arm is None for _, _, arm in pairs)
    assert ratios.are_bounds == any(base is None for base, _, _ in pairs)
    misses = sum(arm is None for _, _, arm in pairs)
    if misses * 2 > len(pairs):
        assert ratios.median is None


def test_pairs_are_kept_together() -> None:
    ratios = Ratios.of([10.0, None, 30.0], [40.0, 40.0, 40.0], [5.0, 4.0, None])
    assert ratios.values == (0.0, 2.0, 10.0)
    assert (ratios.median, ratios.are_bounds) == (2.0, True)


def test_a_median_takes_a_miss_for_the_worst() -> None:
    assert median_or_miss([1.0, None, 3.0]) == 3.0
    assert median_or_miss([None, None, 3.0]) is None


@pytest.mark.parametrize(("waited", "ratio"), [(0.0, 1.0), (0.5, 2.0), (0.75, 4.0)])
def test_r_is_of_what_training_without_echoing_waited(waited: float, ratio: float) -> None:
    assert ratio_of(waited) == ratio


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40))
def test_an_interval_has_the_median_within(samples: list[float]) -> None:
    around = Interval.of(samples)
    ordered = sorted(samples)
    assert around.low <= ordered[len(ordered) // 2] <= around.high
    assert around.confidence >= 0.9 or len(samples) < 5
    assert math.isclose(Interval.of(samples[:1]).confidence, 0.0)


@given(st.floats(0, 50))
def test_values_between_points_lie_on_the_line(place: float) -> None:
    found = value_at(place, [10.0, 20.0, 40.0], [1.0, 2.0, 4.0])
    assert found == pytest.approx(min(4.0, max(1.0, place / 10)))
