"""Members that owned an item before others joined: each is found, and they are few."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cluster.owners import Member, OwnerMap
from stoker.cluster.remote_node import MemberMap, key_of
from strategies import few

MIB = 1 << 20


def map_of(members: list[Member]) -> MemberMap:
    return MemberMap(OwnerMap.of(members, 1), [None] * len(members))


@few(10)
@given(st.permutations(range(5)), st.lists(st.integers(1, 1 << 40), min_size=1, max_size=20))
def test_every_owner_of_before_is_among_them(order: list[int], numbers: list[int]) -> None:
    joined = [Member(f"n{name}", "", MIB, 10 + at) for at, name in enumerate(order)]
    maps = [map_of(joined[: count + 1]) for count in range(len(joined))]
    for number in numbers:
        key = key_of(number, bytes(8))
        names = [maps[-1].owners.members[at].name for at in maps[-1].past_owners(key)]
        owners = [each.owner_names([key])[0] for each in maps]
        assert list(dict.fromkeys(reversed(owners))) == [owners[-1], *names]


def test_members_that_joined_together_have_no_past() -> None:
    together = map_of([Member(f"n{at}", "", MIB) for at in range(9)])
    assert not any(together.past_owners(key_of(number, bytes(8))) for number in range(200))


@pytest.mark.full
def test_they_are_as_few_as_the_records_of_a_random_order() -> None:
    nodes = 32
    made = map_of([Member(f"n{at}", "", MIB, 1 + at) for at in range(nodes)])
    counts = [len(made.past_owners(key_of(number, bytes(8)))) for number in range(2_000)]
    harmonic = sum(1 / at for at in range(2, nodes + 1))
    assert abs(np.mean(counts) - harmonic) < 0.25
