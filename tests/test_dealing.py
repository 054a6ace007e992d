"""Dealing inside the global batch: everything once, equally much each, and near where possible."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.schedule.dealing import dealt_to
from stoker.schedule.orders.permutation import TRUE_PERMUTATION_LIMIT
from stoker.schedule.owners import Member, OwnerMap, OwnerSnapshot
from stoker.schedule.selection import Cut, Selection, Share
from strategies import few


@st.composite
def clusters(draw: st.DrawFn) -> OwnerSnapshot:
    """Draw a map of any weights, and ranks on its nodes, on none of them, or on a few only."""
    members = draw(st.integers(0, 6))
    weights = draw(st.lists(st.integers(1, 1 << 40), min_size=members, max_size=members))
    owners = OwnerMap.of((Member(f"n{i}", "", w) for i, w in enumerate(weights)), 1)
    ranks = draw(st.lists(st.integers(-1, members - 1), min_size=1, max_size=8))
    return OwnerSnapshot.of(owners, tuple(ranks))


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=12), st.integers(0, 7), st.data())
def test_every_place_goes_to_one_rank_and_as_many_as_can_to_its_owner(
    on: list[int], each: int, data: st.DataObject
) -> None:
    world = len(on)
    owned = data.draw(st.lists(st.integers(0, 9), min_size=each * world, max_size=each * world))
    owners, nodes = np.array(owned, np.int32), np.array(on, np.int64)
    dealt = [dealt_to(rank, nodes, owners) for rank in range(world)]
    assert [len(places) for places in dealt] == [each] * world
    assert all((np.diff(places) > 0).all() for places in dealt)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(each * world))
    near = sum(int((owners[places] == on[rank]).sum()) for rank, places in enumerate(dealt))
    assert near == sum(
        min(owned.count(node), on.count(node) * each) for node in set(on) - {-1}
    )  # no dealing of equal parts has more


@few(40)
@given(
    clusters(),
    st.integers(0, 120),
    st.integers(1, 9),
    st.integers(0, 2**40),
    st.integers(0, 3),
    st.one_of(st.none(), st.integers(1, 20)),
    st.one_of(st.none(), st.integers(1, 60)),
    st.data(),
)
def test_global_batches_stay_as_they_are(
    pinned: OwnerSnapshot,
    length: int,
    group: int,
    seed: int,
    epoch: int,
    last: int | None,
    between: int | None,
    data: st.DataObject,
) -> None:
    world = len(pinned.ranks)
    pairs = []
    for rank in range(world):
        dealt, undealt = (
            Selection(
                True,
                Share(rank, world, False, True, is_dealt),
                between=Cut(0, between),
                last=Cut(0, last),
            )
            for is_dealt in (True, False)
        )
        assert dealt.count(length) == undealt.count(length)
        order = dealt.rank_order(length, seed, epoch, pinned, group)
        pairs.append((order, undealt.rank_order(length, seed, epoch)))
    count = len(pairs[0][0])
    assert {len(order) for pair in pairs for order in pair} == {count}
    for start in range(0, count, group):
        stop = min(start + group, count)
        mine, today = (
            np.concatenate([pair[i].span(start, stop) for pair in pairs]) for i in (0, 1)
        )
        assert sorted(mine.tolist()) == sorted(today.tolist())
    order = data.draw(st.sampled_from(pairs))[0]
    whole = order.span(0, count).tolist()
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    assert order.span(start, stop).tolist() == whole[start:stop]  # by number, from anywhere
    places = order.places(range(start, stop))
    assert order.at(places).tolist() == whole[start:stop]
    some = np.array(data.draw(st.permutations(range(start, stop))), np.int64)
    assert sorted(np.array(order.places(some)).tolist()) == sorted(np.array(places).tolist())


@pytest.mark.parametrize(("nodes", "ranks_each", "group"), [(4, 1, 32), (10, 2, 128), (3, 8, 256)])
def test_few_come_from_other_nodes(nodes: int, ranks_each: int, group: int) -> None:
    members = [Member(f"n{i}", "", 1 << 30) for i in range(nodes)]
    on = tuple(i // ranks_each for i in range(nodes * ranks_each))
    pinned = OwnerSnapshot.of(OwnerMap.of(members, 1), on)
    share = Share(1, len(on), False, True, True)
    length = 200 * len(on) * group
    assert length < TRUE_PERMUTATION_LIMIT * 2
    order = Selection(True, share).rank_order(length, 5, 0, pinned, group)
    remote = float((pinned.owners(order.span(0, len(order))) != on[1]).mean())
    assert remote < 1.3 * 0.4 / math.sqrt(group * ranks_each) + 0.01  # the map is uneven, too
    undealt = Selection(True, Share(1, len(on), False, True)).rank_order(length, 5, 0)
    remote = float((pinned.owners(undealt.span(0, len(undealt))) != on[1]).mean())
    assert remote == pytest.approx(1 - 1 / nodes, abs=0.03)


def test_unequal_memories_set_a_floor() -> None:
    weights = [1, 2, 3, 4]
    owners = OwnerMap.of((Member(f"n{i}", "", w << 30) for i, w in enumerate(weights)), 1)
    pinned = OwnerSnapshot.of(owners, (0, 1, 2, 3))
    orders = [
        Selection(True, Share(rank, 4, False, True, True)).rank_order(400_000, 0, 0, pinned, 256)
        for rank in range(4)
    ]
    shares = [
        float((pinned.owners(order.span(0, len(order))) != rank).mean())
        for rank, order in enumerate(orders)
    ]
    assert sum(shares) / 4 == pytest.approx(0.2, abs=0.02)  # .15 and .05 that two keep too few
    assert shares[2] < 0.05
    assert shares[3] == 0.0


def test_a_large_epoch_takes_no_memory_that_grows_with_it() -> None:
    owners = OwnerMap.of((Member(f"n{i}", "", 1) for i in range(4)), 1)
    pinned = OwnerSnapshot.of(owners, (0, 1, 2, 3))
    share = Share(2, 4, False, True, True)
    order = Selection(True, share).rank_order(10**11, 7, 1, pinned, 100)
    assert len(order) == 10**11 // 4
    far = order.span(10**10 + 50, 10**10 + 250)
    assert len(set(far.tolist())) == 200
    assert order.span(10**10 + 150, 10**10 + 151)[0] == far[100]
