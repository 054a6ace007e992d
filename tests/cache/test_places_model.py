"""The model of several places: never beyond the room, never worse than any place alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stoker.cache.places.arrangement import arrange
from stoker.cache.places.model import NOWHERE, places_of, plan, plan_at, price_of

Sample = tuple[NDArray[np.float64], NDArray[np.float64]]


@st.composite
def samples(draw: st.DrawFn, most: int = 20) -> Sample:
    """Saved times that grow from place to place, and sizes that may do anything."""
    places = draw(st.integers(1, 3))
    count = draw(st.integers(1, most))
    times = st.lists(st.integers(0, 50), min_size=places, max_size=places)
    saved = [np.cumsum(draw(times)) for _ in range(count)]
    sizes = st.lists(st.integers(0, 40), min_size=places, max_size=places)
    return np.array(saved, float), np.array([draw(sizes) for _ in range(count)], float)


def kept_at(sample: Sample, per_byte: float) -> list[tuple[float, float]]:
    """Return the saved time and bytes without the steps of just this density, and with them."""
    saved, sizes = sample
    rows = zip(saved.tolist(), sizes.tolist(), strict=True)
    each = [places_of(time, size, per_byte) for time, size in rows]
    kept = [
        [(n, place) for n, place in enumerate(at) if place != NOWHERE]
        for at in zip(*each, strict=True)
    ]
    return [(sum(saved[k] for k in at), sum(sizes[k] for k in at)) for at in kept]


@given(samples(), st.integers(0, 600))
def test_a_plan_fits_and_no_place_alone_is_better(sample: Sample, room: int) -> None:
    best = plan(*sample, room)
    assert best.size_bytes <= room * (1 + 1e-9)
    assert best.kept.min(initial=0) >= 0
    assert best.kept.sum() <= 1 + 1e-9
    for place in range(sample[0].shape[1]):
        saved, sizes = (each[:, [place]] for each in sample)
        assert best.saved_ns >= plan_at(place, *sample, room).saved_ns - 1e-6
        assert best.saved_ns >= plan(saved, sizes, room).saved_ns - 1e-6  # the dearest first


@given(samples(most=4), st.integers(0, 150))
def test_no_choice_of_whole_examples_is_better(sample: Sample, room: int) -> None:
    saved, sizes = sample
    count, places = saved.shape
    best = 0.0
    for at in itertools.product(range(NOWHERE, places), repeat=count):
        kept = [(n, place) for n, place in enumerate(at) if place != NOWHERE]
        if sum(sizes[k] for k in kept) <= room:
            best = max(best, sum(saved[k] for k in kept))
    assert plan(*sample, room).saved_ns >= best - 1e-6


@given(samples(), st.integers(0, 600))
def test_what_examples_are_told_for_the_price_is_the_plan(sample: Sample, room: int) -> None:
    saved, sizes = sample[0], sample[1] + 1
    price = price_of(saved, sizes, room)
    (least_ns, least_bytes), (most_ns, most_bytes) = kept_at((saved, sizes), price.per_byte)
    assert least_bytes + price.part * (most_bytes - least_bytes) <= room * (1 + 1e-9)
    saves = least_ns + price.part * (most_ns - least_ns)
    largest = (saved / sizes * sizes.max()).max()  # at most one example is kept in part
    assert saves >= plan(saved, sizes, room).saved_ns * (1 - 1e-9) - largest


@pytest.mark.parametrize(
    ("room", "expected"),
    [(0, [0.0, 0.0]), (500, [0.5, 0.0]), (1000, [1.0, 0.0]), (3000, [0.5, 0.5]), (9999, [0, 1.0])],
)
def test_files_come_first_and_then_make_way_for_what_is_decoded(room: int, expected: Any) -> None:
    saved, sizes = np.tile([[30.0, 50.0]], (10, 1)), np.tile([[100.0, 500.0]], (10, 1))
    found = plan(saved, sizes, room)
    assert found.kept == pytest.approx(expected)
    assert found.size_bytes == pytest.approx(min(room, 5000))


def test_decoding_that_costs_more_for_its_bytes_comes_first() -> None:
    saved, sizes = np.tile([[1.0, 500.0]], (10, 1)), np.tile([[100.0, 500.0]], (10, 1))
    assert plan(saved, sizes, 2500).kept == pytest.approx([0.0, 0.5])


def test_each_example_has_a_place_of_its_own() -> None:
    saved = np.array([[10.0, 12.0], [10.0, 400.0]])  # the second is costly to decode
    sizes = np.array([[100.0, 500.0], [100.0, 500.0]])
    price = price_of(saved, sizes, 600)
    assert price.part == 1
    assert places_of(saved[0].tolist(), sizes[0].tolist(), price.per_byte)[1] == 0
    assert places_of(saved[1].tolist(), sizes[1].tolist(), price.per_byte)[1] == 1


def test_what_saves_nothing_is_not_kept() -> None:
    assert price_of(np.zeros((3, 2)), np.ones((3, 2)), 100) == (0.0, 1.0)
    assert places_of([0.0, 0.0], [1.0, 1.0], 0.0) == (NOWHERE, NOWHERE)
    assert places_of([5.0, 5.0], [1.0, 9.0], 0.0) == (0, 0)  # the same time for fewer bytes


def test_of_equal_examples_as_many_are_kept_as_fit() -> None:
    saved, sizes = np.tile([[30.0, 50.0]], (10, 1)), np.tile([[100.0, 500.0]], (10, 1))
    assert price_of(saved, sizes, 10) == (0.3, pytest.approx(0.01))
    assert places_of([30.0, 50.0], [100.0, 500.0], 0.3) == (NOWHERE, 0)
    assert price_of(saved, sizes, 3000) == (0.05, pytest.approx(0.5))
    assert places_of([30.0, 50.0], [100.0, 500.0], 0.05) == (0, 1)


# -- the arrangement


@given(samples(), st.integers(0, 600))
def test_an_arrangement_leaves_no_more_than_any_place_alone(sample: Sample, room: int) -> None:
    saved, sizes = sample
    whole = float(saved.max(axis=1).sum())
    found = arrange(whole, saved, sizes, room)
    places = range(saved.shape[1])
    alone = [whole - plan_at(place, saved, sizes, room).saved_ns for place in places]
    assert found.left_ns <= min([whole, *alone])
    assert bool(found.places) == (min(alone) < whole)
    assert sum(found.kept) <= 1 + 1e-9
    if found.by_worth:
        assert found.left_ns < min(alone) / 1.05  # choosing pays
    if len(found.places) > 1:
        chosen = (plan(saved[:, [at]], sizes[:, [at]], room).saved_ns for at in places)
        assert found.left_ns < (whole - max(chosen)) / 1.05


def test_one_form_that_fits_whole_and_saves_most_is_kept_alone_as_it_comes() -> None:
    saved, sizes = np.tile([[30.0, 50.0]], (10, 1)), np.tile([[100.0, 500.0]], (10, 1))
    assert arrange(500, saved, sizes, 5000)[:2] == ((1,), False)
    assert arrange(500, saved, sizes, 3000)[:2] == ((0, 1), True)
    assert arrange(500, saved, sizes, 1000)[:2] == ((0,), False)
    assert arrange(500, saved, sizes, 0).places == ()


def test_examples_that_are_worth_more_come_first_at_one_place() -> None:
    saved, sizes = np.array([[1.0], [9.0]]), np.array([[100.0], [100.0]])
    assert arrange(10, saved, sizes, 100)[:2] == ((0,), True)
