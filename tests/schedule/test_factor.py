"""How often each item is used: exact fractions, spread by error diffusion."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.schedule.factor import EvenUses, exact_factor
from strategies import factors


@given(factors, st.integers(0, 10**9), st.integers(0, 200))
def test_each_item_has_floor_or_ceil_of_the_factor(factor: Fraction, start: int, n: int) -> None:
    uses = EvenUses(factor)
    found = uses.of(np.arange(start, start + n))
    assert len(found) == n
    assert set(found.tolist()) <= {math.floor(factor), math.ceil(factor)}
    assert found.sum() == uses.of_first(start + n) - uses.of_first(start)
    assert uses.most == math.ceil(factor)


@given(factors, st.integers(0, 10**9))
def test_first_items_have_the_factor_within_one(factor: Fraction, n: int) -> None:
    assert abs(EvenUses(factor).of_first(n) - factor * n) < 1


@pytest.mark.parametrize(
    ("given_as", "means"),
    [
        (2, Fraction(2)),
        (2.1, Fraction(21, 10)),
        (np.float64(2.1), Fraction(21, 10)),
        (np.float32(2.1), Fraction(21, 10)),
        (np.int64(3), Fraction(3)),
        (Fraction(7, 3), Fraction(7, 3)),
        (1, Fraction(1)),
        (1.0, Fraction(1)),
    ],
)
def test_factor_is_taken_as_it_is_written(given_as: object, means: Fraction) -> None:
    assert exact_factor(given_as) == means


@pytest.mark.parametrize("wrong", [0, 0.5, 0.999, -1, float("nan"), float("inf"), Fraction(1, 2)])
def test_factor_below_one_is_refused_in_one_line(wrong: object) -> None:
    with pytest.raises(ValueError, match="at least 1") as caught:
        exact_factor(wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["2", None, True, 1j, [2]])
def test_factor_that_is_no_number_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="number"):
        exact_factor(wrong)
