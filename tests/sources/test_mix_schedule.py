"""``mix([part], weights=[fn])``: weights that change by where training stands."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.testing import check_resume
from strategies import few, one_in, opened, signed, through_json

Weight = Callable[[stoker.types.Progress], float]
PART = 1_000  # the first number of the second part, and so on
PIECES = 128  # of an epoch, in which weights stay


@stoker.thread_safe
def drawing(x: Any, rng: np.random.Generator) -> Any:
    return x, rng.random()


def parts(lengths: Sequence[int]) -> list[stoker.Pipeline[Any]]:
    return [
        stoker.from_arrays(np.arange(length) + PART * part).shuffle()
        for part, length in enumerate(lengths)
    ]


def mixed(
    lengths: Sequence[int], weights: Sequence[Any], batch: int = 8, rank: int = 0, world: int = 1
) -> stoker.Pipeline:
    whole = stoker.mix(parts(lengths), weights=weights, seed=2)
    return whole.shard(rank=rank, world_size=world).random_map(drawing).batch(batch)


def seen(batches: Any) -> list[set[tuple[int, float]]]:
    return [set(zip(ids.tolist(), draws.tolist(), strict=True)) for ids, draws in batches]


def rows(batches: Any) -> list[int]:
    return [x for ids, _ in batches for x in ids.tolist()]


def by_table(table: list[int]) -> Weight:
    return lambda time: table[int(7 * time.epochs) % len(table)]


tables = st.lists(st.integers(0, 9), min_size=1, max_size=20)


@few(12)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    data=st.data(),
    epochs=st.integers(1, 3),
)
def test_each_part_follows_its_weight_and_is_gone_through_wholly(
    lengths: list[int], data: st.DataObject, epochs: int
) -> None:
    weights = [lambda time: 0.5] + [by_table(data.draw(tables)) for _ in lengths[1:]]
    train = mixed(lengths, weights)
    length = sum(lengths)
    assert len(train) == -(-length // 8)
    drawn: list[list[int]] = [[] for _ in lengths]
    for epoch in range(epochs):
        found = rows(train)
        assert len(found) == length
        pieces = min(length, PIECES)
        due, begin = np.zeros(len(lengths)), 0
        given = np.zeros(len(lengths))
        for piece in range(pieces):
            end = length * (piece + 1) // pieces
            time = stoker.types.Progress(epoch, begin / length)
            now = np.array([weight(time) for weight in weights])
            own = np.bincount([x // PART for x in found[begin:end]], minlength=len(lengths))
            assert not own[now == 0].any()
            due, given, begin = due + (end - begin) * now / now.sum(), given + own, end
            assert (abs(due - given)[now > 0] < len(lengths) + 1).all()
        for x in found:
            drawn[x // PART].append(x)
    for length, of_part in zip(lengths, drawn, strict=True):
        for begin in range(0, len(of_part) - length + 1, length):
            assert len({*of_part[begin : begin + length]}) == length


LENGTHS = [70, 50]
WEIGHTS: list[Any] = [1, lambda time: max(0.0, 3 * time.epochs - 0.6)]


@few(8)
@given(world=st.integers(1, 4), epoch=st.integers(0, 2), at=st.integers(0, 8))
def test_global_batches_are_the_same_for_all_ranks_also_for_others_that_go_on(
    world: int, epoch: int, at: int
) -> None:
    whole = mixed(LENGTHS, WEIGHTS, 12)
    whole.set_epoch(epoch)
    of_all = seen(whole)

    def joined(ranks: list[Any]) -> list[set[tuple[int, float]]]:
        each = [seen(rank) for rank in ranks]
        assert len({len(batches) for batches in each}) == 1
        return [set().union(*step) for step in zip(*each, strict=True)]

    ranks = [mixed(LENGTHS, WEIGHTS, 12 // world, rank, world) for rank in range(world)]
    for rank in ranks:
        rank.set_epoch(epoch)
    found = joined(ranks)
    assert found[:-1] == of_all[: len(found) - 1]

    first = mixed(LENGTHS, WEIGHTS, 12 // world, 0, world)
    first.set_epoch(epoch)
    with iter(first) as batches:
        for _ in range(at):
            next(batches)
        state = through_json(first.state_dict())
    others = [mixed(LENGTHS, WEIGHTS, 6, rank, 2) for rank in range(2)]
    for other in others:
        other.load_state_dict(state)
    rest = joined(others)
    assert rest[:-1] == of_all[at : at + len(rest) - 1]


BEHIND: dict[str, Callable[[Any], Any]] = {
    "plain": lambda p: p.batch(8),
    "rank": lambda p: p.shard(rank=1, world_size=2).batch(8),
    "echo": lambda p: p.echo(2, pool=24).batch(8),
    "tokens": lambda p: p.batch_by_tokens(40, np.arange(120) % 9 + 1),
    "numbered": lambda p: p.with_index("id").batch(8),
    "cache": lambda p: p.cache("1MiB", version="1").batch(8),
    "first ones": lambda p: p.take(50).batch(8),
    "repeat": lambda p: p.batch(8).repeat().steps(20),
    "processes": lambda p: p.batch(8).workers(1, kind="process"),
}


@pytest.mark.parametrize("behind", one_in(3, BEHIND))
def test_resumes_are_exact_whatever_stands_behind(behind: str) -> None:
    def build() -> Any:
        parts = [
            stoker.from_arrays(np.arange(length) + PART * part, np.arange(length)).shuffle()
            for part, length in enumerate(LENGTHS)
        ]
        whole = stoker.mix(parts, weights=WEIGHTS, seed=2)
        return BEHIND[behind](whole)

    assert check_resume(build, every=8 if behind == "processes" else 2) > 0
    train, inline = build(), build().workers(0)
    for _ in range(3):
        assert [batch[0].tolist() for batch in train] == [batch[0].tolist() for batch in inline]


def test_pools_that_follow_the_stall_go_on() -> None:
    train = stoker.mix(parts([60, 60]), weights=[1, lambda time: time.epochs], seed=1)
    train = train.echo("auto", pool=32).batch(8).steps(10)
    for _ in range(3):
        assert len(list(train)) == 10


def test_maps_are_told_the_time_of_the_mixture() -> None:
    late: list[Any] = [1, lambda time: 3 * (time.fraction >= 0.5)]
    train = stoker.mix(parts(LENGTHS), late, seed=1).map(lambda x, time: (x, time), progress=True)
    for epoch in range(3):
        for place, (_, time) in enumerate(train):
            assert time.epoch == epoch
            assert abs(time.fraction - place / 120) < 0.05


def test_stats_and_print_tell_shares() -> None:
    train = mixed(LENGTHS, [1, lambda time: float(time.epoch == 1)])
    assert "part 2, 0.000% of the first epoch" in str(train)
    counts = []
    for _ in range(3):
        rows(train)
        counts.append([part.fresh_examples for part in train.stats().parts])
    assert counts == [[120, 0], [60, 60], [120, 0]]
    assert [part.epochs for part in train.stats().parts] == [300 / 70, 60 / 50]


def test_a_length_that_was_asked_for_binds_no_epoch() -> None:
    now = {"share": 1.0}
    mixed = stoker.mix(parts([30, 30]), weights=[1, lambda time: now["share"]], seed=0)
    planned = mixed.batch_by_tokens(6, np.ones(60, np.int64))
    assert len(planned) == 10
    now["share"] = 0.0
    assert sum(x >= PART for batch in planned for x in batch) == 0
    now["share"] = 1 / 3
    # What an epoch was given counts, whatever the function says of it later.
    after = [x for _ in range(2) for batch in planned for x in batch]
    assert sorted(x - PART for x in after if x >= PART) == list(range(30))  # none came before


def test_another_function_is_refused_in_the_middle_of_an_epoch() -> None:
    first = mixed(LENGTHS, WEIGHTS)
    with iter(first) as batches:
        next(batches)
        state = first.state_dict()
    other = mixed(LENGTHS, [1, lambda time: 1 - time.fraction])
    other.load_state_dict(state)
    with pytest.raises(stoker.StateError, match="the order of epoch 0 is another one now"):
        iter(other)
    rows(first)
    other = mixed(LENGTHS, [1, lambda time: 1 - time.fraction])
    other.load_state_dict(first.state_dict())
    assert len(rows(other)) == 120


def test_a_state_says_what_was_drawn_before_so_that_no_earlier_weights_are_asked_for() -> None:
    asked: list[int] = []

    def weight(time: stoker.types.Progress) -> float:
        asked.append(time.epoch)
        return 1.0 + time.epoch % 3

    first = mixed(LENGTHS, [1, weight])
    for _ in range(4):
        rows(first)
    state = through_json(first.state_dict())
    expected = seen(first)
    resumed = mixed(LENGTHS, [1, weight])
    asked.clear()
    resumed.load_state_dict(state)
    assert seen(resumed) == expected
    assert set(asked) == {4}
    by_epoch = mixed(LENGTHS, [1, weight])
    by_epoch.set_epoch(4)
    assert seen(by_epoch) == expected
    fields = opened(state)
    drawn = fields["drawn"]
    far = signed({**fields, "epoch": 1_000_000_004, "drawn": [drawn[0] + 120 * 10**9, drawn[1]]})
    resumed.load_state_dict(far)
    assert len(rows(resumed)) == 120


def test_a_far_epoch_that_is_found_by_counting_needs_a_state() -> None:
    train = mixed(LENGTHS, WEIGHTS)
    with pytest.raises(ValueError, match=r"before epoch 1,000 is found by asking .* load a state"):
        train.set_epoch(1000)
    assert len(rows(train)) == 120
    state = opened(train.state_dict())
    del state["drawn"]
    with pytest.raises(stoker.StateError, match="load a state of that epoch"):
        train.load_state_dict(signed({**state, "epoch": 10**9}))
    for drawn in ([1, 2], [120], "120"):
        with pytest.raises(stoker.StateError, match="the state is damaged"):
            train.load_state_dict(signed({**state, "drawn": drawn}))
    plain = stoker.mix([stoker.from_arrays(np.arange(9)), stoker.from_arrays(np.arange(9))])
    with pytest.raises(stoker.StateError, match="which this pipeline has none of"):
        plain.load_state_dict(signed({**opened(plain.state_dict()), "drawn": [0, 0]}))
    planned = stoker.from_arrays(np.arange(40), seed=0).shuffle()
    train = planned.batch_by_tokens(9, np.arange(40) % 9 + 1).repeat().steps(5)
    with pytest.raises(ValueError, match="more than 1,000 take too long: load a state"):
        train.set_epoch(10**9)


def constant(weight: Any, time: stoker.types.Progress) -> Any:
    return weight


def test_what_says_no_weights_is_refused() -> None:
    a, b = parts([40, 40])
    wrong: list[tuple[Any, str]] = [
        ("heavy", "a weight is a number from 0, not 'heavy', for Progress"),
        (-1, "finite numbers from 0"),
        (float("nan"), "finite numbers from 0"),
    ]
    for weight, message in wrong:
        with pytest.raises(stoker.StageError, match=message):
            stoker.mix([a, b], weights=[1, functools.partial(constant, weight)])
    with pytest.raises(stoker.StageError, match=r"all weights are 0 for Progress"):
        stoker.mix([a, b], weights=[lambda time: 0, lambda time: 0])
    late = stoker.mix([a, b], weights=[1, lambda time: 1 / (time.fraction < 0.5)], seed=0)
    with pytest.raises(stoker.StageError, match=r"mix\(\) failed: ZeroDivisionError"):
        iter(late.batch(8))
    with pytest.raises(ValueError, match=r"as many examples as all parts together: leave stop="):
        stoker.mix([a, b], weights=[1, lambda time: 1], stop="all")
    with pytest.raises(ValueError, match="above 0"):
        stoker.mix([a, b], weights=[0, lambda time: 1])
    blocks = stoker.from_arrays(np.arange(40)).shuffle(block=2)
    ranks = stoker.mix([blocks, b], weights=[1, lambda time: 1], seed=0).shard(rank=0, world_size=2)
    with pytest.raises(ValueError, match=r"shuffle them as a whole, .shuffle\(block=False\)"):
        len(ranks.batch(4))


def test_counts_of_many_epochs_are_added_up_once() -> None:
    asked: collections.Counter[int] = collections.Counter()

    def weight(time: stoker.types.Progress) -> float:
        asked[time.epoch] += 1
        return time.fraction

    train = mixed(LENGTHS, [1, weight])
    train.set_epoch(30)
    for _ in range(3):
        rows(train)
    assert max(asked.values()) <= 4 * 120
