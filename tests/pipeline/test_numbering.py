"""Parts that follow each other are numbered through, whatever their sizes."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.schedule.numbering import Numbering


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
