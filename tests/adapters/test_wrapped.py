"""Under wrappers that try iterators, read ahead or stop at the length nothing is lost."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import stoker
from strategies import (
    Spec,
    built,
    few,
    frozen,
    one_in,
    small_pools_allowed,
    specs,
    stream,
    through_json,
)

VITAL = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


def loader(workers: int = 0) -> Any:
    return DataLoader(Numbers(), 4, num_workers=workers)


def numbers(batches: Any) -> list[list[int]]:
    return [np.asarray(batch).tolist() for batch in batches]


PIPELINES: dict[str, Any] = {
    "inline": lambda: built(Spec(20, 4), 0),
    "threads": lambda: built(Spec(20, 4, echoes=(("before", Fraction(2), None),)), 2),
    "processes": lambda: built(Spec(20, 4), 1, "process"),
    "loader": lambda: stoker.echo(loader(), 2, seed=0),
    "auto": lambda: stoker.from_arrays(np.arange(20), seed=0).shuffle().echo().batch(4),
}


# -- iterators that hand out nothing


@pytest.mark.parametrize("kind", one_in(2, PIPELINES))
@pytest.mark.parametrize("trial", one_in(3, ["dropped", "closed", "with"]))
def test_an_iterator_that_handed_out_nothing_leaves_no_trace(kind: str, trial: str) -> None:
    def tried(pipeline: stoker.Pipeline) -> None:
        iterator = iter(pipeline)
        if trial == "closed":
            iterator.close()
        elif trial == "with":
            with iterator:
                pass

    def where(pipeline: stoker.Pipeline) -> Any:
        state = None if kind == "loader" else pipeline.state_dict()
        return pipeline.epoch, pipeline.counts, pipeline.stats().epoch, state

    plain, pipeline = PIPELINES[kind](), PIPELINES[kind]()
    for epoch in range(3):
        # Two that follow the stall need not take equally many steps.
        expected = where(pipeline if kind == "auto" else plain)
        tried(pipeline)
        assert where(pipeline) == expected
        tried(pipeline)
        if epoch == 1:
            for each in (plain, pipeline):  # left early
                next(iter(each))
            expected = where(pipeline if kind == "auto" else plain)
            tried(pipeline)
            assert where(pipeline) == expected
        elif kind == "auto":
            for each in (plain, pipeline):
                assert {int(i) for batch in each for i in batch} == set(range(20))
        else:
            assert stream(pipeline) == stream(plain)


def test_after_a_state_was_loaded_a_trial_does_not_lose_it() -> None:
    spec = Spec(40, 4, echoes=(("before", Fraction(2), None),))
    whole = stream(built(spec, 0))
    pipeline = built(spec, 0)
    iterator = iter(pipeline)
    for _ in range(3):
        next(iterator)
    restored = built(spec, 2)
    restored.load_state_dict(pipeline.state_dict())
    for _ in range(2):
        iter(restored).close()
        assert restored.state_dict() == pipeline.state_dict()
    assert stream(restored) == whole[3:]


@VITAL
def test_a_stateful_loader_s_state_outlives_a_trial() -> None:
    def build() -> stoker.Pipeline:
        return stoker.from_loader(StatefulDataLoader(Numbers(), 4))

    pipeline = build()
    iterator = iter(pipeline)
    for _ in range(2):
        next(iterator)
    restored = build()
    restored.load_state_dict(pipeline.state_dict())
    iter(restored).close()
    assert numbers(restored) == [[i, i + 1, i + 2, i + 3] for i in range(8, 24, 4)]


def test_an_epoch_that_fails_at_its_first_batch_is_not_spent() -> None:
    broken = [True]

    def fails(value: Any) -> Any:
        if broken:
            raise ArithmeticError
        return value

    pipeline = stoker.from_arrays(np.arange(8), seed=0).map(fails).batch(4)
    with pytest.raises(stoker.StageError):
        list(pipeline)
    assert pipeline.epoch == 0
    broken.clear()
    assert numbers(pipeline) == [[0, 1, 2, 3], [4, 5, 6, 7]]


# -- loops that stop at the length


@pytest.mark.parametrize("kind", [name for name in PIPELINES if name != "auto"])
def test_a_loop_that_stops_at_the_length_has_had_its_epoch(kind: str) -> None:
    plain, pipeline = PIPELINES[kind](), PIPELINES[kind]()
    kept = []
    for epoch in range(3):
        iterator = iter(pipeline)  # draws no warning: warnings are errors here
        kept.append(iterator)
        given = [frozen(batch) for batch in itertools.islice(iterator, len(pipeline))]
        assert given == stream(plain)
        state = pipeline.state_dict()
        assert (state["epoch"], state["step"]) == (epoch + 1, 0)
    next(iter(pipeline))
    assert pipeline.epoch == 3


@VITAL
@pytest.mark.parametrize("echoed", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
def test_a_state_at_a_loader_s_last_batch_begins_the_next_epoch(
    echoed: bool, stateful: bool
) -> None:
    def build() -> stoker.Pipeline:
        source = StatefulDataLoader(Numbers(), 4) if stateful else loader()
        return stoker.echo(source, 2, seed=0) if echoed else stoker.from_loader(source, seed=0)

    pipeline = build()
    iterator = iter(pipeline)
    for _ in range(len(pipeline)):
        next(iterator)
    state = pipeline.state_dict()
    assert next(iterator, None) is None
    restored = build()
    restored.load_state_dict(state)
    assert restored.epoch == 1
    assert numbers(restored) == numbers(pipeline)


def test_a_loader_that_has_more_than_its_length_is_not_at_its_end() -> None:
    class Longer(list[Any]):
        def __len__(self) -> int:
            return 2

    pipeline = stoker.from_loader(Longer([np.arange(2)] * 3))
    iterator = iter(pipeline)
    for _ in range(2):
        next(iterator)
    with pytest.raises(stoker.StateError, match="no state in its middle"):
        pipeline.state_dict()
    assert len(list(iterator)) == 1
    assert pipeline.state_dict()["epoch"] == 1


def test_what_a_loader_raises_behind_its_length_is_raised_where_it_is_asked_for() -> None:
    def batches() -> Any:
        yield from [np.arange(2)] * 2
        raise ArithmeticError

    class Sized:
        def __iter__(self) -> Any:
            return batches()

        def __len__(self) -> int:
            return 2

    pipeline = stoker.from_loader(Sized())
    iterator = iter(pipeline)
    for _ in range(2):
        next(iterator)
    for _ in range(2):
        with pytest.raises(stoker.StateError, match="no state in its middle"):
            pipeline.state_dict()
    with pytest.raises(ArithmeticError):
        next(iterator)


def test_a_loader_whose_state_is_an_attribute_error_has_none() -> None:
    class Wrapper:  # as accelerate's around a plain DataLoader
        def __init__(self) -> None:
            self.inner = loader()

        def __iter__(self) -> Any:
            return iter(self.inner)

        def __len__(self) -> int:
            return len(self.inner)

        def state_dict(self) -> Any:
            return self.dl_state_dict  # type: ignore[attr-defined]

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("there was no state")

    for factor in (2, "auto"):
        pipeline = stoker.echo(Wrapper(), factor, seed=0)
        assert pipeline.state_dict()["loader"] == ()
        iterator = iter(pipeline)
        next(iterator)
        with pytest.raises(stoker.StateError, match="no state in its middle"):
            pipeline.state_dict()
        list(iterator)
        restored = stoker.echo(Wrapper(), factor, seed=0)
        restored.load_state_dict(through_json(pipeline.state_dict()))
        assert restored.epoch == 1
        assert {i for batch in numbers(restored) for i in batch} == set(range(24))


# -- wrappers that read ahead


@pytest.mark.full
@few(8)
@given(
    specs(max_examples=40, max_filters=2),
    st.integers(1, 4),
    st.sampled_from([0, 2]),
)
@example(Spec(300, 2, echoes=(("before", Fraction(4), None),)), 63, 0)
def test_the_state_behind_what_was_acknowledged_is_the_one_that_was_there(
    spec: Spec, ahead: int, workers: int
) -> None:
    with small_pools_allowed():
        at_once, pipeline = built(spec, 0), built(spec, workers)
        states, whole = [at_once.state_dict()], []
        for batch in at_once:
            whole.append(frozen(batch))
            states.append(at_once.state_dict())
        states[-1] = at_once.state_dict()  # behind the end
        pipeline.acknowledge(0)
        iterator = iter(pipeline)
        held: list[Any] = [next(iterator, None) for _ in range(min(ahead, len(whole)))]
        for done in range(1, len(whole) + 1):
            held.append(next(iterator, None))  # past the end at last
            pipeline.acknowledge()
            if done > len(whole) - 3 or done % 7 == 0:
                restored = built(spec, 0)
                restored.load_state_dict(through_json(pipeline.state_dict()))
                if done == len(whole):
                    assert restored.epoch == 1
                else:
                    assert restored.epoch == 0
                    assert stream(restored) == whole[done:]
        iterator.close()
        assert pipeline.epoch == (1 if whole else 0)


def test_what_was_left_behind_when_the_loop_broke_comes_again() -> None:
    spec = Spec(40, 4)
    whole = stream(built(spec, 0))
    pipeline = built(spec, 0)
    iterator = iter(pipeline)
    for _ in range(5):
        next(iterator)
    pipeline.acknowledge(3)
    iterator.close()
    restored = built(spec, 0)
    restored.load_state_dict(pipeline.state_dict())
    assert stream(restored) == whole[3:]


@pytest.mark.parametrize("left", ["break", "close", "fails"])
def test_a_loop_that_is_left_may_acknowledge_late_and_raises_what_is_its_own(left: str) -> None:
    @stoker.thread_safe
    def fails(x: Any) -> Any:
        if int(x) == 399 and left == "fails":
            raise ArithmeticError
        return x

    def build() -> stoker.Pipeline:
        return stoker.from_arrays(np.arange(800), seed=0).map(fails).batch(4)

    pipeline = build()
    pipeline.acknowledge(0)
    iterator = iter(pipeline)
    error = pytest.raises(stoker.StageError, match="Arithmetic")
    with error if left == "fails" else contextlib.nullcontext():
        for number, _ in enumerate(iterator):
            if number == 98 and left != "fails":
                break
    if left != "break":
        iterator.close()
    del iterator
    with pytest.raises(stoker.StateError, match="more than 63 batches"):
        pipeline.state_dict()
    handed_out = 99
    pipeline.acknowledge(97)
    for finished in (97, 98, 99):
        resumed = build()
        resumed.load_state_dict(through_json(pipeline.state_dict()))
        # The batch that failed is nobody's to acknowledge.
        assert resumed.state_dict()["step"] == finished + (finished == 99 and left == "fails")
        if left != "fails":
            assert int(next(iter(resumed))[0]) == 4 * finished
        if finished < handed_out:
            pipeline.acknowledge()
    with pytest.raises(ValueError, match="acknowledged already"):
        pipeline.acknowledge()


def test_under_auto_no_example_is_lost_behind_a_reader_that_runs_ahead() -> None:
    def build() -> stoker.Pipeline:
        return stoker.from_arrays(np.arange(128), seed=0).shuffle().echo().batch(16)

    pipeline = build()
    iterator = iter(pipeline)
    ahead = [next(iterator), next(iterator)]
    seen: set[int] = set()
    for _ in range(4):
        seen |= {int(i) for i in ahead.pop(0)}
        ahead.append(next(iterator))
        pipeline.acknowledge()
    resumed = build()
    resumed.load_state_dict(through_json(pipeline.state_dict()))
    iterator.close()
    assert seen | {int(i) for batch in resumed for i in batch} == set(range(128))


def test_acknowledgements_that_make_no_sense_are_refused() -> None:
    pipeline = built(Spec(400, 4), 0)
    with pytest.raises(ValueError, match="acknowledged already"):
        pipeline.acknowledge()
    iterator = iter(pipeline)
    next(iterator)
    with pytest.raises(ValueError, match="2 batches cannot be finished: 1 were handed out"):
        pipeline.acknowledge(2)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="a whole number from 0"):
            pipeline.acknowledge(wrong)  # type: ignore[arg-type]
    pipeline.acknowledge()
    for _ in range(70):
        next(iterator)
    with pytest.raises(stoker.StateError, match="more than 63 batches"):
        pipeline.state_dict()
    pipeline.acknowledge(10)
    assert pipeline.state_dict()["step"] == 11
    iterator.close()


def test_states_of_a_loader_that_nobody_will_ask_for_are_not_kept() -> None:
    class Counting:
        """Remembers which of its states are alive."""

        def __init__(self) -> None:
            self.at = 0
            self.alive: weakref.WeakSet[Any] = weakref.WeakSet()

        def __iter__(self) -> Any:
            for self.at in range(1000):
                yield np.arange(2)

        def state_dict(self) -> Any:
            state = State({"at": self.at})
            self.alive.add(state)
            return state

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    class State(dict[str, Any]):
        __hash__ = object.__hash__  # type: ignore[assignment]

    source = Counting()
    iterator = iter(stoker.from_loader(source))
    most = 0
    for _ in range(900):
        next(iterator)
        most = max(most, len(source.alive))
    assert most < 150
    iterator.close()
