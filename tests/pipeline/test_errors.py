"""Errors of users' code: of their own type too, and the next batch follows."""

from __future__ import annotations

import abc
import contextlib
import copy
import pickle
import weakref
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from strategies import (
    Faulty,
    Spec,
    built,
    few,
    frozen,
    small_pools_allowed,
    specs,
    through_json,
)

MADE = 0


class Own(Exception):
    """With a constructor and an attribute of its own, and one that a StageError has."""

    __slots__ = ("slot",)

    def __new__(cls, number: int, text: Any) -> Own:
        global MADE
        MADE += 1
        return super().__new__(cls)

    def __init__(self, number: int, text: Any) -> None:
        super().__init__(f"{number}: {text}")
        self.number, self.text, self.slot = number, text, 5

    def __reduce__(self) -> Any:
        return type(self), (self.number, self.text)


class Meta(abc.ABC, Own):
    pass


class Final(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("final")


def system_error() -> OSError:
    return FileNotFoundError(2, "gone", "a.png")


ERRORS: dict[str, tuple[BaseException, dict[str, Any]]] = {
    "ValueError": (ValueError("x"), {}),
    "KeyError": (KeyError("x"), {}),
    "OSError": (system_error(), {"errno": 2, "filename": "a.png"}),
    "UnicodeDecodeError": (UnicodeDecodeError("utf-8", b"abc", 1, 2, "x"), {"start": 1}),
    "Own": (Own(3, "x"), {"text": "x", "slot": 5, "number": None, "index": 7}),
    "Meta": (Meta(3, "x"), {"text": "x"}),
    "a StageError": (stoker.StageError("map(g)", KeyError("x")), {"stage": "map(f)"}),
    "StateError": (stoker.StateError("x"), {}),
}
ALONE: dict[str, BaseException] = {
    "StopIteration": StopIteration(3),
    "StopAsyncIteration": StopAsyncIteration(),
    "a group": ExceptionGroup("x", [ValueError("y")]),
    "Final": Final("x"),
    "no Exception": GeneratorExit(),
}


@pytest.mark.parametrize("what", [*ERRORS, *ALONE])
def test_a_stage_error_is_of_the_type_of_its_cause(what: str) -> None:
    cause, attributes = ERRORS.get(what) or (ALONE[what], {})
    made = MADE
    error = stoker.StageError("map(f)", cause, index=7)
    assert made == MADE
    assert isinstance(error, type(cause)) == (what in ERRORS)
    assert type(error).__name__ == "StageError"
    with contextlib.suppress(TypeError):  # a generator's end, to say
        assert pickle.loads(pickle.dumps(type(error))) is type(error)  # a DataLoader's workers do
        for twin in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert type(twin) is type(error)
            assert str(twin).startswith("map(f) failed on example 7: ")
            assert (twin.stage, twin.index, type(twin.__cause__)) == ("map(f)", 7, type(cause))
            assert {name: getattr(twin, name) for name in attributes} == attributes


@few(30)
@given(
    specs(max_examples=40, max_filters=2, ranks=False),
    st.frozensets(st.integers(0, 39), min_size=1, max_size=6),
    st.sampled_from([(0, "thread"), (0, "thread"), (2, "thread")]),
)
def test_the_next_batch_follows_and_states_are_exact(
    spec: Spec, bad: Set[int], workers: tuple[int, str]
) -> None:
    spec = replace(spec, source="dataset", max_errors=0)

    def make(count: int = 0, kind: str = "thread") -> stoker.Pipeline:
        return built(spec, count, kind, Faulty(spec.examples, bad))

    def taken(pipeline: stoker.Pipeline, states: list[Any] | None = None) -> list[Any]:
        """Return batches, and in the place of errors their text."""
        found: list[Any] = []
        batches = iter(pipeline)
        while True:
            try:
                found.append(frozen(next(batches)))
            except StopIteration:
                return found
            except OSError as error:
                found.append(str(error))
            if states is not None:
                states.append(through_json(pipeline.state_dict()))

    with small_pools_allowed():
        states: list[Any] = []
        whole = taken(make(*workers), states)
        assert whole == taken(make())
        for number, state in enumerate(states, 1):
            resumed = make()
            resumed.load_state_dict(state)
            if not state["finished"]:
                assert taken(resumed) == whole[number:]


def failing(number: Any) -> Any:
    if number in (5, 13):
        raise LookupError(number)
    return number


def test_what_is_lost_counts_as_skipped_in_states_too() -> None:
    train = stoker.from_arrays(np.arange(20), seed=0).map(failing).batch(4).workers(0)
    batches, found = iter(train), list[Any]()
    for _ in range(3):
        with contextlib.suppress(LookupError):
            found.append(next(batches).tolist())
    assert found == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert len(batches) == 2
    stats = train.stats()
    assert (stats.batches, stats.skipped_examples) == (3, 4)
    assert [(skip.index, skip.cause) for skip in stats.skips] == [(5, "LookupError: 5")]
    resumed = stoker.from_arrays(np.arange(20), seed=0).map(failing).batch(4).workers(0)
    resumed.load_state_dict(train.state_dict())
    rest = iter(resumed)
    with pytest.raises(LookupError, match="example 13"):
        next(rest)
    assert [batch.tolist() for batch in rest] == [[16, 17, 18, 19]]
    assert resumed.stats().skipped_examples == 8
    assert resumed.epoch == 1


def test_under_repeat_steps_count_what_is_lost() -> None:
    train = stoker.from_arrays(np.arange(20), seed=0).map(failing).batch(4).workers(0)
    train = train.repeat().steps(7)
    found = []
    for _ in range(2):
        batches = iter(train)
        while True:
            try:
                found.append(next(batches).tolist()[0])
            except StopIteration:
                break
            except LookupError:
                found.append(-1)
    assert found == [0, -1, 8, -1, 16, 0, -1, 8, -1, 16, 0, -1, 8, -1]


def test_a_trainer_acknowledges_only_what_it_was_given() -> None:
    train = stoker.from_arrays(np.arange(20), seed=0).map(failing).batch(4).workers(0)
    train.acknowledge(0)
    batches = iter(train)
    next(batches)
    with pytest.raises(LookupError):
        next(batches)
    next(batches)
    steps = []
    for _ in range(2):
        steps.append(train.state_dict()["step"])
        train.acknowledge()
    assert [*steps, train.state_dict()["step"]] == [0, 2, 3]
    with pytest.raises(ValueError, match="cannot be finished"):
        train.acknowledge()


class Named(OSError):
    """Pickle would call it with its text alone."""

    def __init__(self, path: str, *, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.why = why


def fails_with_a_name(x: Any) -> Any:
    if x == 5:
        raise Named("a.jpg", why="gone")
    return x


@pytest.mark.parametrize("kind", [None, "thread", "process"])
def test_an_error_with_a_constructor_of_its_own_is_itself_wherever_it_comes_from(kind: Any) -> None:
    train = stoker.from_arrays(np.arange(8), seed=0).map(fails_with_a_name).batch(4)
    with pytest.raises(Named, match=r"a\.jpg: gone") as caught:
        list(train.workers(1, kind=kind))
    assert caught.value.why == "gone"


@dataclass(frozen=True)
class Frozen(Exception):
    path: str


@dataclass(frozen=True)
class Bare(Exception):
    pass


class Indexed(Exception):
    @property
    def index(self) -> int:
        return 3


UNUSUAL = {5: Frozen("a.jpg"), 7: Indexed("b"), 10: Bare()}


def fails_unusually(x: Any) -> Any:
    if (error := UNUSUAL.get(int(x))) is not None:
        raise error
    return x


@pytest.mark.parametrize("kind", [None, "thread", "process"])
def test_an_error_that_takes_no_attributes_of_others_is_itself_too(kind: Any) -> None:
    train = stoker.from_arrays(np.arange(12), seed=0).map(fails_unusually).batch(3)
    batches = iter(train.workers(1, kind=kind))
    assert next(batches).tolist() == [0, 1, 2]
    with pytest.raises(Frozen) as frozen_one:
        next(batches)
    with pytest.raises(Indexed) as indexed:
        next(batches)
    with pytest.raises(Bare) as bare:
        next(batches)
    for caught, index in (frozen_one, 5), (indexed, 7), (bare, 10):
        error: Any = caught.value
        assert (error.index, error.path, error.stage) == (index, None, "map(fails_unusually)")
        assert type(error.__cause__) is type(UNUSUAL[index])
    assert frozen_one.value.__cause__.path == "a.jpg"  # type: ignore[union-attr]
    skipping = stoker.from_dataset(range(9), seed=0, max_errors=2).map(fails_unusually)
    assert [int(x) for x in skipping.workers(1, kind=kind)] == [0, 1, 2, 3, 4, 6, 8]


@pytest.mark.parametrize("pool", [None, "1MiB", 8])
def test_a_first_example_that_fails_does_not_end_an_epoch_of_echoes(pool: Any) -> None:
    train = stoker.from_dataset(Faulty(20, {0}), seed=0).echo(2, pool=pool).batch(4).workers(0)
    for epoch in range(2):
        batches, taken, failed = iter(train), 0, 0
        while True:
            try:
                next(batches)
                taken += 1
            except OSError:
                failed += 1
            except StopIteration:
                break
        assert taken + failed == 10
        assert 1 <= failed <= 2
        assert train.epoch == epoch + 1


@pytest.mark.parametrize("repeated", [False, True])
def test_an_error_keeps_no_iterator(repeated: bool) -> None:
    train = stoker.from_arrays(np.arange(20), seed=0).map(failing).batch(4)
    train = train.repeat().steps(9) if repeated else train
    batches = iter(train)
    next(batches)
    with pytest.raises(LookupError):
        next(batches)
    alive = weakref.ref(batches)
    del batches
    assert alive() is None


def test_where_what_follows_is_unknown_the_epoch_ends() -> None:
    def total(state: int, number: Any) -> tuple[int, Any]:
        return state + number, failing(number)

    for train in (
        stoker.from_dataset(range(20), seed=0).scan(total, 0).batch(4),
        stoker.from_iterable(lambda: map(failing, range(20)), seed=0).batch(4),
    ):
        batches = iter(train)
        next(batches)
        with pytest.raises(LookupError) as caught:
            next(batches)
        assert caught.value.__notes__ == [
            "The epoch ends here: what follows depends on what failed."
        ]
        assert next(batches, None) is None
        assert train.counts.steps == 1
