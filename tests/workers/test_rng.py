"""Randomness with an address: permutations, keys, and generators placed anew."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.schedule import rng
from stoker.schedule.orders.order import TRUE_PERMUTATION_LIMIT, Feistel, Order, permutation
from stoker.schedule.rng import AddressedGenerator
from stoker.schedule.selection import Selection
from strategies import few


def key(seed: int = 0) -> np.ndarray:
    return rng.key(seed, 0, rng.SHUFFLE)


@given(st.integers(0, 3000), st.integers(0, 2**64))
def test_an_order_is_a_permutation(length: int, seed: int) -> None:
    order = permutation(length, key(seed))
    assert sorted(order.at(range(length)).tolist()) == list(range(length))


@given(st.integers(1, 2000), st.integers(0, 2**32))
def test_feistel_is_a_permutation_of_any_size(length: int, seed: int) -> None:
    found = Feistel(length, key(seed)).at(range(length))
    assert sorted(found.tolist()) == list(range(length))


def test_feistel_is_a_permutation_of_small_sizes() -> None:
    for length in range(1, 51):
        found = Feistel(length, key(length)).at(range(length))
        assert sorted(found.tolist()) == list(range(length))


@pytest.mark.parametrize("length", [1, 7, 1_000, (1 << 20) + 5, (1 << 40) + 1])
def test_feistel_is_what_its_rounds_say(length: int) -> None:
    a = math.isqrt(length - 1) + 1
    b = -(-length // a)
    generator = np.random.Generator(np.random.Philox(key=key(3)))
    keys = generator.integers(0, 1 << 64, 8, dtype=np.uint64).tolist()

    def mixed(x: int, round_key: int) -> int:
        x ^= round_key
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % (1 << 64)
        return (x ^ (x >> 31)) >> 16

    def once(x: int) -> int:
        left, right = divmod(x, b)
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            left = (left + mixed(right, first)) % a
            right = (right + mixed(left, second)) % b
        return left * b + right

    ordinals = [n * (length - 1) // 5 for n in range(6)]
    expected = []
    for x in map(once, ordinals):
        while x >= length:
            x = once(x)
        expected.append(x)
    assert Feistel(length, key(3)).at(np.array(ordinals)).tolist() == expected


@pytest.fixture(scope="module", params=[1, Feistel.together // 2 + 3])
def large(request: pytest.FixtureRequest) -> tuple[Order, np.ndarray]:
    length = TRUE_PERMUTATION_LIMIT + request.param
    order = permutation(length, key(5))
    return order, order.at(range(length)).copy()


def test_a_large_order_is_a_permutation(large: tuple[Order, np.ndarray]) -> None:
    _, whole = large
    assert whole.dtype == np.int64
    assert len(whole) > TRUE_PERMUTATION_LIMIT
    assert (np.bincount(whole, minlength=len(whole)) == 1).all()


def test_a_large_order_looks_random(large: tuple[Order, np.ndarray]) -> None:
    _, whole = large
    n = len(whole)
    # Correlation with the identity, and of neighbours: 6 deviations of 1 / sqrt(n).
    assert abs(np.corrcoef(whole, np.arange(n))[0, 1]) < 6 / n**0.5
    assert abs(np.corrcoef(whole[:-1], whole[1:])[0, 1]) < 6 / n**0.5


@few(20)
@given(st.data())
def test_spans_of_a_large_order_agree_with_the_whole(
    large: tuple[Order, np.ndarray], data: st.DataObject
) -> None:
    order, whole = large
    edges = [m * Feistel.together + d for m in (0, 1, 2, 16) for d in (-1, 0, 1)]
    starts = st.one_of(st.sampled_from([e for e in edges if 0 <= e < len(whole)]),
                       st.integers(0, len(whole) - 1))  # fmt: skip
    start = data.draw(starts)
    stop = min(len(whole), start + data.draw(st.sampled_from([1, 2, 300, 3 * Feistel.together])))
    assert np.array_equal(order.at(range(start, stop)), whole[start:stop])
    some = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=9)), np.int64)
    assert np.array_equal(order.at(some), whole[some])


@given(st.integers(1, 500), st.integers(0, 99), st.booleans(), st.data())
def test_ranges_and_arrays_agree(
    length: int, seed: int, shuffled: bool, data: st.DataObject
) -> None:
    order = permutation(length, key(seed) if shuffled else None)
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start, length))
    places = range(start, stop, data.draw(st.integers(1, 5)))
    assert order.at(places).tolist() == order.at(np.array(places, np.int64)).tolist()


def test_without_a_key_the_order_is_the_source_s() -> None:
    assert permutation(10, None).at(range(2, 6)).tolist() == [2, 3, 4, 5]


def in_three_threads(call: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=call, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_large_order_is_the_same_from_several_threads() -> None:
    order = Selection(is_shuffled=True).rank_order(TRUE_PERMUTATION_LIMIT + 3, 5, 0)
    whole = order.span(0, len(order)).copy()
    wrong: list[int] = []

    def read(offset: int) -> None:
        for block in range(16):
            start = ((block + offset) % 16) * Feistel.together + 17
            if not np.array_equal(order.span(start, start + 50), whole[start : start + 50]):
                wrong.append(start)

    in_three_threads(lambda n: read(n * 5))
    assert not wrong


def test_seed_epoch_and_purpose_each_change_the_key() -> None:
    addresses = [(s, e, p) for s in (0, 1, 2**40) for e in (0, 1, 7) for p in (0, 1 << 20, 3 << 20)]
    assert len({tuple(rng.key(*address)) for address in addresses}) == len(addresses)


addresses = st.tuples(st.integers(0, 2**40), st.integers(0, 2**60))


@given(addresses, addresses, st.integers(0, 7))
def test_a_placed_generator_forgets_what_was_drawn_before(
    one: tuple[int, int], other: tuple[int, int], drawn: int
) -> None:
    random, k = AddressedGenerator(), key()
    fresh = AddressedGenerator().at(k, *one).random(5).tolist()
    generator = random.at(k, *other)
    generator.random(drawn)
    generator.integers(0, 10, drawn, dtype=np.uint32)  # leaves half a word behind
    assert random.at(k, *one).random(5).tolist() == fresh
    random.at(k, *other).standard_normal(3)
    assert random.at(k, *one).random(5).tolist() == fresh


@given(addresses, addresses)
def test_different_addresses_draw_differently(one: tuple[int, int], other: tuple[int, int]) -> None:
    random = AddressedGenerator()
    first = random.at(key(), *one).integers(1 << 62, size=4).tolist()
    second = random.at(key(), *other).integers(1 << 62, size=4).tolist()
    assert (first == second) == (one == other)


def test_a_placed_generator_does_not_depend_on_the_thread() -> None:
    random, k = AddressedGenerator(), key()
    here = [random.at(k, n).random(3).tolist() for n in range(20)]
    there: dict[int, list[list[float]]] = {}
    barrier = threading.Barrier(3)

    def draw(number: int) -> None:
        barrier.wait()
        there[number] = [random.at(k, n).random(3).tolist() for n in range(20)]

    in_three_threads(draw)
    assert list(there.values()) == [here] * 3


def test_seeds_for_other_generators_are_63_bits() -> None:
    seeds = {rng.integer_at(key(), n) for n in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_drawn_seeds_differ() -> None:
    assert len({rng.draw_seed() for _ in range(20)}) > 15
