"""States that were not saved but made: with a right checksum, and fields that cannot be."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import signal
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.basics import compact_integers
from strategies import (
    Examples,
    Spec,
    built,
    few,
    frozen,
    jitter,
    opened,
    paths_of,
    signed,
    small_pools_allowed,
    specs,
    through_json,
)

WITHIN_S = 150
MOST_BYTES = 1 << 24


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fail what does not end, or takes more memory than these pipelines need."""

    def hangs(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(WITHIN_S)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def leave(pipeline: stoker.Pipeline, steps: int) -> dict[str, Any]:
    """Take so many batches and return the state there."""
    with iter(pipeline) as batches, small_pools_allowed():
        for _ in range(steps):
            next(batches)
        state: dict[str, Any] = through_json(pipeline.state_dict())
    return state


@functools.cache
def bomb() -> str:
    return compact_integers.encode_bytes(np.zeros(1 << 26, np.uint8))


ODD: list[Any] = [
    *(None, True, "", "x", "::", " ", -1, 2.5, float("nan"), [], {}, [[]], {"x": 1}, {"0": 1}),
    *(2**31, 2**53 + 1, 2**63, 2**64, 10**400, -(2**63), [0] * 3, [None], ["  "]),
]


def repacked(text: str, draw: Any) -> str:
    """Return packed numbers with something done to one of them, or to how many there are."""
    parts = text.split(" ")
    at = draw(st.integers(0, len(parts) - 1))
    halves = parts[at].split(":")
    half = draw(st.integers(0, len(halves) - 1))
    if draw(st.integers(0, 5)) == 0:
        halves[half] = bomb()
    else:
        numbers = compact_integers.decode_bytes(halves[half], 1 << 20).tolist()
        kind = draw(st.sampled_from(["more", "fewer", "other", "other"]))
        if kind == "more" or not numbers:
            numbers += draw(st.lists(st.integers(0, 255), min_size=1, max_size=9))
        elif kind == "fewer":
            del numbers[draw(st.integers(0, len(numbers) - 1)) :]
        else:
            place = draw(st.integers(0, len(numbers) - 1))
            numbers[place] = draw(st.sampled_from([0, 1, 2, 3, 7, 100, 254, 255]))
        halves[half] = compact_integers.encode_bytes(np.array(numbers, np.uint8))
    parts[at] = ":".join(halves)
    return " ".join(parts)


def other(value: Any, draw: Any) -> Any:
    """Return something else for a value: of another kind, or nearly the same."""
    how = draw(st.integers(0, 2))
    if how and type(value) is int:
        return draw(st.sampled_from([value - 1, value + 1, value + 64, 2 * value, 0, 2**31, 1]))
    if how and type(value) is str and len(value) > 8:
        with contextlib.suppress(ValueError):
            return repacked(value, draw)
    if how and type(value) is list and value:
        return draw(st.sampled_from([value[:-1], [*value, value[-1]], value[::-1], [value]]))
    return copy.deepcopy(draw(st.sampled_from(ODD)))


def crafted(state: dict[str, Any], draw: Any) -> tuple[dict[str, Any], set[str]]:
    """Return a state with a field or two changed, and which."""
    made = copy.deepcopy(opened(state))
    changed = set()
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        path = draw(st.sampled_from(paths_of(made)))
        changed.add(path[0])
        at: Any = made
        for step in path[:-1]:
            at = at[step]
        if draw(st.integers(0, 9)) == 0:
            del at[path[-1]]
        else:
            at[path[-1]] = other(at[path[-1]], draw)
    return signed(made), changed


def try_to_go_on(pipeline: stoker.Pipeline, state: dict[str, Any], most: int) -> list[Any] | None:
    """Load a state and take what is left of its epoch; None if it was refused."""
    found: list[Any] | None
    with warnings.catch_warnings(), small_pools_allowed():
        warnings.filterwarnings("ignore", message="the state was saved under NumPy")
        try:
            pipeline.load_state_dict(state)
            with iter(pipeline) as batches:
                found = [frozen(batch) for batch in itertools.islice(batches, most + 1)]
        except stoker.StateError as error:
            said = str(error)
            found = None
    if found is None:
        assert len(said.splitlines()) == 1
        assert len(said) < 1000
    else:
        pipeline.state_dict()
    return found


PLAIN = {"numpy", "seed", "epoch", "before", "filtered", "spent", "fresh", "loaded", "uses"}
PLAIN |= {"step", "finished"}  # for people alone


@few(30)
@given(
    specs(max_examples=60, max_filters=2, byte_pools=True, points=("before", "after", "batch")),
    st.data(),
)
def test_a_crafted_state_is_refused_or_the_run_is_right(spec: Spec, data: st.DataObject) -> None:
    with small_pools_allowed():
        pipeline = built(spec, 0)
        whole = []
        states = []
        for batch in pipeline:
            whole.append(frozen(batch))
            states.append(through_json(pipeline.state_dict()))
    states = states or [pipeline.state_dict()]
    number = data.draw(st.integers(0, len(states) - 1), label="at")
    state, changed = crafted(states[number], data.draw)
    with bounded():
        rest = try_to_go_on(built(spec, 0), state, spec.outputs)
    if rest is None:
        return
    yielded = opened(state)["yielded"]
    assert len(rest) <= spec.outputs - yielded
    if not spec.filters and changed <= PLAIN | {"yielded"}:
        if yielded and not changed & {"seed", "epoch"}:
            assert rest == whole[yielded:]
    elif not spec.filters:
        assert len(rest) == spec.outputs - yielded


def summed(total: list[int], number: int) -> tuple[list[int], Any]:
    total.append(number)
    return total, sum(total) if number % 5 else stoker.DROP


def scanned() -> stoker.Pipeline:
    source = stoker.from_dataset(range(60), seed=0).shuffle().scan(summed, [])
    return source.echo(2, pool=8).batch(4).workers(0)


@functools.cache
def scanned_states() -> list[dict[str, Any]]:
    pipeline = scanned()
    with small_pools_allowed():
        return [through_json(pipeline.state_dict()) for _ in pipeline]


@few(60)
@given(st.data())
def test_a_crafted_state_of_a_scan(data: st.DataObject) -> None:
    state = data.draw(st.sampled_from(scanned_states()), label="state")
    state, _ = crafted(state, data.draw)
    with bounded():
        try:
            rest = try_to_go_on(scanned(), state, 2 * 60)
        except stoker.StageError:  # right JSON, but no state that this function can go on with
            return
    assert rest is None or len(rest) <= 2 * 60 // 4


@stoker.thread_safe
class Slow(Examples):
    """So that some is used again."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.0005)
        return super().__getitem__(index)


def followed(**echo: Any) -> stoker.Pipeline:
    source = stoker.from_dataset(Slow(90), seed=0, max_errors=90).shuffle()
    chain = source.filter(stoker.thread_safe(lambda n: n % 5 > 0), on="id").echo("auto", **echo)
    return chain.random_map(jitter, on="x").batch(4).workers(1)


@functools.cache
def followed_states() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    pipeline = followed(max_factor=3, pool=20)
    with small_pools_allowed():
        states = [through_json(pipeline.state_dict()) for _ in pipeline]
    return states, through_json(pipeline.record())


def going_on(**echo: Any) -> stoker.Pipeline:
    """A pipeline whose pool goes on in the next epoch."""
    source = stoker.from_dataset(Slow(60), seed=0).shuffle()
    return source.echo("auto", **echo).random_map(jitter, on="x").batch(4).workers(1)


@functools.cache
def carried_states() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    pipeline = going_on(max_factor=3)
    for _ in pipeline:
        pass
    states = [through_json(pipeline.state_dict())]
    states += [through_json(pipeline.state_dict()) for _ in pipeline]
    return states, through_json(pipeline.record())


Begun = Callable[[], stoker.Pipeline]
# Pipelines under auto, what their states and records say, and how many batches are the most.
UNDER_AUTO: dict[str, tuple[Begun, Any, int]] = {
    "a pool": (lambda: followed(max_factor=3, pool=20), followed_states, 3 * 90 // 4 + 1),
    "a pool that goes on": (
        lambda: going_on(max_factor=3), carried_states, (3 * 60 + 3 * 64) // 4 + 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNDER_AUTO)
@few(30)
@given(data=st.data())
def test_a_crafted_state_under_auto(case: str, data: st.DataObject) -> None:
    build, states, most = UNDER_AUTO[case]
    state = data.draw(st.sampled_from(states()[0]), label="state")
    state, _ = crafted(state, data.draw)
    with bounded():
        rest = try_to_go_on(build(), state, most)
    assert rest is None or len(rest) <= most


@pytest.mark.parametrize("case", UNDER_AUTO)
@few(20)
@given(data=st.data())
def test_a_crafted_record(case: str, data: st.DataObject) -> None:
    build, states, most = UNDER_AUTO[case]
    record = copy.deepcopy(states()[1])
    path = data.draw(st.sampled_from(paths_of(record)), label="where")
    at: Any = record
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = other(at[path[-1]], data.draw)
    with bounded(), small_pools_allowed(), contextlib.suppress(stoker.StateError):
        pipeline = build().replay(record).workers(0)
        for _ in range(2):
            assert sum(1 for _ in itertools.islice(pipeline, 1000)) <= most


class Stateful:
    """A loader with a state of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 12:
            self.at += 1
            yield np.full(3, self.at)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@few(20)
@given(st.data())
def test_a_crafted_state_over_a_loader(data: st.DataObject) -> None:
    """But for its own state, which is the loader's business."""

    def build() -> stoker.Pipeline:
        return stoker.from_loader(Stateful(), seed=0).echo("auto", max_factor=2)

    pipeline = build()
    state = leave(pipeline, data.draw(st.integers(0, 6)))
    loader = state.pop("loader")
    state, _ = crafted(state, data.draw)
    if data.draw(st.integers(0, 4)):
        state["loader"] = loader
    with bounded():
        rest = try_to_go_on(build(), state, 24)
    assert rest is None or len(rest) <= 24


REFUSED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "more than an epoch": lambda pool: {"yielded": 2**31, "uses": 2**33},
    "beyond the last": lambda pool: {"yielded": 16, "uses": 64},
    "uses that are none of these": lambda pool: {"uses": 23},
    "a seed below 0": lambda pool: {"seed": -1},
    "no version": lambda pool: {"numpy": 3},
    "a loader that is none": lambda pool: {"loader": {"at": 3}},
    "a huge pool": lambda pool: {"pool_sizes": {"0": 2**31}},
    "a pool of nobody": lambda pool: {"pool_sizes": {"0": 12, "7": 12}},
    "no part": lambda pool: {"parts": []},
    "parts: another end": lambda pool: {"parts": [{**pool, "items": 25}]},
    "parts: another kind": lambda pool: {"parts": [{**pool, "kind": "scan"}]},
    "parts: no kind": lambda pool: {"parts": [{k: v for k, v in pool.items() if k != "kind"}]},
    "parts: two pools": lambda pool: {"parts": [pool, pool]},
    "parts: a filter before it": lambda pool: {"parts": [{"kind": "filter"}, pool]},
    "parts: no list": lambda pool: {"parts": {"0": pool}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_when_it_is_loaded(what: str) -> None:
    pipeline = stoker.from_dataset(Examples(30)).shuffle().echo(2, pool=12)  # any seed will do
    pipeline = pipeline.random_map(jitter, on="x").batch(4)
    state = leave(pipeline, 6)
    fields = opened(state)
    changes = REFUSED[what](fields["parts"][0])
    with pytest.raises(stoker.StateError) as caught:
        pipeline.load_state_dict(signed({**fields, **changes}))
    assert "\n" not in str(caught.value)
    pipeline.load_state_dict(state)


@pytest.mark.parametrize("name", ["packed", "drops"])
def test_a_bomb_is_refused_before_it_is_inflated(name: str) -> None:
    pipeline = followed() if name == "drops" else built(Spec(30, 4, echoes=BEFORE), 0)
    state = opened(leave(pipeline, 3))
    inner = state["parts"][0]
    inner[name] = " ".join(f"{bomb()}:{part.split(':')[-1]}" for part in inner[name].split(" "))
    with bounded(), pytest.raises(stoker.StateError, match="the text holds more than"):
        pipeline.load_state_dict(signed(state))


BEFORE = (("before", Fraction(2), 12),)


def test_a_state_beyond_steps_is_refused() -> None:
    pipeline = stoker.from_dataset(Examples(30), seed=0).batch(3)
    state = leave(pipeline, 5)
    with pytest.raises(stoker.StateError, match=r"at batch 5.*\.steps\(4\)"):
        pipeline.steps(4).load_state_dict(state)
    pipeline.steps(5).load_state_dict(state)


def test_the_memory_of_a_pool_is_that_of_its_items() -> None:
    """Not of what it may hold, where filters leave open how many come."""
    tracemalloc.start()
    try:
        chain = stoker.from_dataset(range(100), seed=0).filter(lambda n: n % 2 == 0)
        assert len(list(chain.echo(2, pool=1 << 24).batch(10))) == 10
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_a_pool_has_not_had_more_than_a_filter_left() -> None:
    chain = stoker.from_dataset(Examples(60), seed=0).filter(lambda n: n % 5 > 0, on="id")
    chain = chain.echo(2, pool=16)
    pipeline = chain.batch(4).workers(0)
    states = [pipeline.state_dict() for _ in pipeline]
    state = opened(states[-4])
    record, pool = state["parts"]
    assert pool["items"] == 48
    resumed = chain.batch(4).workers(0)
    resumed.load_state_dict(signed({**state, "parts": [record, {**pool, "items": None}]}))
    with pytest.raises(stoker.StateError, match=r"a pool has had 5\d of 48 items"):
        list(resumed)
