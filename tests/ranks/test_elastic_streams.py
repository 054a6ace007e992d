"""Epochs of streams with a state of their own go on with other ranks: each example comes once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_places import drawing, leave

import stoker
from stoker.testing import check_resume
from strategies import BeginsAnew, CountingStream, GoesOn, few, opened, signed, stream, through_json

WORLDS = [1, 2, 3, 4, 8]
Drawn = dict[int, float]


@stoker.thread_safe
class Numbers(BeginsAnew):
    """The same for any workers."""


@stoker.thread_safe
class Going(GoesOn):
    """The same for any workers."""


def build(
    source: CountingStream, rank: int, world: int, each: int, workers: int = 0, skip: int = 0
) -> stoker.Pipeline:
    chain = stoker.from_iterable(source, seed=7).skip(skip).shard(rank=rank, world_size=world)
    return chain.random_map(drawing).batch(each).workers(workers)


def drawn_of(length: int, skip: int = 0) -> Drawn:
    """Return what one rank draws for each example."""
    return dict(itertools.chain(*map(pairs, build(Numbers(length), 0, 1, 5, skip=skip))))


def pairs(batch: Any) -> list[tuple[int, float]]:
    ids, draws = batch
    return list(zip(ids.tolist(), draws.tolist(), strict=True))


@few(8)
@given(
    kind=st.sampled_from([Numbers, Going]),
    length=st.integers(0, 150),
    skip=st.sampled_from([0, 0, 5, 21]),
    legs=st.lists(
        st.tuples(st.sampled_from(WORLDS), st.integers(1, 9), st.integers(0, 5)),
        min_size=1,
        max_size=5,
    ),
    workers=st.sampled_from([0, 0, 0, 2]),
    data=st.data(),
)
def test_what_was_not_handed_out_comes_once_with_its_own_draws(
    kind: type[CountingStream],
    length: int,
    skip: int,
    legs: list[tuple[int, int, int]],
    workers: int,
    data: st.DataObject,
) -> None:
    expected, drawn, state, steps = drawn_of(length, skip), Drawn(), None, 0
    for number, (world, each, taken) in enumerate(legs):
        is_last, states, counts = number == len(legs) - 1, [], set()
        left = len(expected) - len(drawn)  # no leg but the last ends the epoch
        most = None if is_last else min(taken, left // (world * each))
        for rank in range(world):
            train = build(kind(length), rank, world, each, workers, skip)
            if state is not None:
                train.load_state_dict(state)
            count = 0
            with iter(train) as batches:
                for batch in itertools.islice(batches, most):
                    for x, draw in pairs(batch):
                        assert drawn.setdefault(x, draw) is draw, "none twice"
                    count += 1
                states.append(through_json(train.state_dict()))
            counts.add(count)
        assert len(counts) == 1, "ranks take equally many steps"
        assert all(each == states[0] for each in states), "one state serves all ranks"
        steps += counts.pop()
        assert train.counts.fresh_examples == train.counts.uses == len(drawn)
        assert train.counts.steps == steps
        state = data.draw(st.sampled_from(states))
    assert drawn.items() <= expected.items()
    assert len(expected) - len(drawn) < legs[-1][0]
    assert train.epoch == 1


@few(8)
@given(
    kind=st.sampled_from([Numbers, Going]),
    length=st.integers(0, 60),
    world=st.sampled_from(WORLDS),
    each=st.integers(1, 6),
    rank=st.integers(0, 7),
    skip=st.sampled_from([0, 3]),
    window=st.none() | st.tuples(st.integers(0, 5), st.integers(0, 30)),
)
def test_each_rank_resumes_at_every_batch(
    kind: type[CountingStream],
    length: int,
    world: int,
    each: int,
    rank: int,
    skip: int,
    window: tuple[int, int] | None,
) -> None:
    def make() -> stoker.Pipeline:
        chain = stoker.from_iterable(kind(length), seed=7).skip(skip).take(50)
        chain = chain.shard(rank=rank % world, world_size=world)
        if window is not None:  # of the rank's own examples
            chain = chain.skip(window[0]).take(window[1])
        return chain.random_map(drawing).batch(each).workers(0)

    if stream(make()):
        check_resume(make, every=1)


@few(4)
@given(
    legs=st.lists(
        st.tuples(st.sampled_from(WORLDS), st.integers(1, 4), st.integers(1, 3)),
        min_size=2,
        max_size=3,
    ),
    skipped=st.integers(0, 9),
)
def test_a_leg_is_resumed_bit_for_bit(legs: list[tuple[int, int, int]], skipped: int) -> None:
    state = None
    for world, each, taken in legs:
        train = build(Numbers(300), 0, world, each)
        if state is not None:
            train.load_state_dict(state)
        with iter(train) as batches:
            for _ in itertools.islice(batches, taken):
                pass
            state = through_json(train.state_dict())
        last = world, each

    def go_on(at: int) -> stoker.Pipeline:
        assert state is not None
        train = build(Numbers(300), last[0] - 1, *last)
        train.load_state_dict(state)
        with iter(train) as batches:
            assert through_json(train.state_dict()) == state  # nothing is handed out yet
            for _ in itertools.islice(batches, at):
                pass
            saved = through_json(train.state_dict())
        again = build(Numbers(300), last[0] - 1, *last)
        again.load_state_dict(saved)
        return again

    whole = stream(go_on(0))
    at = min(skipped, len(whole) - 1)
    resumed = go_on(at)
    assert stream(resumed) == whole[at:]
    following = build(Numbers(300), last[0] - 1, *last)
    following.set_epoch(1)
    assert stream(resumed) == stream(following)


@pytest.mark.parametrize("steps", [3, 4])
def test_a_stream_that_goes_on_does_so_in_the_next_epoch_of_other_ranks(steps: int) -> None:
    """Epochs of four steps: the next one begins where this one left the stream."""
    state = leave(build(Going(500), 1, 4, 5).steps(4), steps)
    assert state["epoch"] == steps // 4
    found = []
    for rank in range(2):
        train = build(Going(500), rank, 2, 5).steps(4)
        train.load_state_dict(state)
        if steps == 3:
            found += [x for batch in train for x, _ in pairs(batch)]
        found += [x for batch in train for x, _ in pairs(batch)]
    begin = steps * 4 * 5
    count = 10 if steps == 3 else 0  # the last step of the epoch
    assert sorted(found) == list(range(begin, begin + count + 40))


def test_an_error_on_a_leg_names_the_example_of_the_stream() -> None:
    def fail(x: int) -> int:
        if x == 33:
            raise ArithmeticError("33")
        return x

    def failing(rank: int, world: int) -> stoker.Pipeline:
        chain = stoker.from_iterable(Numbers(100), seed=0).shard(rank=rank, world_size=world)
        return chain.map(fail).batch(2)

    state = leave(failing(0, 4), 3)
    train = failing(0, 3)
    train.load_state_dict(state)
    with pytest.raises(stoker.StageError, match="on example 33 of the stream"):
        list(train)


def test_the_log_says_where_a_stream_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    state = leave(build(Numbers(100), 0, 4, 5), 2)
    build(Numbers(100), 0, 3, 5).load_state_dict(state)
    assert caplog.messages == ["goes on in epoch 0 at example 40 with 3 ranks instead of 4"]
    with pytest.raises(stoker.StateError, match=r"shard\(world_size=4\)"):
        build(Numbers(100), 0, 3, 5).load_state_dict(state, elastic=False)


def test_what_cannot_go_on_with_other_ranks_says_why() -> None:
    def following(rank: int, world: int) -> stoker.Pipeline:
        chain = stoker.from_iterable(Numbers(100), seed=0).shard(rank=rank, world_size=world)
        return chain.echo("auto").batch(2).steps(9)

    def cut(rank: int, world: int) -> stoker.Pipeline:
        chain = stoker.from_iterable(Numbers(100), seed=0).shard(rank=rank, world_size=world)
        return chain.take(20).batch(2)

    for make, why in ((following, r"\.echo.* has read a stream"), (cut, r"put them before it")):
        state = leave(make(1, 2), 2)
        make(1, 2).load_state_dict(state)
        with pytest.raises(stoker.StateError, match=why) as caught:
            make(1, 3).load_state_dict(state)
        assert "\n" not in str(caught.value)


def test_damaged_legs_are_refused() -> None:
    state = leave(build(Numbers(100), 0, 4, 5), 2)
    train = build(Numbers(100), 1, 2, 3)
    train.load_state_dict(state)
    sound = opened(leave(train, 2))
    build(Numbers(100), 1, 2, 3).load_state_dict(signed(sound))
    held = {"world": 2, "kinds": [], "places": "", "spent": ""}
    for change in (
        {"ranges": 1},
        {"rest": "AA=="},
        {"begun_by": 0},
        {"before": [1, 2]},
        {"before": [-1, 2, 3]},
        {"batches": None},
        {"held": held},
        {"over": "AA=="},
        {"sequences": 3},
    ):
        crafted = signed({**sound, "leg": {**sound["leg"], **change}})
        with pytest.raises(stoker.StateError, match="damaged"):
            build(Numbers(100), 1, 2, 3).load_state_dict(crafted)
    for yielded in (0, sound["yielded"]):  # without the stream's own state
        crafted = {key: value for key, value in sound.items() if key != "loader"}
        with pytest.raises(stoker.StateError, match="damaged"):
            build(Numbers(100), 1, 2, 3).load_state_dict(signed({**crafted, "yielded": yielded}))
