"""Nested examples: taken apart, rebuilt, copied, and reached into by field."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.basics import pytree
from stoker.basics.pytree import Field
from stoker.errors import FieldError
from strategies import frozen, spoil


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Record:
    x: Any
    y: Any


leaves = st.one_of(
    st.integers(),
    st.text(max_size=3),
    st.none(),
    st.lists(st.integers(0, 9), max_size=4).map(np.array),
    st.lists(st.integers(0, 9), max_size=4).map(torch.tensor),
)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(inner, inner).map(lambda p: Pair(*p)),
        st.tuples(inner, inner).map(lambda p: Record(*p)),
    ),
    max_leaves=8,
)


@given(nested)
def test_mapping_leaves_to_themselves_rebuilds_the_same(value: Any) -> None:
    assert frozen(pytree.map_leaves(lambda leaf: leaf, value)) == frozen(value)


@given(nested)
def test_leaves_are_met_in_the_same_order(value: Any) -> None:
    met: list[Any] = []
    pytree.map_leaves(met.append, value)
    assert [frozen(leaf) for leaf in met] == [frozen(leaf) for leaf in pytree.leaves(value)]


@given(nested)
def test_copies_share_no_writable_memory(value: Any) -> None:
    before = frozen(value)
    twin = pytree.deep_copy(value)
    assert frozen(twin) == before
    for leaf in pytree.leaves(twin):
        spoil(leaf)
    assert frozen(value) == before


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("where", ["in processes", "behind an echo"])
def test_python_numbers_are_copied_as_a_whole(where: str, kind: Any) -> None:
    texts = [kind(range(number, number + 256)) for number in range(64)]  # as a tokenizer makes them
    made: Any = stoker.from_dataset(texts, seed=0)
    if where == "in processes":
        made = made.batch(16, collate=list).workers(1, kind="process")
    else:
        made = made.echo(2, pool=32).batch(16, collate=list).workers(0)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename == pytree.__file__

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        batches = list(made)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    found = [text for batch in batches for text in batch]
    assert sorted(found) == sorted(texts * (1 if where == "in processes" else 2))
    assert {*map(type, found)} == {kind}
    assert calls < 256 * len(found) / 4


def test_owned_values_hold_no_larger_memory() -> None:
    large = np.zeros((100, 100))
    view, tensor = large[3], torch.zeros(100, 100)[3]
    owned = pytree.copy_views({"a": view, "b": (tensor, large)})
    assert owned["a"].base is None
    assert owned["b"][0].untyped_storage().nbytes() == tensor.nbytes
    assert owned["b"][1] is large


@pytest.mark.parametrize(
    ("example", "on"),
    [
        ({"a": 1, "b": 2}, "b"),
        ({0: 1, 1: 2}, 1),
        ((1, 2), 1),
        ((1, 2), -1),
        ([1, 2], 1),
        (Pair(1, 2), "right"),
        (Pair(1, 2), 1),
        (Record(1, 2), "y"),
    ],
)
def test_fields_are_reached_and_replaced(example: Any, on: Any) -> None:
    before = frozen(example)
    field = Field(on)
    assert field.get(example) == 2
    twin = field.replace(example, 3)
    assert type(twin) is type(example)
    assert field.get(twin) == 3
    assert frozen(example) == before
    assert frozen(field.replace(twin, 2)) == before


@pytest.mark.parametrize(
    ("example", "on", "says"),
    [
        ({"a": 1}, "b", "keys 'a'"),
        ({"a": 1}, 0, "keys 'a'"),
        ((1, 2), 2, "positions 0 to 1"),
        ((1, 2), "a", "positions 0 to 1"),
        (Pair(1, 2), "middle", "fields 'left', 'right'"),
        (Pair(1, 2), "count", "fields 'left', 'right'"),
        (Record(1, 2), "z", "fields 'x', 'y'"),
        (np.zeros(3), 0, "a ndarray"),
        ("text", 0, "a str"),
    ],
)
def test_missing_fields_are_told_with_those_there_are(example: Any, on: Any, says: str) -> None:
    with pytest.raises(FieldError, match=says):
        Field(on).get(example)
