"""Parts: what share each has at every place; those that follow each other are numbered."""

from __future__ import annotations

import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.schedule.numbering import Numbering
from stoker.schedule.proportions import MOST_TOTAL, Proportions, whole_weights

weights = st.lists(st.integers(1, 10) | st.integers(1, 10**6), min_size=1, max_size=9).map(
    lambda each: whole_weights(each)
)


@given(weights=weights, start=st.integers(0, 10**12), count=st.integers(0, 200))
def test_each_part_has_its_share_at_every_place(
    weights: tuple[int, ...], start: int, count: int
) -> None:
    row = pickle.loads(pickle.dumps(Proportions(weights)))
    parts, numbers = row.parts(start, start + count)
    have = row.counts(start)
    bound = Fraction(1, 2) if len(weights) == 2 else 2
    for place in range(count + 1):
        shares = [Fraction((start + place) * weight, row.total) for weight in weights]
        assert sum(have) == start + place
        assert all(abs(n - share) <= bound for n, share in zip(have, shares, strict=True))
        if place < count:  # numbers in a part follow one another
            assert numbers[place] == have[parts[place]]
            have[parts[place]] += 1
    assert have == row.counts(start + count)
    assert row.counts(row.total * 7) == [7 * weight for weight in weights]


@given(weights=weights, data=st.data())
def test_an_epoch_is_as_long_as_the_parts_last(
    weights: tuple[int, ...], data: st.DataObject
) -> None:
    row = Proportions(weights)
    size = st.lists(st.integers(1, 10**6), min_size=len(weights), max_size=len(weights))
    lengths = data.draw(size)

    def all_in(places: int) -> bool:
        return all(n <= most for n, most in zip(row.counts(places), lengths, strict=True))

    def all_used(places: int) -> bool:
        return all(n >= least for n, least in zip(row.counts(places), lengths, strict=True))

    longest, shortest = row.longest(lengths), row.shortest(lengths)
    assert all_in(longest)
    assert not all_in(longest + 1)
    assert all_used(shortest)
    assert not all_used(shortest - 1)


def test_weights_are_taken_as_they_are_written() -> None:
    assert whole_weights([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert whole_weights([1_281_167, 50_000]) == (1_281_167, 50_000)
    assert whole_weights([Fraction(1, 3), 2, np.float32(0.5)]) == (2, 12, 3)
    large = whole_weights([10**15, 1, 3 * 10**15 + 1])
    assert sum(large) <= MOST_TOTAL
    assert large[1] == 1
    assert large[2] / large[0] == pytest.approx(3)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_is_finite_and_above_0(weight: float) -> None:
    with pytest.raises(ValueError, match="finite number above 0"):
        whole_weights([1, weight])


@pytest.mark.parametrize("weight", ["1", None, True, 1j])
def test_a_weight_is_a_number(weight: Any) -> None:
    with pytest.raises(TypeError, match="a weight is a number"):
        whole_weights([1, weight])


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_every_item_is_found_in_its_part(sizes: list[int]) -> None:
    items = [(part, offset) for part, size in enumerate(sizes) for offset in range(size)]
    given = Numbering(sizes)
    for numbering in (given, Numbering(np.array(sizes)), pickle.loads(pickle.dumps(given))):
        assert numbering.total == len(items)
        assert [numbering.find(number) for number in range(len(items))] == items
        parts, offsets = numbering.find_many(np.arange(len(items)))
        assert list(zip(parts.tolist(), offsets.tolist(), strict=True)) == items
        assert (numbering.ends - numbering.starts).tolist() == sizes


def test_parts_keep_the_shape_that_was_asked_for() -> None:
    parts, offsets = Numbering([2, 0, 3]).find_many(np.array([[4, 0], [2, 1]]))
    assert parts.tolist() == [[2, 0], [2, 0]]
    assert offsets.tolist() == [[2, 0], [0, 1]]


def test_a_pickle_tells_each_size_once() -> None:
    assert len(pickle.dumps(Numbering([1] * 1000))) < 1.5 * 8 * 1000
