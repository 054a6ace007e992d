"""A state that some ranks saved is loaded by others, or with batches of another size."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import stoker_lmdb
from hypothesis import given
from hypothesis import strategies as st
from test_places import drawing, leave

import stoker
from stoker.basics import pytree
from strategies import few, one_in, opened, signed, small_pools_allowed, through_json

Stretch = tuple[int, int, int]
"""How many ranks, their rows, and how many batches each of them takes; the last leg ends itself."""

Drawn = tuple[int, int, float]
"""An example, the number of its use, and what was drawn for that."""


def rows(length: int) -> stoker.Pipeline:
    return stoker.from_arrays(np.arange(length), seed=7)


def mixture(length: int, stop: Any = "all") -> stoker.Pipeline:
    a = stoker.from_arrays(np.arange(length)).shuffle()
    b = stoker.from_arrays(np.arange(length, length + 60))
    c = stoker.from_arrays(np.arange(length + 60, length + 96)).shuffle()
    return stoker.mix([a, b, c], weights=[0.55, 0.3, 0.15], stop=stop, seed=7)


KINDS: dict[str, Callable[[int], stoker.Pipeline]] = {
    "shuffled": lambda n: rows(n).shuffle(),
    "cut": lambda n: rows(n + 9).skip(5).shuffle().skip(3).take(n - 3),
    "blocks": lambda n: rows(n).shuffle(block=4),
    "whole": lambda n: stoker.from_dataset(range(n), seed=7).shuffle().cache("1MiB"),
    "balanced": lambda n: rows(n).shuffle(),
    "mixture": mixture,
    "selected": lambda n: rows(2 * n).select(np.arange(2 * n) % 2 == 0).shuffle(),
    "weighted": lambda n: rows(n).sample(np.arange(n) % 5 + 30.0 * (np.arange(n) < 3)),
    "own": lambda n: rows(n).order(lambda epoch, rng: rng.integers(0, n, n)),
}


@dataclass
class Leg:
    """All ranks of a leg, and what was drawn in each step of all of them."""

    ranks: list[stoker.Pipeline]
    drawn: list[list[Drawn]]


def run(
    build: Callable[[int, int, int], stoker.Pipeline],
    plan: Sequence[Stretch],
    epoch: int = 0,
    *,
    listed: bool = False,
) -> list[Leg]:
    """Run the legs of an epoch, each from the states of the one before.

    Args:
        build: makes the pipeline of a rank among so many, with so many rows.
        listed: whether all states are needed; else one serves all ranks.
    """
    legs: list[Leg] = []
    states: Any = None
    for world, each, steps in plan:
        ranks = [build(rank, world, each) for rank in range(world)]
        taken, saved = [], []
        for rank in ranks:
            if states is None:
                rank.set_epoch(epoch)
            else:
                rank.load_state_dict(states)
            with iter(rank) as batches:
                mine = []
                for ids, draws in itertools.islice(batches, steps if steps >= 0 else None):
                    uses = rank.last.number.tolist()
                    mine.append(list(zip(ids.tolist(), uses, draws.tolist(), strict=True)))
                saved.append(through_json(rank.state_dict()))
            taken.append(mine)
        assert len({*map(len, taken)}) == 1, "ranks take equally many steps"
        drawn = [[one for batch in step for one in batch] for step in zip(*taken, strict=True)]
        legs.append(Leg(ranks, drawn))
        if not listed:
            assert all(state == saved[0] for state in saved), "one state serves all ranks"
        states = saved if listed else saved[0]
    return legs


def batches_of(
    build: Callable[[int, int, int], stoker.Pipeline], plan: Sequence[Stretch]
) -> list[list[Any]]:
    """Run the legs of an epoch; return the batches of each rank, leg by leg."""
    state, found = None, list[list[Any]]()
    for world, each, steps in plan:
        for rank in range(world):
            train = build(rank, world, each)
            if state is not None:
                train.load_state_dict(state)
            with iter(train) as batches:
                found.append([*itertools.islice(batches, steps if steps >= 0 else None)])
                saved = through_json(train.state_dict())
        state = saved  # that of one rank is enough
    return found


def of_kind(kind: str, length: int) -> Callable[[int, int, int], stoker.Pipeline]:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        sizes = np.arange(length) % 7 + 1 if kind == "balanced" else None
        train = KINDS[kind](length).shard(rank=rank, world_size=world)
        train = train if sizes is None else train.balance(sizes)
        return train.random_map(drawing).batch(each).workers(0)

    return build


@st.composite
def plans(draw: Any, length: int, most: int = 4) -> list[Stretch]:
    """Draw the legs of an epoch of at least so many examples: each but the last is cut short."""
    legs, left = list[Stretch](), length
    for _ in range(draw(st.integers(1, most - 1))):
        world, each = draw(st.integers(1, 6)), draw(st.integers(1, 12))
        steps = draw(st.integers(0, left // (world * each) - 1)) if left >= world * each else 0
        legs.append((world, each, steps))
        left -= steps * world * each
    return [*legs, (draw(st.integers(1, 6)), draw(st.integers(1, 12)), -1)]


@pytest.mark.parametrize("kind", one_in(3, KINDS))
@few(5)
@given(data=st.data(), length=st.integers(60, 200), epoch=st.integers(0, 2))
def test_what_was_not_handed_out_comes_once_with_its_own_draws(
    kind: str, data: st.DataObject, length: int, epoch: int
) -> None:
    plan = data.draw(plans(length), label="plan")
    build = of_kind(kind, length)
    (whole,) = run(build, [(1, 7, -1)], epoch)
    expected = collections.Counter(one for step in whole.drawn for one in step)
    legs = run(build, plan, epoch)
    found = collections.Counter(one for leg in legs for step in leg.drawn for one in step)
    assert found <= expected, "none twice, and each draw is what it would have been"
    missing = expected.total() - found.total()
    assert 0 <= missing < plan[-1][0]
    last = legs[-1].ranks[0]
    assert last.epoch == epoch + 1
    assert last.counts.fresh_examples == last.counts.uses == found.total()
    assert last.counts.steps == sum(len(leg.drawn) for leg in legs)
    following = build(0, *plan[-1][:2])
    following.set_epoch(epoch + 1)
    assert [x.tolist() for x, _ in last] == [x.tolist() for x, _ in following]


@few(8)
@given(data=st.data(), length=st.integers(60, 200), epoch=st.integers(0, 3))
def test_parts_as_they_lie_go_on_where_those_left_them_that_began(
    data: st.DataObject, length: int, epoch: int
) -> None:
    """What equal parts leave out of an epoch, other ranks that take it over hand out as well."""

    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        return rows(length).shard(rank=rank, world_size=world).random_map(drawing).batch(each)

    # At most five are left out at first; no leg but the last ends the epoch.
    plan = data.draw(plans(length - 5), label="plan")
    (whole,) = run(build, [(plan[0][0], 7, -1)], epoch)
    if not plan[0][2]:  # nothing was handed out, so others begin it
        return
    expected = {x: drawn for step in whole.drawn for x, _, drawn in step}
    legs = run(build, plan, epoch)
    found = [(x, drawn) for leg in legs for step in leg.drawn for x, _, drawn in step]
    assert all(expected.get(x, drawn) == drawn for x, drawn in found)
    assert len({x for x, _ in found}) == len({drawn for _, drawn in found}) == len(found)
    assert 0 <= length - len(found) < plan[-1][0]


@pytest.mark.parametrize("kind", ["shuffled", "whole", "balanced", "mixture"])
@few(4)
@given(
    length=st.integers(200, 260),
    worlds=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=2, max_size=4),
    cuts=st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_global_batches_stay_the_same_where_their_size_does(
    kind: str, length: int, worlds: list[int], cuts: list[int]
) -> None:
    build = of_kind(kind, length)
    plan = [(w, 24 // w, n) for w, n in zip(worlds, cuts, strict=False)]
    plan[-1] = *plan[-1][:2], -1
    (whole,) = run(build, [(1, 24, -1)])
    steps = [step for leg in run(build, plan) for step in leg.drawn]
    full = [sorted(step) for step in whole.drawn if len(step) == 24]
    assert [sorted(step) for step in steps][: len(full)] == full


@pytest.mark.parametrize(("kind", "workers"), one_in(3, itertools.product(KINDS, [0, 2])))
@few(2)
@given(data=st.data())
def test_a_leg_is_resumed_bit_for_bit(kind: str, workers: int, data: st.DataObject) -> None:
    plan = data.draw(plans(60, most=3), label="plan")
    build, (world, each, _) = of_kind(kind, 90), plan[-1]
    saved = through_json(run(build, plan[:-1])[-1].ranks[0].state_dict())
    rank = data.draw(st.integers(0, world - 1), label="rank")
    tails_are_equal(lambda: build(rank, world, each).workers(workers), saved)


def lost_of(records: Sequence[logging.LogRecord]) -> int:
    """Return how many copies the log says are lost."""
    found = [re.search(r"; ([0-9,]+) copies lost", record.message) for record in records]
    return sum(int(told[1].replace(",", "")) for told in found if told)


@pytest.mark.parametrize("kind", ["shuffled", "blocks", "balanced", "mixture"])
@few(4)
@given(
    data=st.data(),
    length=st.integers(100, 220),
    epoch=st.integers(0, 2),
    factor=st.sampled_from([2, 3, 1.5, 2.5]),
    pool=st.integers(12, 80),
)
def test_pools_are_dealt_anew(
    kind: str, data: st.DataObject, length: int, epoch: int, factor: float, pool: int
) -> None:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        # An epoch that ends with the first part has no example twice.
        train = mixture(length, "first") if kind == "mixture" else KINDS[kind](length)
        sizes = np.arange(length) % 7 + 1 if kind == "balanced" else None
        train = train.shard(rank=rank, world_size=world)
        train = (train if sizes is None else train.balance(sizes)).echo(factor, pool=pool)
        return train.random_map(drawing).batch(each).workers(0)

    epoch *= kind != "mixture"  # a later one of a mixture has examples of two of its parts' epochs
    with small_pools_allowed(), logged() as records:
        (whole,) = run(build, [(1, 7, -1)], epoch)
        examples = {x for step in whole.drawn for x, _, _ in step}
        plan = data.draw(plans(int((len(examples) - 6) * factor)), label="plan")
        legs = run(build, plan, epoch)
    expected = {(x, use): drawn for step in whole.drawn for x, use, drawn in step}
    found = [one for leg in legs for step in leg.drawn for one in step]
    assert len({(x, use) for x, use, _ in found}) == len(found), "no use comes twice"
    assert all(expected.get((x, use), drawn) == drawn for x, use, drawn in found)
    uses = collections.Counter(x for x, _, _ in found)
    most = math.ceil(factor)
    assert max(uses.values()) <= most
    assert uses.keys() <= examples
    assert len(examples) - len(uses) < plan[-1][0]
    lost = lost_of(records)
    assert lost <= sum((world - 1) * (most - 1) for world, _, _ in plan[1:])
    if isinstance(factor, int):
        assert len(found) == factor * len(uses) - lost
    clock = legs[-1].ranks[0].counts
    assert clock.fresh_examples == len(uses)
    assert clock.uses == len(found)


def test_pools_may_hold_nothing_when_others_take_over() -> None:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        train = rows(60).shuffle().shard(rank=rank, world_size=world).echo(2, pool=12)
        return train.random_map(drawing).batch(each).workers(0)

    with small_pools_allowed():
        legs = run(build, [(1, 1, 1), (2, 1, 0), (1, 1, -1)])
    found = [(x, use) for leg in legs for step in leg.drawn for x, use, _ in step]
    assert len({*found}) == len(found)
    assert {x for x, _ in found} == set(range(60))


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """Collect what is logged; a fixture is the same for all cases of a property."""
    records = list[logging.LogRecord]()

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            record.message = record.getMessage()
            records.append(record)

    log, handler = logging.getLogger("stoker"), Collecting()
    log.addHandler(handler)
    try:
        yield records
    finally:
        log.removeHandler(handler)


@pytest.mark.full
@few(3)
@given(data=st.data(), factor=st.sampled_from([2, 1.5]), workers=st.sampled_from([0, 2]))
def test_an_echo_s_leg_is_resumed_bit_for_bit(
    data: st.DataObject, factor: float, workers: int
) -> None:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        train = rows(100).shuffle().shard(rank=rank, world_size=world).echo(factor, pool=30)
        return train.random_map(drawing).batch(each).workers(0)

    plan = data.draw(plans(int(66 * factor), most=3), label="plan")
    with small_pools_allowed():
        legs = run(build, plan[:-1])
        saved = through_json(legs[-1].ranks[0].state_dict())
        world, each, _ = plan[-1]
        rank = data.draw(st.integers(0, world - 1), label="rank")
        tails_are_equal(lambda: build(rank, world, each).workers(workers), saved)


def tails_are_equal(build: Callable[[], stoker.Pipeline], saved: Any) -> None:
    """Save a leg before each batch; each state goes on with the same tail."""
    train, states, drawn = build(), [], []
    train.load_state_dict(saved)
    before = train.counts.steps
    with iter(train) as batches:
        left = len(batches)
        states.append(through_json(train.state_dict()))
        for ids, draws in batches:
            drawn.append((ids.tolist(), draws.tolist()))
            states.append(through_json(train.state_dict()))
    assert len(drawn) == left
    for at, state in enumerate(states[:-1]):
        again = build()
        again.load_state_dict(state)
        assert again.counts.steps == before + at
        assert [(ids.tolist(), draws.tolist()) for ids, draws in again] == drawn[at:]


@few(4)
@given(length=st.integers(120, 200), cuts=st.tuples(*[st.integers(1, 4)] * 3))
def test_a_pool_that_follows_the_stall_begins_empty(length: int, cuts: tuple[int, ...]) -> None:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        train = stoker.from_dataset(range(length), seed=7).shuffle()
        train = train.shard(rank=rank, world_size=world).echo(max_factor=4, pool=48)
        train = train.random_map(drawing).batch(each).workers(1)
        return train.steps(1_000) if world > 1 else train

    plan = [(1, 8, cuts[0]), (1, 5, cuts[1]), (3, 6, cuts[2]), (2, 4, 1), (1, 9, -1)]
    legs = run(build, plan, listed=True)
    found = [one for leg in legs for step in leg.drawn for one in step]
    assert len({(x, use) for x, use, _ in found}) == len(found)
    assert {x for x, use, _ in found if use == 1} == {x for x, _, _ in found} == set(range(length))
    (whole,) = run(of_kind("whole", length), [(1, 8, -1)])
    first = {x: drawn for step in whole.drawn for x, _, drawn in step}
    assert all(first[x] == drawn for x, use, drawn in found if use == 1)
    train = legs[-1].ranks[0]
    assert train.counts.fresh_examples == length
    assert sum(len(ids) for ids, _ in train) >= length, "the next epoch is a whole one"


class Faulty:
    """Numbers, of which some cannot be read."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        if index % 11 == 3:
            raise OSError("it cannot be read")
        return index


