"""Scans: called in order for any workers, and exact behind every resume."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import pickle
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.testing import check_resume
from strategies import GoesOn, few, one_in, opened, signed, stream

KEYS = 40


def key_of(number: int) -> int:
    return number * 7 % KEYS


def deduplicated(seen: set[int], number: int) -> tuple[set[int], Any]:
    """Keep the first example of each key; written in place."""
    if key_of(number) in seen:
        return seen, stoker.DROP
    seen.add(key_of(number))
    return seen, number


def counted(count: int, number: int) -> tuple[int, Any]:
    """Number what comes, and leave out every fifth."""
    return count + 1, stoker.DROP if count % 5 == 4 else (count, number)


def averaged(state: dict[str, float], number: int) -> tuple[dict[str, float], Any]:
    """Return the running mean beside the example; written in place."""
    state["n"] += 1
    state["mean"] += (number - state["mean"]) / state["n"]
    return state, {"number": number, "mean": state["mean"]}


def windowed(last: list[int], number: int) -> tuple[list[int], Any]:
    """Return the last three numbers; the example is the state itself."""
    last.append(number)
    del last[:-3]
    return last, last if len(last) == 3 else stoker.DROP


def summed(total: Any, number: int) -> tuple[Any, Any]:
    total += number
    return total, total.copy()


def to_bytes(total: Any) -> bytes:
    return bytes(total.tobytes())


def from_bytes(data: bytes) -> Any:
    return np.frombuffer(data, np.int64).copy()


@stoker.thread_safe
def is_kept(number: int) -> bool:
    return number % 3 > 0


def is_even(number: int) -> bool:
    return number % 2 == 0


@stoker.thread_safe
def failing_on_some(number: int) -> int:
    if number % 11 == 5:
        raise ValueError("it is one of those")
    return number


@stoker.thread_safe
def unchanged(number: int) -> int:
    return number


@stoker.thread_safe
def jittered(number: int, rng: np.random.Generator) -> Any:
    return np.array([number, rng.integers(1_000_000)])


def tokens(pair: Any) -> Any:
    return np.full(pair[1] % 9, pair[0])


def source(examples: int = 4 * KEYS, **given: Any) -> stoker.Pipeline:
    return stoker.from_dataset(range(examples), seed=5, **given).shuffle()


def distinct(pipeline: stoker.Pipeline) -> stoker.Pipeline:
    return pipeline.scan(deduplicated, set(), dump=sorted, load=set)


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch]


FOLDS: dict[str, tuple[Callable[[stoker.Pipeline], stoker.Pipeline], Callable[..., Any], Any]] = {
    "distinct": (distinct, deduplicated, set()),
    "counted": (lambda p: p.scan(counted, 0), counted, 0),
    "averaged": (
        lambda p: p.scan(averaged, {"n": 0, "mean": 0.0}), averaged, {"n": 0, "mean": 0.0}
    ),
    "windowed": (lambda p: p.scan(windowed, []), windowed, []),
}  # fmt: skip


@given(
    examples=st.integers(0, 90),
    fold=st.sampled_from(list(FOLDS)),
    workers=st.sampled_from([0, 1, 4]),
    filtered=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_it_is_called_in_the_order_of_the_examples(
    examples: int, fold: str, workers: int, filtered: bool, epoch: int
) -> None:
    scanned, fn, state = FOLDS[fold]
    before = source(examples).map(unchanged).workers(workers)
    before = before.filter(is_even) if filtered else before
    train, state = scanned(before), copy.deepcopy(state)
    before.set_epoch(epoch)
    train.set_epoch(epoch)
    expected = []
    for number in before:
        state, made = fn(state, number)
        if made is not stoker.DROP:
            expected.append(copy.deepcopy(made))
    assert list(train) == expected


def test_processes_have_the_same_stream() -> None:
    def build(workers: int, kind: str) -> stoker.Pipeline:
        train = distinct(source().map(unchanged).filter(is_kept)).random_map(jittered).batch(4)
        return train.workers(workers, kind=kind)

    alone = stream(build(0, "thread"))
    assert stream(build(2, "process")) == alone
    assert stream(build(4, "thread")) == alone


def test_one_call_at_a_time_and_each_epoch_from_the_state_given() -> None:
    alone = threading.Lock()
    calls = []

    def fn(state: dict[str, list[int]], number: int) -> tuple[Any, Any]:
        assert alone.acquire(blocking=False)
        calls.append(number)
        state["seen"].append(number)
        alone.release()
        return state, len(state["seen"])

    state: dict[str, list[int]] = {"seen": []}
    train = source(90).map(unchanged).scan(fn, state).batch(8).workers(4)
    for _ in range(3):
        assert numbers(train) == list(range(1, 91))
    assert state == {"seen": []}
    assert len(calls) == 3 * 90
    assert calls[:90] != calls[90:180], "shuffled anew"


KINDS: dict[str, Callable[[], stoker.Pipeline]] = {
    "single examples": lambda: distinct(source()),
    "batches": lambda: distinct(source()).batch(3),
    "whole batches": lambda: distinct(source()).batch(7, drop_last=True),
    "filter and map before": lambda: distinct(source().filter(is_kept).map(unchanged)).batch(2),
    "skips before": lambda: distinct(source(max_errors=20).map(failing_on_some)).batch(3),
    "filter behind": lambda: distinct(source()).filter(is_even).random_map(jittered).batch(3),
    "example echo": lambda: distinct(source()).echo(2, pool=9).random_map(jittered).batch(3),
    "fractional echo": lambda: distinct(source()).random_map(jittered).echo(1.5, pool=8).batch(4),
    "batch echo": lambda: distinct(source()).batch(3).echo(2, pool=3),
    "filter, echo, filter": lambda: (
        source(max_errors=20).map(failing_on_some).filter(is_kept).scan(counted, 0)
        .filter(stoker.thread_safe(lambda n: n % 4 > 0), on=1).echo(1.5, pool=8).batch(4)
    ),
    "a rank's part": lambda: (
        distinct(stoker.from_dataset(range(320), seed=1).shuffle().shard(rank=1, world_size=2))
        .batch(3).steps(10)
    ),
    "taken": lambda: distinct(source().take(90)).batch(4),
    "cache before": lambda: distinct(source().cache("1MiB")).batch(4),
    "two scans": lambda: distinct(source()).scan(counted, 0).echo(2, pool=9).batch(3),
    "packed": lambda: distinct(source()).scan(counted, 0).map(tokens).pack(8).batch(2),
    "running mean": lambda: (
        source(60).scan(averaged, {"n": 0, "mean": 0.0}).echo(2, pool=8).batch(4)
    ),
    "the state itself": lambda: source(60).scan(windowed, []).echo(1.5, pool=8).batch(4),
    "bytes": lambda: (
        source(60).scan(summed, np.zeros(2, np.int64), dump=to_bytes, load=from_bytes)
        .echo(2, pool=8).batch(4)
    ),
    "repeated": lambda: distinct(source()).batch(3).repeat().steps(45),
    "repeated echo": lambda: distinct(source(90)).echo(2, pool=9).batch(4).repeat().steps(50),
    "a mixture before": lambda: distinct(
        stoker.mix([stoker.from_dataset(range(90)).shuffle(), source()], weights=[2, 1], seed=4)
    ).batch(4),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "workers"), one_in(3, itertools.product(KINDS, [0, 3])))
def test_it_resumes_at_every_batch(kind: str, workers: int) -> None:
    every = 1 if workers == 0 else 4
    assert check_resume(lambda: KINDS[kind]().workers(workers), every=every) > 1


@few(24)
@given(
    examples=st.integers(2, 120),
    batch=st.integers(1, 5),
    factor=st.sampled_from([1, 1.25, 2, 3]),
    points=st.lists(st.sampled_from(["before", "behind", "batch"]), unique=True),
    steps=st.none() | st.integers(1, 60),
    workers=st.sampled_from([0, 2]),
    data=st.data(),
)
def test_whatever_is_left_comes_behind_a_resume(
    examples: int,
    batch: int,
    factor: float,
    points: list[str],
    steps: int | None,
    workers: int,
    data: st.DataObject,
) -> None:
    def build() -> stoker.Pipeline:
        train = source(examples)
        train = train.filter(is_kept) if "before" in points else train
        train = distinct(train).scan(counted, 0)
        train = (
            train.filter(stoker.thread_safe(lambda n: n % 4 < 3), on=0)
            if "behind" in points
            else train
        )
        if "batch" in points:
            train = train.batch(batch).echo(factor, pool=4)
        else:
            train = train.echo(factor, pool=3 * batch + 3).batch(batch)
        train = train.workers(workers)
        return train if steps is None else train.repeat().steps(steps)

    expected = stream(build())
    at = data.draw(st.integers(0, len(expected)))
    train = build()
    with iter(train) as batches:
        for _ in range(at):
            next(batches)
        state = json.loads(json.dumps(train.state_dict()))
    again = build()
    again.load_state_dict(state)
    if at < len(expected):
        assert stream(again) == expected[at:]
        # And once more from a state that was saved right behind a resume, and in its middle.
        again.load_state_dict(state)
        middle = data.draw(st.integers(0, len(expected) - at - 1))
        with iter(again) as batches:
            for _ in range(middle):
                next(batches)
            state = again.state_dict()
        third = build()
        third.load_state_dict(state)
        assert stream(third) == expected[at + middle :]


def test_a_resume_begins_with_a_state_of_later_than_the_beginning() -> None:
    calls: list[int] = []

    def fn(count: int, number: int) -> tuple[int, int]:
        calls.append(number)
        return count + 1, number

    def build() -> stoker.Pipeline:
        return stoker.from_dataset(range(3_000), seed=0).scan(fn, 0).batch(10).workers(0)

    train = build()
    with iter(train) as batches:
        for _ in range(290):
            next(batches)
        state = train.state_dict()
    (begin,) = opened(state)["parts"]
    assert 1 <= begin["input"] <= 2_900
    calls.clear()
    again = build()
    again.load_state_dict(state)
    assert numbers(again) == list(range(2_900, 3_000))
    assert calls == list(range(begin["input"], 3_000))
    assert len(json.dumps(state)) < 1_000


def test_an_echo_that_follows_the_stall_is_replayed_and_goes_on_behind_a_resume() -> None:
    def auto() -> stoker.Pipeline:
        return distinct(source()).echo().random_map(jittered).batch(3).steps(12)

    train = auto()
    with iter(train) as batches:
        for _ in range(7):
            next(batches)
        state = train.state_dict()
        tail = [batch.tolist() for batch in batches]
    again = auto().replay(train.record())
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again][: len(tail)] == tail


def test_late_acknowledgements_and_positions_that_are_counted_to() -> None:
    def build() -> stoker.Pipeline:
        return distinct(source()).batch(2)

    whole = stream(build())
    train = build()
    train.acknowledge(0)
    with iter(train) as batches:
        for _ in range(9):
            next(batches)
        train.acknowledge(4)
        state = json.loads(json.dumps(train.state_dict()))
    again = build()
    again.load_state_dict(state)
    assert stream(again) == whole[4:]
    counted_to = build()
    counted_to.resume_at(5)
    assert stream(counted_to) == whole[5:]


def test_maps_may_write_into_an_example_that_is_the_state() -> None:
    def spoiled(window: list[int]) -> Any:
        found = list(window)
        window.clear()
        return found

    train = source(30).scan(windowed, []).map(spoiled).workers(2)
    order = list(source(30).workers(0))
    assert list(train) == [order[i : i + 3] for i in range(28)]


@dataclass(frozen=True)
class Window:
    held: list[int]


FORMS: list[Callable[[list[int]], Any]] = [
    lambda held: held,
    lambda held: (held,),
    lambda held: {"held": held},
    lambda held: OrderedDict(held=held),
    Window,
]


@pytest.mark.parametrize("form", FORMS)
def test_an_example_of_any_form_shares_nothing_with_the_state(form: Any) -> None:
    def filled(state: list[int], number: int) -> Any:
        if len(state) == 3:
            state.clear()
        state.append(number)
        return state, form(state) if len(state) == 3 else stoker.DROP

    found = list(stoker.from_dataset(range(9)).scan(filled, []).workers(0))
    assert found == [form([n, n + 1, n + 2]) for n in (0, 3, 6)]


def forgetful(state: int, number: int) -> Any:
    return {7: number, 8: (state, None), 9: [state, number]}.get(number, (state, number))


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (7, r"returned a int, 7: return a pair, \(state, example\) or \(state, stoker.DROP\)"),
        (8, "returned None for the example: return the example, or stoker.DROP"),
        (9, r"returned a list, \[0, 9\]: return a pair"),
    ],
)
def test_what_is_no_pair_of_a_state_and_an_example(number: int, says: str) -> None:
    train = stoker.from_dataset([1, 2, number, 3], seed=0).scan(forgetful, 0).batch(2)
    with pytest.raises(stoker.StageError, match=says) as raised:
        list(train)
    assert (raised.value.stage, raised.value.index) == ("scan(forgetful)", 2)
    assert isinstance(raised.value.__cause__, TypeError)


@pytest.mark.parametrize("workers", [0, 2])
def test_its_errors_name_the_example_and_no_budget_skips_them(workers: int, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.bin").write_bytes(bytes([number]))

    def fails(total: int, file: Any) -> tuple[int, int]:
        if file.data == bytes([13]):
            raise KeyError("thirteen")
        return total + 1, total

    files = stoker.from_files(str(tmp_path / "*.bin"), seed=0, max_errors=20)
    for train in (
        files.scan(fails, 0).batch(4),
        files.scan(fails, 0).batch(8, drop_last=True),
        files.scan(fails, 0).filter(lambda n: n % 2 > 0).batch(4),
        files.scan(fails, 0).echo(2, pool=9).batch(4),
    ):
        with pytest.raises(stoker.StageError, match="thirteen") as raised:
            list(train.workers(workers))
        assert (raised.value.stage, raised.value.index) == ("scan(fails)", 13)
        assert str(raised.value.path).endswith("13.bin")


def test_a_run_goes_on_behind_an_error_with_the_function_mended() -> None:
    def build(broken: bool) -> stoker.Pipeline:
        def fn(state: list[int], number: int) -> tuple[list[int], int]:
            state.append(number)
            if broken and len(state) == 21:
                raise ValueError("not this one")
            return state, sum(state)

        return source(60).scan(fn, []).batch(4).workers(2)

    whole, train = stream(build(False)), build(True)
    batches = iter(train)
    for _ in range(5):
        next(batches)
    with pytest.raises(stoker.StageError, match="not this one"):
        next(batches)
    again = build(False)
    again.load_state_dict(train.state_dict())
    assert stream(again) == whole[5:]


def test_what_failed_before_it_is_not_given_to_it() -> None:
    train = source(30).map(failing_on_some).scan(counted, 0).batch(4)
    with pytest.raises(stoker.StageError, match=r"map\(failing_on_some\) failed on example"):
        list(train)


def test_a_function_that_makes_fewer_behind_a_resume() -> None:
    def build(least: int) -> stoker.Pipeline:
        def fn(state: int, number: int) -> tuple[int, Any]:
            return state, number if number >= least else stoker.DROP

        return stoker.from_dataset(range(40), seed=0).scan(fn, 0).batch(4).echo(2, pool=3)

    train = build(0)
    with iter(train) as batches:
        for _ in range(9):
            next(batches)
        state = train.state_dict()
    again = build(40)
    again.load_state_dict(state)
    with pytest.raises(stoker.StateError, match="makes fewer examples than before the resume"):
        list(again)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (set(), "there is a set in it"),
        ((1, 2), "there is a tuple in it"),
        ({1: 2}, "the key 1"),
        ({None: 2}, "the key None"),
        (defaultdict(int), "collections.defaultdict"),
        ({"a": [OrderedDict()]}, "collections.OrderedDict"),
        (np.float64(2), "numpy.float64"),
        ([[]] * 2, "the same list is in it twice"),
        (lambda: 0, "function"),
        ([1, b"2"], "bytes"),
    ],
)
def test_a_state_that_json_would_change_is_refused(state: Any, says: str) -> None:
    with pytest.raises(TypeError, match=rf"state of scan\(counted\).*{says}.*dump= and load="):
        source().scan(counted, state)


def test_a_state_that_becomes_another_is_an_error_of_the_run() -> None:
    def fn(state: Any, number: int) -> tuple[Any, int]:
        return {number}, number

    with pytest.raises(TypeError, match=r"state of scan\(fn\) cannot be saved.*set.*dump= and"):
        list(source().scan(fn, None).batch(4).workers(2))


def test_states_of_several_kinds_come_back_the_same() -> None:
    odd = {"z": [1.5, float("inf"), -0.0, True, None, 10**30], "a": {"": "ü\ud800"}, "b": []}
    seen: list[Any] = []

    def fn(state: Any, number: int) -> tuple[Any, int]:
        seen.append(copy.deepcopy(state))
        return state, number

    train = source(9).scan(fn, odd).workers(0)
    with iter(train) as examples:
        for _ in range(5):
            next(examples)
        state = json.loads(json.dumps(train.state_dict(), sort_keys=True))
    train.load_state_dict(state)
    list(train)
    assert all(repr(each) == repr(odd) for each in seen)
    assert len(seen) >= 9


def raising(*_: object) -> Any:
    raise KeyError("no")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dump": list}, "dump= and load= together"),
        ({"load": list}, "dump= and load= together"),
        ({"dump": 3, "load": list}, "dump= is a function, not int"),
        ({"dump": set, "load": list}, "what dump= makes of it must be.*a set in it"),
        ({"dump": raising, "load": list}, "what dump= makes of it.*no"),
        ({"dump": list, "load": raising}, "load= of scan.counted. does not take what dump="),
    ],
)
def test_wrong_ways_to_dump_and_load(given: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        source().scan(counted, [], **given)


def test_wrong_functions() -> None:
    with pytest.raises(TypeError, match="needs a function, not int"):
        source().scan(3, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"fn\(state, example\), which unchanged.* give it two"):
        source().scan(unchanged, 0)  # type: ignore[arg-type]


def saved(build: Callable[[], stoker.Pipeline]) -> dict[str, Any]:
    train = build()
    with iter(train) as batches:
        for _ in range(6):
            next(batches)
        return train.state_dict()


def test_states_that_cannot_be_are_refused() -> None:
    def build() -> stoker.Pipeline:
        return source(60).scan(counted, 0).echo(2, pool=8).batch(4).workers(0)

    state = saved(build)
    fields = opened(state)
    pool = fields["parts"][1]
    right = {"kind": "scan", "input": 0, "output": 0, "json": "0"}
    crafts: Any = (
        [], [right] * 2, [{}], [0], [{**right, "kind": "pack"}],
        [{**right, "input": -1}], [{**right, "input": 61}], [{**right, "input": 2.0}],
        [{**right, "output": 1}], [{**right, "input": 60, "output": 60}],
        [{**right, "json": 0}], [{**right, "json": "{"}], [{**right, "json": "[" * 100_000}],
        [{**right, "json": "9" * 5_000}],
        [{"kind": "scan", "input": 0, "output": 0, "bytes": "AAAA"}],
        [{"kind": "scan", "input": 0, "output": 0, "bytes": "A"}],
    )  # fmt: skip
    for scans in crafts:
        crafted = signed({**fields, "parts": [*scans, pool]})
        train = build()
        with pytest.raises(stoker.StateError, match="damaged"):  # noqa: PT012 by iter() at last
            train.load_state_dict(crafted)
            iter(train)
    whole, train = stream(build()), build()
    train.load_state_dict(state)
    assert stream(train) == whole[6:]


def test_what_load_does_not_take_is_a_damaged_state() -> None:
    def build(load: Any) -> stoker.Pipeline:
        return source(60).scan(deduplicated, set(), dump=sorted, load=load).batch(2)

    def fails(found: Any) -> Any:
        if found:
            raise LookupError("no such state")
        return set()

    with pytest.raises(stoker.StateError, match=r"scan\(deduplicated\).*no such state"):
        build(fails).load_state_dict(saved(functools.partial(build, set)))


def test_drop_is_one_object() -> None:
    assert pickle.loads(pickle.dumps(stoker.DROP)) is stoker.DROP
    assert copy.deepcopy([stoker.DROP])[0] is stoker.DROP
    assert repr(stoker.DROP) == "stoker.DROP"


def test_streams_are_scanned_and_saved_between_epochs() -> None:
    def build() -> stoker.Pipeline:
        return distinct(stoker.from_iterable(lambda: iter(range(3 * KEYS)), seed=0)).batch(8)

    train = build()
    for _ in range(2):
        assert numbers(train) == list(range(KEYS))
    again = build()
    again.load_state_dict(train.state_dict())
    assert numbers(again) == list(range(KEYS))
    with iter(train) as batches:
        next(batches)
        with pytest.raises(stoker.StateError, match="no state in its middle"):
            train.state_dict()


def test_a_stream_with_a_state_has_none_in_its_middle_behind_a_scan() -> None:
    train = stoker.from_iterable(GoesOn(60), seed=0).scan(counted, 0).batch(8)
    with iter(train) as batches:
        next(batches)
        with pytest.raises(stoker.StateError, match=r"scan\(counted\) holds or has left out"):
            train.state_dict()


def test_ranks_scan_their_own_parts() -> None:
    def rank(number: int) -> list[int]:
        part = stoker.from_dataset(range(80), seed=3).shuffle().shard(rank=number, world_size=2)
        train = part.scan(lambda n, number: (n + 1, (n, number)), 0).steps(40)
        counts, found = zip(*train, strict=True)
        assert list(counts) == list(range(40))
        return list(found)

    assert sorted(rank(0) + rank(1)) == list(range(80))
    even = (
        stoker.from_dataset(range(80), seed=3).shard(rank=0, world_size=2).scan(counted, 0).batch(4)
    )
    with pytest.raises(ValueError, match=r"scans and max_errors=.*steps"):
        iter(even)


def test_where_it_may_stand() -> None:
    begin = source()
    for before, name in (
        (begin.batch(2), r"batch\(2\)"),
        (begin.echo(2, pool=8), r"echo\(2"),
        (begin.pack(4), r"pack\(4\)"),
    ):
        with pytest.raises(ValueError, match=rf"cannot follow {name}.*before .echo\(\), .pack"):
            before.scan(counted, 0)
    with pytest.raises(ValueError, match="a loader yields batches"):
        stoker.from_loader([1]).scan(counted, 0)
    scanned = stoker.from_dataset(range(9), seed=0).scan(counted, 0)
    for behind in (
        lambda p: p.shuffle(),
        lambda p: p.take(3),
        lambda p: p.skip(3),
        lambda p: p.cache("1MiB"),
        lambda p: p.shard(rank=0, world_size=2),
    ):
        with pytest.raises(ValueError, match=r"cannot follow scan\(counted\)"):
            behind(scanned)
    with pytest.raises(ValueError, match="part"):
        stoker.mix([scanned, begin])
    with pytest.raises(TypeError, match="dropped"):
        len(scanned)
    assert len(scanned.batch(2).steps(3)) == 3


def test_it_is_shown() -> None:
    train = distinct(source()).batch(8)
    assert "  .scan(deduplicated)  one example at a time, in order; may leave some out\n" in str(
        train
    )
    list(train)
    stats = train.stats()
    (scan,) = (stage for stage in stats.stages if stage.name == "scan(deduplicated)")
    assert scan.examples == 4 * KEYS
    assert scan.seconds > 0
    assert stats.filtered_examples == 3 * KEYS
    assert "120 by filters and scans" in str(stats)
