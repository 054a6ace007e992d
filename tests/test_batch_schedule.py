"""``.batch(fn)``: batches whose size changes by where in training they begin."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.testing import check_resume
from strategies import few, one_in

Sizes = Callable[[stoker.EpochTime], int]


@stoker.thread_safe
def drawing(x: Any, rng: np.random.Generator) -> Any:
    return x, rng.random()


def build(n: int, sizes: Any, rank: int = 0, world: int = 1, **how: Any) -> stoker.Pipeline:
    data = stoker.from_arrays(np.arange(n), seed=1).shuffle().shard(rank=rank, world=world)
    return data.random_map(drawing).batch(sizes, **how)


def seen(batches: Any) -> list[tuple[list[int], list[float]]]:
    return [(ids.tolist(), draws.tolist()) for ids, draws in batches]


def together(ranks: list[Any]) -> list[set[tuple[int, float]]]:
    """Return the global batches of ranks; of a last, shorter one nothing."""
    each = [seen(rank) for rank in ranks]
    assert len({len(batches) for batches in each}) == 1
    found = []
    for step in zip(*each, strict=True):
        assert len({len(ids) for ids, _ in step}) == 1
        found.append({row for ids, draws in step for row in zip(ids, draws, strict=True)})
    return found[:-1]


@st.composite
def tables(draw: st.DrawFn) -> list[int]:
    """Sizes by tenths of an epoch, from one epoch to the next."""
    return draw(st.lists(st.integers(1, 9), min_size=1, max_size=25))


def by_table(table: list[int], times: int) -> Sizes:
    def rows(time: stoker.EpochTime) -> int:
        return times * table[int(10 * time.epochs) % len(table)]

    return rows


@few(20)
@given(n=st.integers(1, 400), table=tables(), world=st.integers(1, 4), epoch=st.integers(0, 3))
def test_global_batches_are_the_same_for_all_ranks_and_workers(
    n: int, table: list[int], world: int, epoch: int
) -> None:
    n = max(n, world)
    alone = build(n, by_table(table, world))
    ranks = [build(n, by_table(table, 1), rank, world) for rank in range(world)]
    for each in (alone, *ranks):
        each.set_epoch(epoch)
    assert len({len(rank) for rank in ranks}) == 1
    whole = seen(alone)
    of_all = [set(zip(ids, draws, strict=True)) for ids, draws in whole]
    found = together(ranks)
    assert found == of_all[: len(found)]
    assert len(whole) - len(found) in (1, 2)  # the rest of an epoch that ranks cannot divide
    assert sorted(x for ids, _ in whole for x in ids) == [*range(n)]
    begun = 0
    for ids, _ in whole[:-1]:
        assert len(ids) == by_table(table, world)(stoker.EpochTime(epoch, begun / n))
        begun += len(ids)
    threaded = build(n, by_table(table, world)).workers(3)
    threaded.set_epoch(epoch)
    assert seen(threaded) == whole


@few(10)
@given(n=st.integers(8, 200), table=tables(), data=st.data())
def test_other_ranks_go_on_with_the_same_global_batches(
    n: int, table: list[int], data: st.DataObject
) -> None:
    first, second = (data.draw(st.sampled_from([1, 2, 3])) for _ in range(2))
    whole = seen(build(n, by_table(table, 6)))
    of_all = [set(zip(ids, draws, strict=True)) for ids, draws in whole]
    at = data.draw(st.integers(0, len(build(n, by_table(table, 6 // first), 0, first)) - 1))
    begun = build(n, by_table(table, 6 // first), 0, first)
    with iter(begun) as batches:
        for _ in range(at):
            next(batches)
        state = json.loads(json.dumps(begun.state_dict()))
    others = [build(n, by_table(table, 6 // second), rank, second) for rank in range(second)]
    for other in others:
        other.load_state_dict(state)
    found = together(others)
    assert found == of_all[at : at + len(found)]
    assert len(of_all) - at - len(found) in (0, 1, 2)

    twin = build(n, by_table(table, 6 // second), 0, second)
    twin.load_state_dict(state)
    with iter(twin) as batches:
        next(batches, None)
        saved = twin.state_dict()
        rest = seen(batches)
    again = build(n, by_table(table, 6 // second), 0, second)
    again.load_state_dict(saved)
    assert not rest or seen(again) == rest


def growing(time: stoker.EpochTime) -> int:
    return 2 + time.epoch + int(6 * time.progress)


BEHIND: dict[str, Callable[[Any], Any]] = {
    "plain": lambda p: p,
    "late echo": lambda p: p.echo(2, pool=3),
    "adaptive": lambda p: p.echo("auto", pool=3).steps(9),
    "steps": lambda p: p.steps(9),
    "repeat": lambda p: p.repeat().steps(30),
    "mapped": lambda p: p.random_map(lambda batch, rng: (*batch, rng.integers(9))),
    "processes": lambda p: p.workers(1, kind="process"),
}


@pytest.mark.parametrize(
    ("behind", "drop_last"), one_in(3, itertools.product(BEHIND, [False, True]))
)
def test_resumes_are_exact_whatever_stands_behind(behind: str, drop_last: bool) -> None:
    def made() -> Any:
        return BEHIND[behind](build(101, growing, drop_last=drop_last))

    if behind == "adaptive":
        train = made()
        assert [len(list(train)) for _ in range(3)] == [9] * 3
        return
    assert check_resume(made, every=8 if behind == "processes" else 2) > 0
    train = made()
    for _ in range(2):
        assert len(train) == len(list(train))
    jumped, first = made(), list(made())
    jumped.resume_at(4)
    assert len(list(jumped)) == len(first) - 4


def test_epochs_have_lengths_of_their_own_and_learning_follows_the_data() -> None:
    train = build(96, lambda time: 8 << time.epoch)
    assert [len(train)] + [(len(list(train)), len(train))[1] for _ in range(2)] == [12, 6, 3]
    assert train.epoch == 2
    with iter(train) as batches:
        next(batches)
        assert train.progress == 1 / 3
    assert (train.clock.fresh_examples, train.clock.steps) == (96 + 96 + 32, 19)
    assert train.batch_size is None
    assert "batch(<lambda>)  8 examples at the beginning" in str(train)
    left_out = build(20, lambda time: 8, drop_last=True)
    assert [len(ids) for ids, _ in left_out] == [8, 8]
    assert left_out.drop_last


def test_a_length_that_was_asked_for_binds_no_epoch() -> None:
    now, sizes = {"rows": 2, "share": 1.0}, np.ones(60, np.int64)

    def parts() -> list[Any]:
        return [stoker.from_arrays(np.arange(30) + 100 * part).shuffle() for part in range(2)]

    plain = build(24, lambda time: now["rows"])
    a, b = parts()
    mixed = stoker.mix({a: 1, b: lambda time: now["share"]}, seed=0)
    planned = mixed.batch(tokens=6, size=sizes)
    assert (len(plain), len(planned)) == (12, 10)
    now.update(rows=6, share=0.0)
    assert [len(ids) for ids, _ in plain] == [6] * 4
    assert sum(x >= 100 for batch in planned for x in batch) == 0
    now["share"] = 1 / 3
    # What an epoch was given counts, whatever the function says of it later.
    after = [x for _ in range(2) for batch in planned for x in batch]
    assert sorted(x for x in after if x >= 100) == list(range(100, 130))  # none came before


def test_mixtures_and_balance_are_dealt_by_what_divides_all_sizes() -> None:
    sizes = np.random.default_rng(0).integers(1, 50, 120)

    def sized(time: stoker.EpochTime) -> int:
        return 4 if time.progress < 0.5 else 8

    def mixed(rank: int, world: int) -> Any:
        a, b = (stoker.from_arrays(np.arange(60) + 100 * part).shuffle() for part in range(2))
        whole = stoker.mix({a: 1, b: 1}, seed=3).shard(rank=rank, world=world)
        return whole.random_map(drawing).batch(sized)

    def balanced(rank: int, world: int) -> Any:
        data = stoker.from_arrays(np.arange(120), seed=3).shuffle()
        dealt = data.shard(rank=rank, world=world, balance=sizes)
        return dealt.random_map(drawing).batch(sized)

    for made in (mixed, balanced):
        check_resume(lambda made=made: made(1, 2))  # type: ignore[misc]
        ranks = [seen(made(rank, 2)) for rank in range(2)]
        assert [len(ids) for ids, _ in ranks[0]] == [4] * 8 + [8] * 3 + [4]
        every = [x for rank in ranks for ids, _ in rank for x in ids]
        assert len({*every}) == len(every) == 120
        state = saved_at(made(0, 2), 3)
        with pytest.raises(stoker.StateError, match=r"dealt by whole batches, and the sizes of"):
            made(0, 3).load_state_dict(state)
    for ids, _ in seen(mixed(0, 2)):
        assert 2 * sum(x < 100 for x in ids) == len(ids)


def saved_at(train: Any, at: int) -> Any:
    with iter(train) as batches:
        for _ in range(at):
            next(batches)
        return train.state_dict()


def test_a_state_of_other_sizes_says_so() -> None:
    state = saved_at(build(100, growing), 12)
    with pytest.raises(stoker.StateError, match=r"after 12 batches, which have 24 by"):
        build(100, lambda time: 2).load_state_dict(state)
    echoed = saved_at(build(100, growing, 0, 2).echo(2, pool=3), 3)
    with pytest.raises(stoker.StateError, match="its pool holds batches that are the rank's own"):
        build(100, growing, 0, 1).echo(2, pool=3).load_state_dict(echoed)
    between = build(100, growing)
    list(between)
    other = build(100, lambda time: 5, 0, 2)
    other.load_state_dict(between.state_dict())
    assert [len(ids) for ids, _ in other] == [5] * 10


def test_what_says_no_size_is_refused() -> None:
    data: Any = stoker.from_arrays(np.arange(40), seed=0).shuffle()
    with pytest.raises(stoker.StageError, match=r"it returned 2.5 for EpochTime.*a whole number"):
        data.batch(lambda time: 2.5)
    with pytest.raises(stoker.StageError, match="it returned 0 for"):
        data.batch(lambda time: 0)
    late = data.batch(lambda time: 4 // (time.epoch == 0))
    list(late)
    with pytest.raises(stoker.StageError, match="ZeroDivisionError"):
        iter(late)
    for wrong, message in [
        (lambda: data.filter(lambda x: x > 3).batch(growing), "decides later what comes"),
        (lambda: data.echo(2).batch(growing), "decides later what comes"),
        (lambda: stoker.from_iterable(lambda: iter([1])).batch(growing), "a stream has none"),
        (lambda: data.shard(rank=0, world=2, uneven=True).batch(growing), "leave uneven=True out"),
        (lambda: data.batch(growing, key=np.arange(40)), "leave tokens=, key="),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()


def test_a_batch_as_large_as_can_be_said_is_the_rest_of_the_epoch() -> None:
    train = stoker.from_arrays(np.arange(10), seed=0).batch(lambda time: 10**30)
    assert [len(batch) for batch in train] == [10]


@pytest.mark.parametrize("to", [1, 2, 3])
def test_steps_are_skipped_over_a_pass_without_a_batch(to: int) -> None:
    def build() -> stoker.Pipeline:
        data = stoker.from_arrays(np.arange(4), seed=0).shuffle()
        # In every second pass there is too little for a batch.
        train = data.batch(lambda time: 8 if time.epoch % 2 else 2, drop_last=True)
        return train.repeat().steps(3)

    whole = build()
    expected = [[batch.tolist() for batch in whole] for _ in range(5)]
    jumped = build()
    jumped.set_epoch(to)
    assert [[batch.tolist() for batch in jumped] for _ in range(5 - to)] == expected[to:]
    skipped = build()
    skipped.resume_at(2)
    assert [batch.tolist() for batch in skipped] == expected[0][2:]
    assert [batch.tolist() for batch in skipped] == expected[1]
