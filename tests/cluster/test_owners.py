"""Owners: even parts by weight, little that moves, and the same map on every node."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cluster.owners import SLOTS, Member, OwnerMap
from stoker.cluster.remote_node import MemberMap, key_of
from strategies import few

MIB = 1 << 20


def members(*weights: int) -> list[Member]:
    return [Member(f"node-{i}", f"10.0.0.{i}:7000", weight) for i, weight in enumerate(weights)]


def owned(owners: OwnerMap, count: int = 32 * SLOTS) -> np.ndarray:
    return np.bincount(owners.owners(np.arange(count)), minlength=len(owners))


weights = st.lists(st.integers(1, 1 << 44), min_size=1, max_size=12)


@few(8)
@given(weights.map(lambda w: [max(max(w) >> 8, each) for each in w]))
def test_nobody_has_more_than_chance_gives_its_weight(given_weights: list[int]) -> None:
    owners = OwnerMap.of(members(*given_weights), 1)
    fair = np.array([m.weight_bytes for m in owners.members], float)
    fair *= 32 * SLOTS / fair.sum()
    # Five standard deviations of the number of slots: a slot is 32 examples here.
    assert (owned(owners) <= fair + 32 * (5 * np.sqrt(fair / 32) + 1)).all()
    assert owned(owners).sum() == 32 * SLOTS


@few(8)
@given(st.permutations(members(*[MIB] * 7)))
def test_the_map_does_not_depend_on_who_is_named_first(shuffled: list[Member]) -> None:
    indices = np.arange(5_000)
    expected = OwnerMap.of(members(*[MIB] * 7), 1)
    found = OwnerMap.of(shuffled, 1)
    assert found.members == expected.members
    np.testing.assert_array_equal(found.owners(indices), expected.owners(indices))


@few(8)
@given(st.integers(2, 20), st.data())
def test_a_member_that_goes_moves_only_what_it_had(count: int, data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, count - 1))
    before = OwnerMap.of(members(*[MIB] * count), 1)
    after = OwnerMap.of([m for m in before.members if m.name != f"node-{gone}"], 2)
    indices = np.arange(50_000)
    was = np.array([m.name for m in before.members])[before.owners(indices)]
    now = np.array([m.name for m in after.members])[after.owners(indices)]
    moved, had = (was != now).mean(), (was == f"node-{gone}").mean()
    assert moved == had


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=50), st.integers(1, 9))
def test_ranks_begin_with_the_owner_and_name_everybody_once(indices: list[int], count: int) -> None:
    owners = OwnerMap.of(members(*[MIB] * count), 1)
    found = owners.owners(np.array(indices))
    for index, owner in zip(indices, found.tolist(), strict=True):
        ranked = owners.ranking(index)
        assert ranked[0] == owner
        assert sorted(ranked) == list(range(count))


def test_the_next_in_rank_owns_what_a_lost_member_had() -> None:
    before = OwnerMap.of(members(*[MIB] * 5), 1)
    after = OwnerMap.of(before.members[1:], 2)
    lost = [i for i in range(5_000) if before.ranking(i)[0] == 0]
    heirs = [
        before.members[before.ranking(i)[1]] == after.members[after.ranking(i)[0]] for i in lost
    ]
    assert all(heirs)


def test_a_map_is_the_same_on_every_machine() -> None:
    owners = OwnerMap.of(members(3 * MIB, 5 * MIB, 7 * MIB), 1)
    assert owners.owners(np.arange(24)).tolist() == EXPECTED


EXPECTED = [2, 1, 2, 1, 2, 2, 2, 0, 0, 1, 2, 2, 1, 0, 1, 1, 2, 2, 1, 0, 2, 1, 1, 1]


def test_wrong_members_are_refused() -> None:
    with pytest.raises(ValueError, match="two members have one name"):
        OwnerMap.of([*members(1), *members(1)], 1)
    with pytest.raises(ValueError, match="node-0 may keep 0 bytes"):
        OwnerMap.of(members(0), 1)


# -- who owned an item before others joined


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
