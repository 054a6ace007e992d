"""States: taken at the last yielded batch, small, exact, and refused where they do not fit."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import warnings
from collections.abc import Set
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import stoker
from strategies import (
    Examples,
    Faulty,
    Spec,
    built,
    few,
    frozen,
    paths_of,
    small_pools_allowed,
    specs,
    stream,
    tails_agree,
    through_json,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*are fewer than.*ranks")

INLINE, THREADS, PROCESS = (0, "thread"), (2, "thread"), (1, "process")
KINDS = st.sampled_from([INLINE, INLINE, THREADS])
WITHOUT = frozenset[int]()


def echoed(examples: int, batch: int, *echo: Any, **more: Any) -> Spec:
    return Spec(examples, batch, echoes=(echo,), **more)


@few(30)
@given(
    specs(max_examples=40, byte_pools=True, max_filters=3, ranks=True),
    st.just(WITHOUT) | st.frozensets(st.integers(0, 39), max_size=15),
    KINDS,
    KINDS,
)
@example(echoed(0, 3, "before", Fraction(2), None), WITHOUT, INLINE, THREADS)
@example(echoed(1, 3, "before", Fraction(5), 3), WITHOUT, INLINE, INLINE)
@example(echoed(1, 3, "batch", Fraction(2), 1), WITHOUT, INLINE, INLINE)
@example(echoed(26, 4, "device", Fraction(3, 2), "1KB", to=True), WITHOUT, THREADS, INLINE)
@example(echoed(0, 3, "before", 2, None, filters=(("first", 2, 0),)), WITHOUT, INLINE, INLINE)
@example(echoed(1, 3, "before", 5, 3, filters=(("middle", 1, 0),)), WITHOUT, INLINE, INLINE)
@example(echoed(16, 4, "after", 2, 12, filters=(("middle", 3, 0),)), WITHOUT, INLINE, PROCESS)
def test_saved_before_every_batch_the_tail_is_the_same(
    spec: Spec, bad: Set[int], saved: tuple[int, str], loaded: tuple[int, str]
) -> None:
    """Whatever is left out, on each rank, from any workers to any others."""
    if bad:  # uses fail one by one: with an echo before, more than there are examples
        spec = replace(spec, source="dataset", max_errors="100%")
        if spec.shard:
            rank, world, _, anew = spec.shard
            spec = replace(spec, shard=(rank, world, True, anew))

    def build(s: Spec, workers: int, kind: str) -> stoker.Pipeline:
        return built(s, workers, kind, Faulty(s.examples, bad) if bad else None)

    tails_agree(spec, lambda s: build(s, *saved), lambda s: build(s, *loaded))


MANY: dict[str, tuple[Spec, Any, list[int]]] = {
    "a pool": (  # of 8, which keeps a snapshot every 64 steps: 375 steps prune and pass several
        Spec(500, 4, echoes=(("before", Fraction(3), 8),)),
        (),
        [63, 64, 65, 91, 128, 129, 182, 192, 193, 200, 273, 364, 374],
    ),
    "what is left out": (  # every 64 outputs what no resume needs is forgotten
        Spec(
            300,
            2,
            filters=(("first", 7, 0), ("middle", 5, 0), ("last", 3, 0)),
            echoes=(("before", Fraction(3), 8),),
            max_errors="100%",
        ),
        range(5, 300, 29),
        [63, 64, 65, 129, 192],
    ),
}


@pytest.mark.parametrize("case", MANY)
def test_many_steps_and_snapshots_are_replayed(case: str) -> None:
    spec, bad, saved = MANY[case]

    def build() -> stoker.Pipeline:
        return built(spec, 0, data=Faulty(spec.examples, bad))

    with small_pools_allowed():
        pipeline = build()
        whole, states = [], {}
        for number, batch in enumerate(pipeline, 1):
            whole.append(frozen(batch))
            if number in saved:
                states[number] = through_json(pipeline.state_dict())
    assert list(states) == saved
    for number, state in states.items():
        restored = build()
        restored.load_state_dict(state)
        assert stream(restored) == whole[number:]
        assert restored.stats().skipped_examples == pipeline.stats().skipped_examples
        assert restored.stats().filtered_examples == pipeline.stats().filtered_examples


def test_the_state_after_a_break_is_that_of_the_last_batch_that_was_used() -> None:
    spec = Spec(40, 4, echoes=(("before", Fraction(2), None),))
    whole = stream(built(spec, 0))
    pipeline = built(spec, 2)
    for number, _ in enumerate(pipeline, 1):
        if number == 5:
            break
    restored = built(spec, 0)
    restored.load_state_dict(pipeline.state_dict())
    assert stream(restored) == whole[5:]
    pipeline.load_state_dict(pipeline.state_dict())  # and the same pipeline can go back there
    assert stream(pipeline) == whole[5:]


@pytest.mark.parametrize("ended", [False, True])
def test_a_state_at_the_last_batch_is_one_between_epochs(ended: bool) -> None:
    spec = Spec(10, 4, echoes=(("before", Fraction(2), None),))
    pipeline = built(spec, 0)
    iterator = iter(pipeline)
    for _ in range(spec.outputs):
        next(iterator)
    clock = pipeline.counts
    if ended:
        assert next(iterator, None) is None
    state = through_json(pipeline.state_dict())
    assert next(iterator, None) is None
    second = stream(pipeline)
    restored = built(spec, 0)
    restored.load_state_dict(state)
    assert (restored.epoch, restored.counts) == (1, clock)
    assert stream(restored) == second


def test_a_drawn_seed_comes_with_the_state() -> None:
    def build() -> stoker.Pipeline:
        return stoker.from_dataset(Examples(30)).shuffle().echo(2).batch(4)

    pipeline = build()
    iterator = iter(pipeline)
    next(iterator)
    state = through_json(pipeline.state_dict())
    tail = [frozen(batch) for batch in iterator]
    restored = build()
    restored.load_state_dict(state)
    assert restored.seed == pipeline.seed
    assert stream(restored) == tail
    assert stream(restored) == stream(pipeline)


def test_a_pool_of_bytes_keeps_its_size_in_items() -> None:
    class Growing(Examples):
        """The first example is the smallest: an estimate from another would differ."""

        def __getitem__(self, index: int) -> Any:
            return {"id": index, "x": np.zeros(1 + index)}

    def build() -> stoker.Pipeline:
        data = stoker.from_dataset(Growing(60), seed=0).echo(2, pool="2KB")
        return data.map(lambda x: x.sum(), on="x").batch(4).workers(0)

    pipeline = build()
    iterator = iter(pipeline)
    for _ in range(20):
        next(iterator)
    pool = pipeline.stats().pool
    assert pool is not None
    state = through_json(pipeline.state_dict())
    tail = [frozen(batch) for batch in iterator]
    restored = build()
    restored.load_state_dict(state)
    assert stream(restored) == tail
    again = restored.stats().pool
    assert again is not None
    assert again.size == pool.size
    assert stream(restored) == stream(pipeline)


@pytest.mark.parametrize(
    ("factor", "items", "batch"),
    [(2.1, 20_000, 250), (5, 20_000, 250), (1.5, 40_000, 250), (300, 20_000, 50)],
)
def test_a_state_takes_a_byte_an_item_and_4_kb(factor: float, items: int, batch: int) -> None:
    source = stoker.from_arrays(np.arange(4 * items), seed=0).shuffle()
    chain = source.echo(factor, pool=items).batch(batch).workers(0)
    for number, _ in enumerate(chain):
        if number % 40 == 39:
            pool = chain.stats().pool
            assert pool is not None
            assert len(json.dumps(chain.state_dict())) <= max(pool.held, items // 4) + 4096
        if number == 2 * items // batch + 10:
            break


# -- refused


def halfway() -> tuple[Spec, dict[str, Any]]:
    spec = Spec(30, 4, seed=5, echoes=(("before", Fraction(2), 12),))
    pipeline = built(spec, 0)
    with iter(pipeline) as iterator:
        for _ in range(6):
            next(iterator)
        return spec, through_json(pipeline.state_dict())


OTHERS: dict[str, dict[str, Any]] = {
    "seed": {"seed": 6},
    "length": {"examples": 31},
    "drop_last": {"drop_last": True},
    "order": {"shuffle": False},
    "factor": {"echoes": (("before", Fraction(21, 10), 12),)},
    "pool": {"echoes": (("before", Fraction(2), 13),)},
    "insertion point": {"echoes": (("after", Fraction(2), 12),)},
    "no echo": {"echoes": ()},
    "another map": {"batch_map": True},
    "another source": {"source": "arrays"},
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_state_of_another_pipeline_is_refused(what: str) -> None:
    spec, state = halfway()
    other = built(Spec(**{**vars(spec), **OTHERS[what]}), 0)
    before = other.state_dict()
    with pytest.raises(stoker.StateError, match="belongs to another") as caught:
        other.load_state_dict(state)
    assert "\n" not in str(caught.value)
    assert other.state_dict() == before


def test_other_workers_and_devices_are_no_other_pipeline() -> None:
    spec, state = halfway()
    for other in (built(spec, 3), built(Spec(**{**vars(spec), "to": True}), 0)):
        other.load_state_dict(state)
        assert len(stream(other)) == spec.outputs - 6


@pytest.mark.parametrize("wrong", [None, 3, "state", [], {}, {"seed": 3}])
def test_what_is_no_state_is_refused(wrong: Any) -> None:
    with pytest.raises(stoker.StateError, match="no state of a stoker pipeline"):
        built(Spec(3, 2)).load_state_dict(wrong)
    spec, state = halfway()
    with pytest.raises(stoker.StateError, match="format 999"):
        built(spec).load_state_dict({**state, "format": 999})


def nudged(value: Any, data: st.DataObject) -> Any:
    """Return something like ``value``: damage that has the right type."""
    if isinstance(value, int):
        return value + data.draw(st.sampled_from([-(10**6), -1, 1, 10**9]))
    if isinstance(value, str) and value:
        at = data.draw(st.integers(0, len(value) - 1))
        return value[:at] + ("A" if value[at] != "A" else "B") + value[at + 1 :]
    if isinstance(value, list) and value:
        return value[:-1]
    return None


@given(st.data())
def test_a_damaged_state_is_refused_when_it_is_loaded(data: st.DataObject) -> None:
    spec, state = halfway()
    path = data.draw(st.sampled_from(paths_of(state)), label="where")
    how = data.draw(st.sampled_from(["removed", "replaced", "nudged"]), label="how")
    damaged = copy.deepcopy(state)
    at: Any = damaged
    for step in path[:-1]:
        at = at[step]
    if how == "removed":
        del at[path[-1]]
    elif how == "nudged":
        at[path[-1]] = nudged(at[path[-1]], data)
    else:
        at[path[-1]] = data.draw(
            st.sampled_from([None, "x", -1, 2.5, [], {}, [[]], {"x": 1}, 10**9]), label="by"
        )
    assume(damaged != state)
    pipeline = built(spec, 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the state was saved under NumPy")
        with pytest.raises(stoker.StateError):
            pipeline.load_state_dict(damaged)
    assert pipeline.epoch == 0
    assert len(stream(pipeline)) == spec.outputs  # and the pipeline is as it was


def test_a_state_from_another_numpy_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(np, "__version__", "1.13.3")
        spec, state = halfway()
    with pytest.warns(UserWarning, match=r"NumPy 1\.13\.3.*may differ") as caught:
        built(spec, 0).load_state_dict(state)
    assert caught[0].filename == __file__


# -- the test that users can run


def test_check_resume_finds_a_map_that_is_not_deterministic() -> None:
    from stoker import testing

    calls = itertools.count()

    def drifting(x: Any) -> Any:
        return x + next(calls)

    def build() -> stoker.Pipeline:
        p = stoker.from_dataset(Examples(12), seed=0).map(drifting, on="x").echo(2).batch(4)
        return p.workers(0)

    with pytest.raises(AssertionError):
        testing.check_resume(build)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
@pytest.mark.parametrize("epochs", [stoker.Pipeline.repeat, lambda p: p])
def test_a_copy_goes_on_where_the_pipeline_is_and_moves_by_itself(copied: Any, epochs: Any) -> None:
    train = epochs(stoker.from_arrays(np.arange(12)).shuffle().echo(2).batch(4)).steps(5).workers(0)
    for move in (None, train.resume_at, None):
        if move is not None:
            move(2)
        twin, going = copied(train), iter(train)
        assert stream(twin) == [
            *map(frozen, itertools.islice(going, 1)),
            *(rest := stream(copied(train))),
        ]
        assert rest == [*map(frozen, going)]
        assert copied(train).epoch == train.epoch