@stoker.thread_safe
def is_wanted(x: Any) -> bool:
    return bool(x % 3)


SIFTED: dict[str, Callable[[int], stoker.Pipeline]] = {
    "shuffled": lambda n: stoker.from_dataset(range(n), seed=7).shuffle(),
    "blocks": lambda n: stoker.from_dataset(range(n), seed=7).shuffle(block=4),
    "budget": lambda n: stoker.from_dataset(Faulty(n), seed=7, max_errors="100%").shuffle(),
    "budget, blocks": lambda n: stoker.from_dataset(Faulty(n), seed=7, max_errors="100%").shuffle(
        block=4
    ),
    "mixture": lambda n: mixture(n, "first"),
}


@pytest.mark.parametrize("kind", SIFTED)
@few(8)
@given(data=st.data(), length=st.integers(80, 200), epoch=st.integers(0, 1))
def test_what_filters_and_budgets_let_through_comes_once(
    kind: str, data: st.DataObject, length: int, epoch: int
) -> None:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        train = SIFTED[kind](length).shard(rank=rank, world_size=world).filter(is_wanted)
        train = train.random_map(drawing).batch(each).workers(0)
        return train.steps(1_000) if world > 1 else train

    epoch *= kind != "mixture"  # a later one of a mixture has examples of two of its parts' epochs
    (whole,) = run(build, [(1, 9, -1)], epoch)
    expected = {one for step in whole.drawn for one in step}
    rows = len(expected) if kind == "mixture" else length
    plan = data.draw(plans(rows // 3), label="plan")
    plan[-1] = 1, plan[-1][1], -1  # alone it sees to the end
    legs = run(build, plan, epoch, listed=True)
    found = [one for leg in legs for step in leg.drawn for one in step]
    assert len(set(found)) == len(found)
    assert set(found) == expected
    if kind == "mixture":
        assert sum(part.fresh_examples for part in legs[-1].ranks[0].stats().parts) > 0
        return
    fails = range(3, length, 11) if "budget" in kind else ()
    assert {x for x, _, _ in found} == {x for x in range(length) if is_wanted(x) and x not in fails}


def test_states_of_filters_are_each_rank_s_own() -> None:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        train = rows(300).shuffle().shard(rank=rank, world_size=world).filter(is_wanted)
        return train.random_map(drawing).batch(each).steps(12)

    (first,) = run(build, [(4, 4, 3)], listed=True)
    states = [rank.state_dict() for rank in first.ranks]
    assert [opened(state)["rank"] for state in states] == [0, 1, 2, 3]
    with pytest.raises(stoker.StateError, match=r"load_state_dict\(\[state of rank 0"):
        build(0, 3, 4).load_state_dict(states[0])
    with pytest.raises(stoker.StateError, match="the state is rank 1's, and this is rank 2"):
        build(2, 4, 4).load_state_dict(states[1])
    with pytest.raises(stoker.StateError, match="states of ranks 0, 1, 2, 2, and 4 saved them"):
        build(0, 3, 4).load_state_dict([*states[:3], states[2]])
    for rank in range(4):  # the same ranks find their own
        mine, of_list = build(rank, 4, 4), build(rank, 4, 4)
        mine.load_state_dict(states[rank])
        of_list.load_state_dict(states[::-1])
        for (ids, _), (others, _) in zip(mine, of_list, strict=True):
            assert ids.tolist() == others.tolist()


@stoker.thread_safe
def shifted(batch: Any, rng: np.random.Generator) -> Any:
    return batch, rng.random()


def test_maps_behind_batches_draw_nothing_twice() -> None:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        train = rows(120).shuffle().shard(rank=rank, world_size=world).batch(each)
        return train.random_map(shifted)

    plan = [(2, 6, 3), (4, 3, 2), (1, 12, 1), (3, 4, 3)]
    drawn = [draw for of_rank in batches_of(build, plan) for _, draw in of_rank]
    assert len(set(drawn)) == len(drawn) == 24


@pytest.mark.parametrize("pad", ["pad", "pad_full"])
@few(8)
@given(data=st.data(), length=st.integers(40, 120))
def test_evaluation_goes_on_with_every_example_once(
    pad: Any, data: st.DataObject, length: int
) -> None:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        dealt = rows(length).shard(rank=rank, world_size=world, remainder=pad, mask="valid")
        return dealt.batch(each)

    plan = data.draw(plans(length, most=3), label="plan")
    taken = [batch for of_rank in batches_of(build, plan) for batch in of_rank]
    found = [x for ids, valid in taken for x in ids[valid].tolist()]
    assert sorted(found) == list(range(length))


def test_steps_count_on_over_legs() -> None:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        return of_kind("shuffled", 300)(rank, world, each).steps(9)

    legs = run(build, [(4, 8, 3), (2, 8, 2), (3, 5, -1)])
    assert [len(leg.drawn) for leg in legs] == [3, 2, 4]
    assert legs[-1].ranks[0].epoch == 1


def test_passes_that_flow_on_go_on_with_other_ranks() -> None:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        return of_kind("shuffled", 100)(rank, world, each).repeat().steps(10)

    legs = run(build, [(2, 8, 9), (4, 3, -1)])
    assert [len(leg.drawn) for leg in legs] == [9, 1]
    once = [one for step in legs[0].drawn[:7] for one in step]
    second = [one for step in [*legs[0].drawn[7:], *legs[1].drawn] for one in step]
    assert len(set(once)) == len(once)
    assert len({x for x, _, _ in second}) == len(second) == 2 * 16 + 12
    train = legs[1].ranks[0]
    assert train.counts.steps == 10
    assert train.epoch == 1


def test_steps_of_an_epoch_are_skipped_behind_a_leg() -> None:
    build = of_kind("shuffled", 200)
    (first,) = run(build, [(4, 5, 3)])
    state = first.ranks[0].state_dict()
    train, other = build(1, 2, 10), build(1, 2, 10)
    train.load_state_dict(state)
    other.load_state_dict(state)
    train.resume_at(5)  # of the epoch, of which three are behind
    assert [x.tolist() for x, _ in train] == [x.tolist() for x, _ in other][2:]
    train.load_state_dict(state)
    train.resume_at(2)
    with pytest.raises(ValueError, match="the state that was loaded is behind 3"):
        iter(train)


def test_the_log_says_where_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    build = of_kind("shuffled", 200)
    (first,) = run(build, [(8, 2, 3)], epoch=3)
    state = first.ranks[0].state_dict()
    with caplog.at_level(logging.WARNING, "stoker"):
        for rank in range(6):
            build(rank, 6, 4).load_state_dict(state)
    assert [record.message for record in caplog.records] == [
        "goes on in epoch 3 at example 48 of 200 with 6 ranks instead of 8 and batches of 4 "
        "instead of 2"
    ]


Made = Callable[[stoker.Pipeline, Callable[..., stoker.Pipeline]], stoker.Pipeline]
EVEN = np.arange(200) % 3 + 1
REFUSED: dict[str, tuple[Made, str]] = {
    "fixed parts": (
        lambda p, dealt: dealt(p).shuffle().batch(4),
        r"shuffles a fixed part of its own: put .shuffle\(\) before .shard\(\)",
    ),
    "uneven parts": (
        lambda p, dealt: dealt(p.shuffle(), remainder="uneven").batch(4),
        "do not end together",
    ),
    "cuts of parts": (
        lambda p, dealt: dealt(p.shuffle()).take(40).batch(4),
        r"\.take\(\) and \.skip\(\) behind \.shard\(\)",
    ),
    "scan": (
        lambda p, dealt: dealt(p.shuffle()).scan(running, 0).batch(4).steps(9),
        r"what \.scan\(running\) is at the middle of is the rank's own",
    ),
    "windows": (
        lambda p, dealt: dealt(p.shuffle()).apply(stoker_lmdb.Every(3)).batch(4),
        r"what \.every\(3\): window is at the middle of is the rank's own",
    ),
    "echo and pack": (
        lambda p, dealt: dealt(p.shuffle()).map(text).echo(2, pool=9).pack(8).batch(4).steps(3),
        r"what \.pack\(8\) joins before or behind the pool of \.echo\(2\) is the rank's own",
    ),
    "batch echo": (
        lambda p, dealt: dealt(p.shuffle()).batch(4).echo(2, pool=3),
        r"the batches in the pool of \.echo\(2\) are the rank's own",
    ),
    "echo and filter": (
        lambda p, dealt: dealt(p.shuffle()).filter(odd).echo(2, pool=24).batch(4).steps(9),
        r"what is left out in front of the pool of \.echo",
    ),
    "echo behind tokens": (
        lambda p, dealt: dealt(p.shuffle()).batch_by_tokens(12, EVEN).echo(2, pool=3),
        r"the batches in the pool of \.echo\(2\) are the rank's own",
    ),
    "mixed blocks": (
        lambda p, dealt: dealt(stoker.mix([p.shuffle(block=4)], seed=1)).batch(4),
        "because parts are shuffled by blocks",
    ),
}


def running(state: int, x: Any) -> tuple[int, Any]:
    return state + 1, x


@stoker.thread_safe
def text(x: Any) -> Any:
    return np.arange(int(x) % 5 + 1)


@stoker.thread_safe
def odd(x: Any) -> bool:
    return bool(x % 2)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_go_on_with_others_says_so_and_can_between_epochs(what: str) -> None:
    make, why = REFUSED[what]

    def build(rank: int, world: int) -> stoker.Pipeline:
        return make(rows(200), lambda p, **how: p.shard(rank=rank, world_size=world, **how))

    train = build(0, 4)
    state = leave(train, 1)
    with pytest.raises(stoker.StateError, match=why) as caught:
        build(0, 3).load_state_dict(state)
    assert "with 3 ranks instead of 4" in str(caught.value)
    assert "\n" not in str(caught.value)
    list(train)
    other = build(2, 3)
    other.load_state_dict(train.state_dict())
    assert other.epoch == 2
    expected = build(2, 3)
    expected.set_epoch(2)
    assert seen_of(other) == seen_of(expected)


def seen_of(batches: Any) -> list[Any]:
    return [[np.asarray(leaf).tolist() for leaf in pytree.leaves(batch)] for batch in batches]


def test_a_stream_goes_on_with_the_same_ranks_alone() -> None:
    def build(each: int) -> stoker.Pipeline:
        return stoker.from_iterable(range(20), seed=0).batch(each)

    train = build(4)
    list(train)
    other = build(5)
    other.load_state_dict(train.state_dict())
    assert other.epoch == 1


def test_other_ranks_are_refused_if_that_is_asked_for() -> None:
    build = of_kind("shuffled", 200)
    (first,) = run(build, [(4, 5, 3)])
    state = first.ranks[0].state_dict()
    with pytest.raises(
        stoker.StateError, match=r"it has shard\(world_size=4\) where this one has sha"
    ):
        build(0, 2, 5).load_state_dict(state, elastic=False)
    with pytest.raises(stoker.StateError, match=r"it has batch\(5.* where this one has batch\(6"):
        build(0, 4, 6).load_state_dict(state, elastic=False)
    build(1, 4, 5).load_state_dict(state, elastic=False)


def test_lists_are_of_each_rank_once_and_of_one_place() -> None:
    build = of_kind("shuffled", 200)
    (first,) = run(build, [(4, 5, 3)])
    (later,) = run(build, [(4, 5, 4)])
    states = [rank.state_dict() for rank in first.ranks]
    build(0, 2, 5).load_state_dict(states)
    build(3, 4, 5).load_state_dict(states)
    with pytest.raises(stoker.StateError, match="states of ranks 0, 1, and 4 saved them"):
        build(0, 2, 5).load_state_dict(states[:2])
    with pytest.raises(stoker.StateError, match="of different places"):
        build(0, 2, 5).load_state_dict([*states[:3], later.ranks[3].state_dict()])
    with pytest.raises(stoker.StateError, match="the list of states is empty"):
        build(0, 2, 5).load_state_dict([])


def test_damaged_legs_are_refused() -> None:
    build = of_kind("blocks", 200)
    second = run(build, [(4, 5, 3), (2, 5, 2)])[1]
    sound = opened(second.ranks[0].state_dict())
    for change in (
        {"ranges": 10**6},
        {"ranges": 1},
        {"rest": sound["leg"]["rest"][:-3]},
        {"begun_by": 0},
        {"begun_by": -1},
        {"before": [1, 2]},
        {"batches": None},
    ):
        crafted = signed({**sound, "leg": {**sound["leg"], **change}})
        with pytest.raises(stoker.StateError, match="damaged"):
            build(0, 2, 5).load_state_dict(crafted)
    for change in ({"world": 0}, {"batch": 0}, {"world": 7}, {"batch": 7}, {"world": 10**12}):
        with pytest.raises(stoker.StateError):
            build(0, 2, 5).load_state_dict(signed({**sound, **change}))
