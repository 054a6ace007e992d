"""Keys of items, by which a store that is kept finds them again."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.basics.fingerprint import Fingerprint
from stoker.cache.example_cache import ExampleCache
from strategies import few

EXAMPLES = 40


def cache_of(identity: str) -> ExampleCache:
    return ExampleCache(
        "1MiB", path=None, keep=False, identity=identity, describes="a test", examples=EXAMPLES
    )


@few(20)
@given(st.lists(st.lists(st.integers(0, EXAMPLES - 1), max_size=9), max_size=5))
def test_keys_of_numbers_are_those_of_their_fingerprints(asked: list[list[int]]) -> None:
    cache = cache_of("one")
    for numbers in asked:
        expected = [cache.key(Fingerprint(number), number) for number in numbers]
        assert cache.keys_of(np.array(numbers, np.int64)) == expected
        cache = pickle.loads(pickle.dumps(cache))  # as it reaches worker processes
        assert cache.keys_of(np.array(numbers, np.int64)) == expected
    every = np.arange(EXAMPLES, dtype=np.int64)
    assert not {*cache.keys_of(every)} & {*cache_of("two").keys_of(every)}
